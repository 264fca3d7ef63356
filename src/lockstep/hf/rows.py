"""Data of Hugging Face tasks: rows of a file or a dataset, as tokens.

A row is a mapping. Rows are encoded when they are read, so worker processes do it (data.workers).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lockstep.errors import UserError, plural
from lockstep.hf.local import package

Row = Mapping[str, Any]
Encode = Callable[[Row], dict[str, Any]]


def open_rows(data: Any) -> Any:
    """Return map-style data with rows: of a file, a folder of `datasets`, or the object itself.

    Files: .jsonl (an object a line), .json (a list of objects), .txt (a text a line), .csv, .parquet
    """
    if isinstance(data, str | Path):
        return _open_path(Path(data))

    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(
            f"data of a Hugging Face task must have a length and be read by index; this is a {type(data).__name__}",
            "",
            "pass a datasets.Dataset, a list or a file; for a stream, override data() and return it",
        )

    if isinstance(data, Mapping):
        raise UserError(
            "data of a Hugging Face task must be rows; this is a mapping",
            f"its keys are {', '.join(map(str, data))[:200]}",
            f"choose a split: data[{next(iter(data), 'train')!r}]",
        )

    return data


def _open_path(path: Path) -> Any:
    """Open a file by its suffix, or a folder that `datasets` wrote."""
    if not path.exists():
        raise UserError(f"there is no file or folder {path} with data", "", "set task.data=FILE.jsonl")

    # A folder, JSON and tables are read by others, whose errors name no file.
    try:
        return _read(path)
    except (ValueError, OSError) as error:
        raise UserError(
            f"the data {path} cannot be read", f"{error}".partition("\n")[0], "give a file with at least one row"
        ) from None


def _read(path: Path) -> Any:
    if path.is_dir():
        return open_rows(package("datasets").load_from_disk(str(path)))

    match path.suffix:
        case ".jsonl":
            return Lines(path, json.loads)

        case ".txt":
            return Lines(path, _as_text)

        case ".json":
            rows = json.loads(path.read_text())
            if not isinstance(rows, list):
                raise ValueError(f"it holds a {type(rows).__name__}, not a list of objects")

            return rows
        case ".csv" | ".parquet":
            return _arrow(path)

    raise UserError(
        f"the data {path} has a suffix that is not known: {path.suffix!r}",
        "",
        "use .jsonl, .json, .txt, .csv, .parquet, or a folder that datasets.save_to_disk wrote",
    )


def _arrow(path: Path) -> Any:
    """Return the rows of a CSV or Parquet file."""
    # Not by load_dataset, which would write to a cache that all ranks share.
    datasets = package("datasets")
    if path.suffix == ".csv":
        return datasets.Dataset(package("pyarrow.csv").read_csv(path))

    return datasets.Dataset(package("pyarrow.parquet").read_table(path, memory_map=True))


def _as_text(line: str) -> dict[str, str]:
    return {"text": line}


class Lines(Dataset):
    """The lines of a text file that are not empty. Only their offsets are in memory."""

    def __init__(self, path: Path, parse: Callable[[str], Any]):
        self.path = path
        self.parse = parse
        self._starts = array("q")

        offset = 0

        with path.open("rb") as file:
            for line in file:
                # Blank lines are no rows.
                if line.strip():
                    self._starts.append(offset)

                offset += len(line)

        if not self._starts:
            raise UserError(f"the file {path} has no rows", "", "give a file with at least one line")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        # Opened for each row: workers must not share the position in one file.
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()

        try:
            return self.parse(line.decode().rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise UserError(f"row {index} of {self.path} is not UTF-8", str(error), "convert the file") from None
        except ValueError as error:
            raise UserError(
                f"row {index} of {self.path} is not JSON", f"{error}: {line[:80]!r}", "write one JSON object a line"
            ) from None


class Encoded(Dataset):
    """Rows as features of a model: lists of token ids, labels, ..."""

    def __init__(self, rows: Any, encode: Encode):
        self.rows = rows
        self.encode = encode

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if not isinstance(row, Mapping | str):
            problem = f"row {index} of the data is a {type(row).__name__}; a row is a mapping, or a text"
            raise UserError(problem, f"{row!r:.100}", 'give rows such as {"text": "..."}')

        features = self.encode(row if isinstance(row, Mapping) else {"text": row})

        # A row in which everything is masked would give NaN in attention.
        if "input_ids" in features and not len(features["input_ids"]):
            raise UserError(f"row {index} of the data has no tokens", f"{row!r:.100}", "leave such rows out")

        return features


class Packed(Dataset):
    """The tokens of all rows, one after another, cut into blocks of equal length. The last, short block is left out."""

    def __init__(self, rows: Dataset, block: int):
        # 4 bytes for each token, where a list would hold a Python object for each.
        tokens, labels = array("i"), array("i")
        for index in range(len(rows)):  # pyrefly: ignore[bad-argument-type]
            features = rows[index]
            tokens.extend(features["input_ids"])
            labels.extend(features.get("labels", features["input_ids"]))

        count = len(tokens) // block
        if not count:
            raise UserError(
                f"task.pack={block} leaves no data: all rows together have {plural(len(tokens), 'token')}",
                "",
                f"set task.pack={max(len(tokens), 1)}, or less",
            )

        self.blocks, self.labels = (
            np.frombuffer(values, dtype=np.int32)[: count * block].reshape(count, block) for values in (tokens, labels)
        )

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.blocks[index].tolist(), "labels": self.labels[index].tolist()}


def pad(samples: Sequence[Mapping[str, Any]], fill: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by name: lists are padded on the right to the longest, numbers become one value a sample.

    `fill`: the padding of each name; 0 if it has none. An attention mask is added where input_ids are.
    """
    import torch

    samples = _alike(samples)

    # A key of numbers becomes one tensor; sequences are padded to the longest.
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if not isinstance(values[0], Sequence):
            batch[name] = torch.tensor(values)
            continue

        # Padded to the longest sample of this batch, not of the dataset.
        longest = max(map(len, values))
        batch[name] = torch.tensor([[*value, *[fill.get(name, 0)] * (longest - len(value))] for value in values])

    return batch


def _alike(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return samples with the same names. A mask or token types that a sample lacks are those of one whole text."""
    names = {name for sample in samples for name in sample}
    implied = {"attention_mask": 1, "token_type_ids": 0} if "input_ids" in names else {}
    implied = {name: value for name, value in implied.items() if name in names or name == "attention_mask"}

    # To leave out a field that only some samples have would change the training.
    lacking = next((sample for sample in samples if names - set(sample) - implied.keys()), None)
    if lacking is not None:
        raise UserError(
            "rows of the data have different names, and cannot be in one batch",
            f"one has {', '.join(lacking)}; another one also has {', '.join(sorted(names - set(lacking)))}",
            "give all rows the same names",
        )

    return [{name: [value] * len(s["input_ids"]) for name, value in implied.items()} | dict(s) for s in samples]
