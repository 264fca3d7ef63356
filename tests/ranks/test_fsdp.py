"""What torch's FSDP takes with help only, and what it cannot do: refused, where it would be silently wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pool import Pool
from ranks.support import Regression, assert_user_errors, fit
from ranks.test_strategies import STRATEGIES, WIDTH, Block, Ragged, Small, assert_close, final

# ---- trainable parameters of several dtypes ----


class MixedBlock(Block):
    """Two dtypes in two modules, and in one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.double()
        self.scale = nn.Parameter(torch.ones(1, WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.fixed = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.norm(x.double()) * self.scale * self.fixed[0]).float()
        return x + self.down(torch.tanh(self.up(y))) + self.shift


class MixedModel(Small):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(4))
        self.head_scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return self.head((x * self.head_scale).float())


class Mixed(Ragged):
    def model(self) -> nn.Module:
        return MixedModel()


class MixedStages(Ragged):
    """Without a parameter outside of the modules, which a pipeline could not place."""

    def model(self) -> nn.Module:
        model = Small()
        model.blocks = nn.ModuleList(MixedBlock() for _ in range(4))
        return model


WAYS: dict[str, tuple[dict[str, Any], int, type[Ragged]]] = {
    "fsdp": (STRATEGIES["fsdp"], 2, Mixed),
    "fsdp-grads": (STRATEGIES["fsdp-grads"], 2, Mixed),
    "meta": ({"strategy": "fsdp", "init": "meta"}, 2, Mixed),
    "remat": ({"strategy": "fsdp", "remat": "full"}, 2, Mixed),
    "hsdp": (STRATEGIES["hsdp"], 4, Mixed),
    "pp x fsdp": (STRATEGIES["pp x fsdp"], 4, MixedStages),
}


Alone = Callable[..., dict[str, Tensor]]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Alone:
    """The weights that one rank ends with, trained once for every task and its settings."""

    @functools.cache
    def train(kind: Any, **values: Any) -> dict[str, Tensor]:
        (ended,) = pool.run(final, values, None, kind, world=1)
        return ended["weights"]

    return train


@pytest.mark.parametrize("way", WAYS)
def test_several_dtypes_train_as_on_one_rank(pool: Pool, alone: Alone, way: str) -> None:
    values, world, kind = WAYS[way]
    for found in pool.run(final, values, None, kind, world=world):
        assert_close(found["weights"], alone(kind))
        assert {t.dtype for t in found["weights"].values()} == {torch.float32, torch.float64, torch.bfloat16}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-grads"])
def test_several_dtypes_in_exact_mode(pool: Pool, alone: Alone, strategy: str) -> None:
    for found in pool.run(final, {"exact": True, "strategy": strategy}, None, Mixed, world=2):
        torch.testing.assert_close(found["weights"], alone(Mixed, exact=True), rtol=0, atol=0)


# ---- what is refused ----

VALUES = {"global_batch": 8, "micro_batch": 1, "steps": 3, "lr.schedule": "constant"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.out = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x).squeeze(-1)


class KeptInAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [layer.weight for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.kept, strict=True):
            x = layer(x) + F.linear(x, weight)
        return self.out(x).squeeze(-1)


class ChangedInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Limited(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 5, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.embedding((x[:, 0] > 0).long()))


