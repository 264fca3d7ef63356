"""init_from: a new run starts from the weights of a file, a run or a folder, however the model is placed on the ranks.

What is read is compared bit by bit with the file; what does not fit is refused, or decided by patterns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint.init_from.match import _patterns
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import assert_user_errors, fit

BASE = {"global_batch": 4, "micro_batch": 2, "steps": 1, "checkpoint.at_end": False}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Still(Task):
    """Does not learn: the weights at the end are those at the start."""

    def __init__(self, frozen: bool = False):
        self.frozen = frozen

    def model(self) -> nn.Module:
        model = nn.Sequential(Block(), Block(), nn.Linear(4, 2))
        model[1].requires_grad_(not self.frozen)
        return model

    def data(self) -> Any:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x[:, :2])

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))


def some_weights() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn_like(p) for name, p in Still().model().state_dict().items()}


def expect(
    pool: Pool, run: Path, expected: dict[str, Tensor], values: dict[str, Any], world: int = 1
) -> dict[str, Any]:
    """Run `Still`, compare its last weights bit by bit, and return what the summary says of init_from."""
    traces = pool.run(fit, Still(), BASE | {"run_dir": str(run)} | values, world=world)
    weights = load_file(run / "model.safetensors")
    assert sorted(weights) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    return traces[0].summary["init_from"]


PLACES = {
    "ddp": {},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, meta": {"strategy": "fsdp", "init": "meta"},
    "tp": {"strategy": "tp"},
    "pp": {"strategy": "pp"},
}
LONG = ("zero1", "fsdp")


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.long if place in LONG else ()) for place in PLACES]
)
def test_the_bits_of_the_file_are_in_the_model(pool: Pool, tmp_path: Path, place: str) -> None:
    weights = some_weights()
    save_file(weights, tmp_path / "some.safetensors")
    values = PLACES[place] | {"init_from": str(tmp_path / "some.safetensors")}
    record = expect(pool, tmp_path / "run", weights, values, world=2)
    assert (record["tensors"], record["kept"], record["unused"]) == (len(weights), [], [])
    assert len(record["digest"]) == 32


def test_every_kind_of_source(pool: Pool, tmp_path: Path) -> None:
    """A sharded Hugging Face folder, torch files, a run that has ended, one that has not, and a checkpoint."""
    weights = some_weights()
    names = sorted(weights)
    folder = tmp_path / "folder"
    folder.mkdir()
    shards = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    for file, inside in shards.items():
        save_file({name: weights[name] for name in inside}, folder / file)
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(weights, tmp_path / "plain.pt")
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "nested.bin")

    first = tmp_path / "first"
    expect(pool, first, weights, {"init_from": str(folder), "checkpoint.at_end": True}, world=2)
    step = first / "checkpoints" / "step-00000001"
    sources = ["plain.pt", "nested.bin", "first", str(step.relative_to(tmp_path))]
    for number, source in enumerate(sources):
        record = expect(pool, tmp_path / f"run-{number}", weights, {"init_from": str(tmp_path / source)})
        expected = "first/model.safetensors" if source == "first" else source
        assert record["location"] == str(tmp_path / expected)

    # A run that has not ended, or that was resumed since, counts with its newest checkpoint.
    (first / "summary.json").unlink()
    record = expect(pool, tmp_path / "again", weights, {"init_from": str(first)})
    assert record["location"] == str(step)


def test_what_does_not_fit_is_listed_and_decided_by_patterns(pool: Pool, tmp_path: Path) -> None:
    own = Still().model().state_dict()
    weights = some_weights()
    file = tmp_path / "other.safetensors"
    other = {f"module.{name}": tensor for name, tensor in weights.items() if not name.startswith("2.")}
    other |= {"module.head.weight": torch.ones(3, 4)}
    other["module.1.up.weight"] = torch.arange(12.0).reshape(3, 4)  # has 6 rows in the model
    other["module.1.up.bias"] = torch.ones(1, 6)
    save_file(other, file)

    def refused(**values: Any) -> list[BaseException | None]:
        settings = {f"weights.{key}": value for key, value in values.items()}
        # A run that was refused leaves a folder that the next one can use.
        run = {"run_dir": str(tmp_path / "run"), "init_from": str(file)}
        return pool.errors(fit, Still(), BASE | run | settings, world=2)

    assert_user_errors(refused(), "10 missing in the file: 0.up.weight", "9 extra in the file", "'weights.rename=")
    rename = {"^module[.]": ""}
    wanted = ("2 missing in the file: 2.weight, 2.bias", "1 extra in the file: module.head.weight")
    assert_user_errors(refused(rename=rename), *wanted, "1.up.weight [3, 4] -> [6, 4]", "'weights.allow_missing=")
    assert_user_errors(refused(rename={"^moduel[.]": ""}), "matches no name", "moduel")
    assert_user_errors(refused(rename={"[.]weight$": ".bias"}), "gives two tensors", "the name")
    assert_user_errors(refused(rename={"(": ""}), "is not a regular expression", "unterminated subpattern")
    assert_user_errors(refused(rename={"^module": "\\2"}), "is not a regular expression", "invalid group reference")

    allowed = {
        "rename": rename,
        "allow_missing": ["2.*"],
        "allow_extra": ["module.head.*"],
        "allow_reshape": ["1.up.*"],
    }
    values = {"strategy": "fsdp", "init_from": str(file), "seed": 0}
    values |= {f"weights.{key}": value for key, value in allowed.items()}
    pool.run(fit, Still(), BASE | values | {"run_dir": str(tmp_path / "run")}, world=2)
    trained = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(trained["1.up.weight"][:3], other["module.1.up.weight"])
    assert torch.equal(trained["1.up.bias"], torch.ones(6))
    assert torch.equal(trained["0.down.bias"], weights["0.down.bias"])

    # The rest is what the model would have started with.
    pool.run(fit, Still(), BASE | {"run_dir": str(tmp_path / "plain")}, world=1)
    own = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(trained["1.up.weight"][3:], own["1.up.weight"][3:])
    assert torch.equal(trained["2.weight"], own["2.weight"])


def test_files_that_cannot_be_used_are_refused(pool: Pool, tmp_path: Path) -> None:
    def refused(source: str, *words: str) -> None:
        run = {"run_dir": str(tmp_path / f"run-{len(list(tmp_path.iterdir()))}"), "init_from": str(tmp_path / source)}
        world = 2 if source == "nothing.safetensors" else 1
        assert_user_errors(pool.errors(fit, Still(), BASE | run, world=world), *words)

    refused("nothing.safetensors", "does not exist")
    (tmp_path / "broken.safetensors").write_bytes(b"not one")
    refused("broken.safetensors", "cannot be read")
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "pickle.pt")
    refused("pickle.pt", "reading it might run code")
    torch.save([1, 2], tmp_path / "list.pt")
    refused("list.pt", "holds no state dict")
    (tmp_path / "empty").mkdir()
    refused("empty", "is a folder without weights")
    (tmp_path / "index" / "model.safetensors.index.json").mkdir(parents=True)
    refused("index", "model.safetensors.index.json cannot be read", "IsADirectoryError")
    quantized = {name: tensor.to(torch.int8) for name, tensor in some_weights().items()}
    save_file(quantized, tmp_path / "int8.safetensors")
    refused("int8.safetensors", "another kind of number")


def test_a_resumed_run_does_not_read_it_again(pool: Pool, tmp_path: Path) -> None:
    """Except for frozen weights, of which its checkpoints hold only digests."""
    file = tmp_path / "some.safetensors"
    weights = some_weights()
    save_file(weights, file)
    values = BASE | {"init_from": str(file), "checkpoint.at_end": True}

    whole = values | {"run_dir": str(tmp_path / "whole")}
    (first,) = pool.run(fit, Still(), whole, world=1)
    file.rename(tmp_path / "moved.safetensors")
    (again,) = pool.run(fit, Still(), whole | {"steps": 2, "resume": "auto"}, world=1)
    assert again.summary["init_from"] == first.summary["init_from"]

    (tmp_path / "moved.safetensors").rename(file)
    digests = values | {"run_dir": str(tmp_path / "digests"), "checkpoint.frozen": False, "strategy": "fsdp"}
    pool.run(fit, Still(frozen=True), digests, world=2)
    pool.run(fit, Still(frozen=True), digests | {"steps": 2, "resume": "auto", "seed": 0}, world=2)
    assert "1.up.bias" not in load_file(tmp_path / "digests" / "model.safetensors")

    # Other frozen weights are noticed.
    save_file(weights | {"1.up.bias": torch.zeros(6)}, file)
    errors = pool.errors(fit, Still(frozen=True), digests | {"steps": 3, "resume": "auto"}, world=2)
    assert_user_errors(errors, "the frozen parameter '1.up.bias' differ")


class Tied(Still):
    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        model[1].weight = model[0].weight
        return model


def test_tied_weights_may_come_under_any_of_their_names_but_must_agree(pool: Pool, tmp_path: Path) -> None:
    weights = {name: torch.randn_like(tensor) for name, tensor in Tied().model().state_dict().items()}
    second = {name: tensor for name, tensor in weights.items() if name != "0.weight"}
    save_file(second, tmp_path / "second.safetensors")
    values = BASE | {"run_dir": str(tmp_path / "run"), "init_from": str(tmp_path / "second.safetensors")}
    pool.run(fit, Tied(), values, world=1)
    assert torch.equal(load_file(tmp_path / "run" / "model.safetensors")["0.weight"], weights["1.weight"])

    save_file(weights, tmp_path / "both.safetensors")
    values |= {"run_dir": str(tmp_path / "other"), "init_from": str(tmp_path / "both.safetensors")}
    errors = pool.errors(fit, Tied(), values, world=1)
    assert_user_errors(errors, "is tied to another parameter in this model, but has its own values")


def test_patterns_that_are_advised_match_nothing_else() -> None:
    """With blocks.* a tensor of another shape in any block would keep its initial values."""
    missing = [f"blocks.2.{name}.weight" for name in ("up", "down", "norm", "qkv")]
    assert _patterns(missing, ["blocks.0.up.weight", "blocks.20.up.weight"]) == ["blocks.2.*"]
    assert _patterns(["a.b", "a.c", "a.d", "e"], ["a.z"]) == ["a.b", "a.c", "a.d", "e"]
