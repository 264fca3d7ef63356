"""Models whose forward is one piece of code, cut between their blocks: the numbers are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.errors import UserError
from lockstep.parallel.pipeline.auto_split import split_forward
from lockstep.precision import Precision
from lockstep.recipes.char_lm import TASK
from lockstep.task import Loss
from pool import Pool
from ranks.support import assert_user_errors, train
from ranks.test_pipeline import Row, assert_same, final

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        return x + self.norm(self.down(torch.tanh(self.up(x) + condition)) * mask), None


class Knotty(nn.Module):
    """Around the blocks: statistics, a table, a condition for every block that has weights of its own, a sum in place,
    a frozen part, tied weights, and a part that only short micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.stem = nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH)
        self.condition = nn.Linear(1, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.between = nn.Parameter(torch.zeros(WIDTH))
        self.leave, self.rare = nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, 1)
        self.leave.weight = nn.Parameter(self.enter.weight.detach().T.clone())
        self.back = nn.Linear(5, WIDTH, bias=False)
        self.back.weight = self.enter.weight
        self.depth = 4
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        mask = (x[:, :1] > -1).float()
        condition = self.condition(x[:, 1:2])
        h = self.stem(self.enter(x) * scale)
        h = h + self.frozen(h)
        for number, block in enumerate(self.blocks[: self.depth]):
            h, _ = block(h, condition, mask)
            if number == 1:
                h += self.between
        out = self.leave(h * self.scale)
        if len(x) < 3:
            out = out + self.rare(out)
        return {"prediction": (out + h @ self.back.weight).sum(-1)}


class KnottyTask(Row):
    def model(self) -> nn.Module:
        return Knotty()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y, weights = batch
        each = (model(x, scale=0.5)["prediction"] - y) ** 2
        return Loss((each * weights).sum(), weights.sum())


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, {}),
    "three": (3, {}),
    "two on each rank": (2, {"pp.schedule": "interleaved"}),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_plain_forward_is_cut_between_its_blocks(pool: Pool, name: str) -> None:
    world, values = WAYS[name]
    (single,) = pool.run(final, KnottyTask(), {"strategy": "ddp"}, world=1)
    for found in pool.run(final, KnottyTask(), values, world=world):
        assert_same(found, single)
        assert found["held"] < 0.9 * single["held"], "every rank holds the whole model"


def test_what_a_stage_saves_goes_on_without_stages(pool: Pool, tmp_path: Path) -> None:
    (single,) = pool.run(final, KnottyTask(), {"strategy": "ddp"}, world=1)
    values = {"run_dir": str(tmp_path), "resume": "auto"}
    pool.run(final, KnottyTask(), values, 3, world=2)
    assert list(tmp_path.glob("checkpoints/step-*"))
    (found,) = pool.run(final, KnottyTask(), values | {"strategy": "ddp"}, world=1)
    assert_same(found, single)


def test_char_lm_in_a_pipeline(pool: Pool, tmp_path: Path) -> None:
    values = {"preset": "tiny", "steps": 5, "micro_batch": 2, "evaluate.every": 5, "task.layers": 3}
    pool.run(train, TASK, values | {"run_dir": str(tmp_path / "one")}, world=1)
    pool.run(train, TASK, values | {"run_dir": str(tmp_path / "two"), "strategy": "pp"}, world=2)
    one, two = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text)


# ---- where it can be cut --------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Five blocks in a row; subclasses say what passes them by."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.blocks, self.head = nn.Linear(3, 3), nn.ModuleList(Layer() for _ in range(5)), nn.Linear(3, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.front(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PassingBy(Stack):
    """What the first block returns is needed after the third one: there is no cut in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.blocks[0](self.front(x))
        x = self.blocks[2](self.blocks[1](x)) + first
        return self.head(self.blocks[4](self.blocks[3](x)))


class Hidden(Stack):
    """What passes by leaves no trace in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.blocks[0](self.front(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + first.detach())


class Strict(Stack):
    """It looks at what the others compute."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        assert x.isfinite().all(), "a number that is none"
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[1](x))


def splits(model: nn.Module, count: int) -> list[tuple[int, int]]:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    stages, _ = split_forward(model, list(model.blocks), ((x,), {}), count, Precision())  # type: ignore[arg-type]
    return [(stage.first, stage.last) for stage in stages]


def test_splits_lie_where_nothing_passes_by() -> None:
    assert splits(Stack(), 2) in ([(0, 1), (2, 4)], [(0, 2), (3, 4)])
    assert splits(Stack(), 5) == [(n, n) for n in range(5)]
    assert splits(PassingBy(), 3) == [(0, 0), (1, 3), (4, 4)]
    with pytest.raises(UserError, match="split into 3: 5 blocks in PassingBy"):
        splits(PassingBy(), 5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Hidden, "depends on more"), (Strict, "stage 1 failed .* AssertionError"), (Twice, "block 1 .* called twice")],
)
def test_a_forward_that_cannot_be_split_is_refused(kind: type[Stack], words: str) -> None:
    with pytest.raises(UserError, match=words):
        splits(kind(), 2)


def test_looking_leaves_no_trace() -> None:
    model = Knotty()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    frozen = [p.requires_grad for p in model.parameters()]
    expected = torch.randn(3, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    split_forward(model, list(model.blocks), ((torch.ones(2, 5),), {}), 3, Precision())
    assert torch.equal(torch.randn(3), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == frozen


class Counting(Stack):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_looking_leaves_attributes_as_they_were() -> None:
    model = Counting()
    model.calls = 5
    assert splits(model, 5) == [(n, n) for n in range(5)]
    assert model.calls == 5


def test_a_stage_uses_what_its_blocks_need() -> None:
    model = Knotty()
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    _, used = split_forward(model, list(model.blocks), ((torch.randn(4, 5),), {}), 2, Precision())
    first, last = ({names[id(tensor)] for tensor in tensors} for tensors in used)
    assert {name for name in first & last if "." in name} == {
        "enter.weight", "condition.weight", "condition.bias", "rare.weight", "rare.bias",
    }  # fmt: skip
    assert {"stem.running_mean", "frozen.weight", "blocks.0.up.weight"} <= first - last
    assert {"between", "leave.weight", "blocks.3.norm.running_var"} <= last - first
    assert "scale" in first & last


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.ones(64, 5))


class Streamed(KnottyTask):
    def data(self) -> Any:
        return Stream()


class Dropping(KnottyTask):
    """From the second step on only the first block is called."""

    def model(self) -> nn.Module:
        self.net = Knotty()
        return self.net

    def after_step(self, run: Any, result: Any) -> None:
        self.net.depth = 1


class Surprising(Knotty):
    """Micro-batches of more than the two samples that were looked at use a parameter of the first stage at the end."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        prediction = super().forward(x, scale)["prediction"]
        return {"prediction": prediction + self.stem.weight.sum() if len(x) > 2 else prediction}


class SurprisingTask(KnottyTask):
    def model(self) -> nn.Module:
        return Surprising()


REFUSED = {
    "another stage's parameter": (
        SurprisingTask(),
        ("'stem.weight' is used in a stage", "only stage 0 holds it", "for every sample"),
    ),
    "a stream": (Streamed(), ("two samples", "a Stream", "def stages(self, model)")),
    "a block that is left out": (Dropping(), ("did not call block 1",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_refused(pool: Pool, name: str) -> None:
    task, words = REFUSED[name]
    errors = pool.errors(final, task, {}, world=2)
    told = [error for error in errors if isinstance(error, UserError)]
    assert told, errors
    assert_user_errors(told, *words)