class ChangedThroughData(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.out.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class NotingLayer(nn.Module):
    """Writes into a dictionary that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Tensor:
        x = torch.tanh(self.linear(x))
        notes["size"] = notes["size"] + x.square().sum(1)
        return x


class Noting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NotingLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.out.weight.sum() * x)
        notes = {"size": x.square().sum(1)}
        for layer in self.layers:
            x = layer(x, notes)
        return self.out(x).squeeze(-1) + 0.01 * notes["size"]


class KeepingLayer(nn.Module):
    """Keeps what it computes from its weights, after it has computed its output: the backward begins with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.calls = 0
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        self.keep(self.linear.weight.square().sum())
        return x

    def keep(self, aux: Tensor) -> None:
        self.kept[:] = [aux]


class Keeping(Net):
    kind: type[nn.Module] = KeepingLayer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(0.1 * layer.kept[0] for layer in self.layers)


def scripted() -> nn.Module:
    net = Net()
    net.layers[1] = torch.jit.script(net.layers[1])
    return net


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "kept": (KeptInAList, ("'layers.0.weight'", "kept in a list", "strategy=ddp")),
    "changed": (ChangedInPlace, ("'out.weight'", "the change would be lost", "after_step")),
    "through data": (ChangedThroughData, ("'out.weight'", "the change would be lost", "after_step")),
    "noting": (Noting, ("'layers.0'", "changes a dict", "'size'", "return the dict", "strategy=ddp")),
    "limited": (Limited, ("'embedding.weight'", "max_norm", "strategy=ddp")),
    "scripted": (scripted, ("'layers.1'", "TorchScript", "strategy=ddp")),
}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-grads"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_first_update(pool: Pool, case: str, strategy: str) -> None:
    network, words = REFUSED[case]
    errors = pool.errors(fit, Regression(network=network), VALUES | {"strategy": strategy}, world=2)
    assert_user_errors(errors, f"strategy={strategy}", *words)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_a_tensor_kept_in_a_list_is_refused_if_the_loss_uses_it(pool: Pool, strategy: str) -> None:
    errors = pool.errors(fit, Regression(network=Keeping), VALUES | {"strategy": strategy}, world=4)
    assert_user_errors(errors, "'layers.0' keeps a tensor", "'layers.0.linear.weight'", "attribute", "strategy=ddp")


class KeptLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)
        self.kept = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.kept[0])


class ChangedLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class DataLayer(ChangedLayer):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return F.linear(x, self.weight, self.bias)


def scripted_layer() -> nn.Module:
    return torch.jit.script(nn.Linear(5, 5))


REFUSED_IN_STAGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "kept": (KeptLayer, ("'1.weight'", "kept in a list", "strategy=ddp")),
    "changed": (ChangedLayer, ("'1.weight'", "the change would be lost", "after_step")),
    "through data": (DataLayer, ("'1.weight'", "the change would be lost", "after_step")),
    "scripted": (scripted_layer, ("'1'", "TorchScript", "strategy=ddp")),
}


@pytest.mark.parametrize("case", REFUSED_IN_STAGES)
def test_refused_in_a_pipeline(pool: Pool, case: str) -> None:
    layer, words = REFUSED_IN_STAGES[case]
    task = Regression(network=partial(in_stages, layer), predict=squeezed)
    errors = pool.errors(fit, task, VALUES | STRATEGIES["pp x fsdp"], world=4)
    # The ranks of the other stages lose the connection if a forward raises.
    assert_user_errors(errors[: 2 if case in ("changed", "through data") else 4], "strategy=fsdp", *words)


def in_stages(layer: Callable[[], nn.Module]) -> nn.Module:
    """A model whose first stage has the layer."""
    return nn.Sequential(nn.Linear(5, 5), layer(), nn.Linear(5, 5), nn.Linear(5, 1))


