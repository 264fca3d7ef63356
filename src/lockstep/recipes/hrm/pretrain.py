"""`pretrain.py key=value ...`: the names of HRM's own document, in front of the recipe.

The words become a `PretrainConfig` on rank 0, which sends it to the others; what it says becomes settings of a run.
Keys that it does not know are the run's own (`log.every=10`, `precision=bf16`, `task.variant=trm`).
"""

from __future__ import annotations

import difflib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.hrm.data import read_metadata
from lockstep.recipes.hrm.task import HRM
from lockstep.recipes.hrm.words import check_names, help_text, in_own_words

FIRST = ("amber", "brisk", "calm", "dusky", "eager", "frosty", "gentle", "ivory", "keen", "lucid", "nimble", "quiet")
SECOND = ("badger", "cedar", "delta", "ember", "falcon", "glacier", "harbour", "juniper", "kestrel", "maple", "otter")

OPTIONS = ("data_path", "lr", "weight_decay", "puzzle_emb_lr", "puzzle_emb_weight_decay")  # of the task, named here
SOURCE = ("model.py", "score.py", "losses.py", "task.py")


@dataclass
class PretrainConfig:
    data_path: str
    epochs: int = 20_000
    eval_interval: int | None = None  # epochs between two evaluations; None: only at the end
    global_batch_size: int = 768
    lr: float = 1e-4
    lr_min_ratio: float = 1.0
    lr_warmup_steps: int = 2000
    weight_decay: float = 1.0
    puzzle_emb_lr: float = 1e-4
    puzzle_emb_weight_decay: float = 1.0
    seed: int = 0
    project_name: str = ""  # a folder around the folders of its runs
    run_name: str = ""
    checkpoint_path: str = ""  # the run's folder, if not runs/PROJECT/NAME
    use_distributed_checkpoint: bool = False  # a whole checkpoint, written by all ranks, with every evaluation
    rest: dict[str, Any] = field(default_factory=dict)  # settings of the run that have no other name here

    def steps(self, epochs: int) -> int:
        """As the document counts them: an epoch is as long as all groups, times the examples of a mean puzzle."""
        metadata = read_metadata(Path(self.data_path) / "train")
        return int(epochs * metadata.total_groups * metadata.mean_puzzle_examples) // self.global_batch_size

    def settings(self) -> dict[str, Any]:
        """As `lockstep.fit` takes them."""
        evaluate_every = None if self.eval_interval is None else max(1, self.steps(self.eval_interval))
        if self.steps(self.epochs) < 1:
            raise UserError(
                f"epochs={self.epochs} with global_batch_size={self.global_batch_size}",
                f"fewer examples in {self.data_path} than one step takes",
                "type a smaller global_batch_size, or more epochs",
            )
        constant = self.lr_min_ratio == 1.0
        return {
            "preset": None,
            "run_dir": self.checkpoint_path or str(Path("runs") / self.project_name / self.run_name),
            "steps": self.steps(self.epochs),
            "global_batch": self.global_batch_size,
            "seed": self.seed,
            "lr.schedule": "constant" if constant else "cosine",
            "lr.min_ratio": self.lr_min_ratio if not constant else 0.0,
            "lr.warmup": self.lr_warmup_steps,
            "evaluate.every": evaluate_every,
            "checkpoint.every": evaluate_every if self.use_distributed_checkpoint else None,
            **{key: value for key, value in self.rest.items() if not key.startswith("task.")},
            "task": self.options(),
        }

    def options(self) -> dict[str, Any]:
        """Of the task."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return options | {key.removeprefix("task."): v for key, v in self.rest.items() if key.startswith("task.")}


KEYS = {each.name: each.default for each in fields(PretrainConfig) if each.name != "rest"} | {"data_path": "(needed)"}


def check_words(values: Mapping[str, Any]) -> None:
    """What can be said of them before anything is read."""
    if "data_path" not in values:
        near = difflib.get_close_matches("data_path", values, n=1)
        raise UserError(
            "data_path=FOLDER",
            f"{near[0]}, and no data_path" if near else "no data_path",
            "type data_path=FOLDER; python -m lockstep.recipes.hrm.build makes one",
        )
    check_names(values, KEYS)
    if values.get("resume") == "auto" and not any(
        values.get(key) for key in ("run_name", "checkpoint_path", "run_dir")
    ):
        raise UserError(
            "resume=auto without run_name",
            "no folder to go on in: without a name every run gets a new one",
            "add run_name=NAME, the same each time",
        )


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words; a value is a number, true, false or null where it reads like one, else text. `config=F.yaml`
    stands for the values of a file, which are weaker than words, wherever it stands among them."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"the word {word!r}", "no key=value", "type words such as lr=1e-4")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return _of_file(found.pop("config", None)) | found


def _of_file(path: str | None) -> dict[str, Any]:
    """`task: {width: 64}` in it is task.width=64."""
    if path is None:
        return {}
    try:
        values = yaml.safe_load(Path(path).read_text())
        return {
            key if inner is None else f"{key}.{inner}": value
            for key, group in values.items()
            for inner, value in (group.items() if isinstance(group, dict) else [(None, group)])
        }
    except (OSError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"config={path}", f"{type(error).__name__}: {error}", "give a YAML file of keys") from error


def generate_name() -> str:
    return f"{secrets.choice(FIRST)}-{secrets.choice(SECOND)}-{secrets.token_hex(2)}"


def load_synced_config(hydra_config: Mapping[str, Any], rank: int, world_size: int) -> PretrainConfig:
    """Rank 0's configuration, on every rank: the others' own words do not count. It travels as JSON."""
    text = ""
    if rank == 0:
        check_words(hydra_config)
        config = PretrainConfig(
            **{key: value for key, value in hydra_config.items() if key in KEYS},
            rest={key: value for key, value in hydra_config.items() if key not in KEYS},
        )
        config.run_name = config.run_name or generate_name()
        text = json.dumps(asdict(config))
    if world_size > 1:
        text = _from_rank_0(text)
    return PretrainConfig(**json.loads(text))


def _from_rank_0(text: str) -> str:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).decode()


def main(words: Sequence[str]) -> None:
    """Under torchrun one of several ranks, otherwise alone."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if {"--help", "-h"} & {*words}:
        print(help_text("usage: torchrun --nproc-per-node N pretrain.py data_path=FOLDER key=value ...", KEYS))
        return
    try:
        values = overrides(words)
        if rank == 0:
            check_words(values)  # before the others wait for it
        if world_size > 1:
            _join()
        config = load_synced_config(values, rank, world_size)
        if os.environ.get("DISABLE_COMPILE", "0") not in ("", "0"):
            config.rest.setdefault("compile", False)
        done = lockstep.fit(HRM, config.settings(), again=typed_again)
        if rank == 0:
            keep_source(done.run_dir)
    except UserError as error:
        print(f"pretrain: {in_own_words(str(error), OPTIONS)}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def typed_again(run_dir: Path) -> str:
    return f"the same command with checkpoint_path={run_dir} resume=auto"


def keep_source(run_dir: Path) -> None:
    """The code of the model beside what it has learned: it may have changed when somebody looks again."""
    (run_dir / "source").mkdir(exist_ok=True)
    for name in SOURCE:
        shutil.copy(Path(__file__).with_name(name), run_dir / "source" / name)


def _join() -> None:
    """NCCL where every rank of this machine has a GPU of its own."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    own_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.is_available() and own_gpu else "gloo")
