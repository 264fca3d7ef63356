"""Train each port and its plain counterpart on the same samples and weights, and print how far apart they are.

python examples/ports/compare.py nanogpt torchvision run_clm
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model

import lockstep

HERE = Path(__file__).parent

# The module and the task of a port, and the module of its plain counterpart.
PORTS = {
    "nanogpt": ("nanogpt", "NanoGPT", "nanogpt_plain"),
    "torchvision": ("torchvision_classification", "Classification", "torchvision_plain"),
    "run_clm": ("run_clm", "RunClm", "run_clm_plain"),
    "timm": ("timm_train", "TimmTrain", "timm_plain"),
}


def compare(name: str) -> tuple[list[float], list[float]]:
    """Return the losses of the port and those of its plain counterpart, step by step."""
    module, task, plain = PORTS[name]
    make = getattr(importlib.import_module(module), task)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        torch.manual_seed(0)
        model = make().model()
        save_model(model, str(weights))

        log = {"every": 1, "samples": True, "progress": "off"}
        done = lockstep.fit(make(), init_from=weights, run_dir=f"{folder}/run", log=log, data={"workers": 0})
        ported = [record["loss"] for record in done.history]
        if name == "timm":  # its last figure is that of the averaged weights
            ported.append(done.history[-1]["eval"]["loss"])

        batches = trained_batches(done.run_dir, make.defaults.get("micro_batch"))
        return ported, importlib.import_module(plain).train(model, batches)


def trained_batches(run_dir: Path, micro_batch: int | None) -> list[list[int]]:
    """Return the ids of the samples of every micro-batch, from the run's log of samples."""
    lines = (run_dir / "samples" / "rank-0.jsonl").read_text().splitlines()
    found: list[list[int]] = []
    for line in lines:
        found += [ids for _, *ids in json.loads(line)["epoch_and_ids"]]

    assert micro_batch is None or all(len(ids) == micro_batch for ids in found)
    return found


def lines_of_code(module: str, folder: Path = HERE) -> int:
    """Return the number of lines with code: no blank lines, comments or docstrings."""
    source = (folder / f"{module}.py").read_text()
    tree = ast.parse(source)
    counted: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            first_of_body: Any = next(iter(getattr(node, "body", [])), None)
            last = first_of_body.lineno - 1 if first_of_body is not None else (node.end_lineno or node.lineno)
            counted |= set(range(node.lineno, max(last, node.lineno) + 1))

    text = source.splitlines()
    return sum(1 for number in counted if text[number - 1].strip() and not text[number - 1].strip().startswith("#"))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main(names: list[str]) -> None:
    for name in names or PORTS:
        module, _, plain = PORTS[name]
        ported, by_hand = compare(name)
        apart = max(abs(a - b) for a, b in zip(ported, by_hand, strict=True))
        print(
            f"{name}: {len(ported)} losses, {by_hand[0]:.3f} to {by_hand[-1]:.3f}, at most {apart:.1e} apart; "
            f"{lines_of_code(plain)} lines by hand, {lines_of_code(module)} on Lockstep"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