def squeezed(task: Regression, model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(-1)


# ---- what is not refused ----


class KeepingAnAttribute(KeepingLayer):
    def keep(self, aux: Tensor) -> None:
        self.aux = aux


class KeepingABuffer(KeepingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aux", torch.zeros(()), persistent=False)

    def keep(self, aux: Tensor) -> None:
        self.aux = aux


class KeepingLate(KeepingLayer):
    """Keeps a tensor from the second step on, and something of every step that no loss uses."""

    def keep(self, aux: Tensor) -> None:
        self.calls += self.training
        self.kept[:] = [aux]
        if self.calls > 1:
            self.aux = aux


class WithAux(Net):
    def __init__(self, layer: type[KeepingLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))


def plus_aux(task: Regression, model: Any, x: Tensor) -> Tensor:
    y = model(x)
    return y + 0.1 * sum(getattr(layer, "aux", 0.0) for layer in model.layers)


class ReturningLayer(NotingLayer):
    """Returns the dictionary that it has changed, and changes a list of its own."""

    def forward(self, x: Tensor, notes: dict[str, Tensor], others: list[Tensor]) -> Any:  # pyrefly: ignore
        others = [*others, x]
        others.pop(0)
        return super().forward(x, notes) + sum(others), notes


class Returning(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReturningLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.out.weight.sum() * x)
        notes = {"size": x.square().sum(1)}
        for layer in self.layers:
            x, notes = layer(x, notes, [x])
        return self.out(x).squeeze(-1) + 0.01 * notes["size"]


class PoppingLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        return super().forward(x) + others.pop()


class UsedUp(Net):
    """Gives each layer a list of its own, which the layer uses up; or all layers the same list."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PoppingLayer() for _ in range(2))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.out.weight.sum())
        others = [x, 2 * x]
        for layer in self.layers:
            x = layer(x, others if self.shared else [x, 2 * x])
        return self.out(x).squeeze(-1)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-grads"])
def test_a_list_that_several_blocks_shorten_is_refused(pool: Pool, strategy: str) -> None:
    errors = pool.errors(fit, Regression(network=partial(UsedUp, True)), VALUES | {"strategy": strategy}, world=2)
    assert_user_errors(errors, "'layers.0' changes a list", "strategy=ddp")


TRAINED: dict[str, Any] = {
    "used up": {"network": UsedUp},
    "attribute": {"network": partial(WithAux, KeepingAnAttribute), "predict": plus_aux},
    "buffer": {"network": partial(WithAux, KeepingABuffer), "predict": plus_aux},
    "late": {"network": partial(WithAux, KeepingLate), "predict": plus_aux},
    "returned": {"network": Returning},
}
# One object for each: its weights on one rank are remembered by it.
TASKS: dict[str, Any] = {case: partial(Regression, **options) for case, options in TRAINED.items()}


@pytest.mark.parametrize("way", ["fsdp", "fsdp-grads", "hsdp", "remat"])
@pytest.mark.parametrize("case", TRAINED)
def test_trained_as_on_one_rank(pool: Pool, alone: Alone, case: str, way: str) -> None:
    values, world, _ = WAYS[way]
    task = TASKS[case]
    # One call in a step: KeepingLate counts them.
    for found in pool.run(final, VALUES | values | {"micro_batch": 8 // world}, None, task, world=world):
        assert_close(found["weights"], alone(task, **VALUES | {"micro_batch": 8}))


def plus_aux_of_last_stage(task: Regression, model: nn.Module, x: Tensor) -> Tensor:
    layer: Any = model.get_submodule("2")
    return squeezed(task, model, x) + 0.1 * (layer.kept[0] if layer.kept else layer.aux)


def keeping_in_stages(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), layer(), nn.Linear(5, 1))


def test_a_pipeline_trains_with_what_its_last_stage_keeps(pool: Pool) -> None:
    network = partial(keeping_in_stages, KeepingAnAttribute)
    task: Any = partial(Regression, network=network, predict=plus_aux_of_last_stage)
    (alone,) = pool.run(final, VALUES, None, task, world=1)
    values = VALUES | STRATEGIES["pp x fsdp"] | {"blocks": ["KeepingAnAttribute"]}
    for found in pool.run(final, values, None, task, world=4):
        assert_close(found["weights"], alone["weights"])


def test_a_pipeline_refuses_what_its_last_stage_keeps_in_a_list(pool: Pool) -> None:
    task = Regression(network=partial(keeping_in_stages, KeepingLayer), predict=plus_aux_of_last_stage)
    values = VALUES | STRATEGIES["pp x fsdp"] | {"blocks": ["KeepingLayer"]}
    errors = pool.errors(fit, task, values, world=4)
    # The ranks of the first stage lose the connection.
    assert_user_errors(errors[2:], "keeps a tensor", "'2.linear.weight'", "attribute")


class Alternating(nn.Module):
    """One of two layers of the same shape in turn: their gradients could be added to one another's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"even": nn.Linear(5, 1), "odd": nn.Linear(5, 1)})
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers["odd" if self.calls % 2 else "even"](x).squeeze(-1)


def test_exact_mode_refuses_micro_batches_that_use_different_parameters(pool: Pool) -> None:
    values = VALUES | {"strategy": "fsdp", "exact": True}
    errors = pool.errors(fit, Regression(network=Alternating), values, world=2)
    assert_user_errors(errors, "exact=true", "different parameters", "layers.even.weight", "layers.odd.weight")
