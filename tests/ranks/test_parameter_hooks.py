"""Hooks that a model sets on its own parameters: honoured wherever that is exact, and refused elsewhere in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.errors import UserError
from lockstep.parallel.parameter_hooks.hooks import take_hooks
from lockstep.parallel.parameter_hooks.probe import problem_with
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import assert_user_errors, open_watched
from ranks.test_strategies import final
from zoo import SLOW_TO_IMPORT

VOCABULARY, STEPS, BATCH, RATE = 11, 3, 6, 0.5
TOKENS = torch.randint(0, VOCABULARY, (STEPS * BATCH, 7), generator=torch.Generator().manual_seed(0))
VALUES = {"global_batch": BATCH, "micro_batch": 1, "steps": STEPS, "data.shuffle": False, "device": "cpu"}
seen: list[float] = []


class Halve:
    """An object as a hook, with state of its own."""

    def __init__(self, mask: Tensor | None = None) -> None:
        self.mask, self.calls = mask, 0

    def __call__(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad * 0.5 if self.mask is None else grad * self.mask


def rescale(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(torch.linspace(0, 2, parameter.shape[-1], dtype=parameter.dtype))


def reverse_rows(parameter: Tensor) -> None:
    """A new tensor, and no sum of the shards' own: row 0 lies on another rank."""
    assert parameter.grad is not None
    parameter.grad = 3 * parameter.grad.flip(0)


def set_hooks(embedding: nn.Parameter, up: nn.Parameter, down: nn.Parameter, bias: nn.Parameter) -> None:
    """Both kinds, several on one parameter, on tied weights, and one that was taken off again."""
    embedding.register_hook(Halve())  # tied
    embedding.register_post_accumulate_grad_hook(reverse_rows)
    up.register_post_accumulate_grad_hook(rescale)
    down.register_hook(Halve((torch.arange(down.numel()) % 3 > 0).to(down.dtype).view(down.shape)))
    down.register_hook(lambda grad: grad.roll(1, 0))
    down.register_hook(lambda grad: seen.append(float(grad.norm())))
    bias.register_hook(lambda grad: grad.zero_()).remove()


class Hooked(Task):
    """transformers' GPT-2, whose head is tied to its embedding."""

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes = GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=2, n_head=2)
        sizes.resid_pdrop = sizes.embd_pdrop = sizes.attn_pdrop = 0.0
        model = GPT2LMHeadModel(sizes).double()
        mlp = model.transformer.h[1].mlp
        set_hooks(model.lm_head.weight, mlp.c_fc.weight, mlp.c_proj.weight, mlp.c_fc.bias)
        return model

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=RATE)

    def data(self) -> Any:
        return TensorDataset(TOKENS)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        (tokens,) = batch
        logits = model(tokens[:, :-1]).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return Loss(total, tokens[:, 1:].numel())


@pytest.fixture(scope="module", autouse=True)
def public_models(pool: Pool) -> None:
    pool.preload(*SLOW_TO_IMPORT)


def plain_training() -> dict[str, Tensor]:
    """What torch alone does with the whole batch of every step."""
    task = Hooked()
    model = task.model()
    optimizer = task.optimizer(model)
    for tokens in TOKENS.split(BATCH):
        loss = task.loss(model, [tokens])
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(world: World, store: Any, values: dict[str, Any], kind: type[Any] = Hooked) -> tuple[Any, list[float]]:
    """A job: the weights after a run, and what one of the hooks saw."""
    seen.clear()
    plain = {"clip.norm": None, "lr.schedule": "constant", "lr.warmup": 0}
    return final(world, store, VALUES | plain | values, kind=kind)["weights"], list(seen)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm() / tensor.norm())
        assert error <= 1e-12, f"{name}: off by {error:.1e}"


SHARED = [
    ({}, 1),
    ({"strategy": "ddp"}, 2),
    ({"strategy": "ddp", "ddp.gradient_as_bucket_view": False}, 2),
    ({"ddp.find_unused_parameters": True}, 2),
    ({"strategy": "zero1"}, 3),
    ({"strategy": "fsdp"}, 2),
    ({"strategy": "fsdp-grads"}, 3),
    ({"strategy": "hsdp", "fsdp.replicas": 2}, 4),
]


@pytest.mark.parametrize(("values", "world"), SHARED, ids=str)
def test_hooks_change_gradients_as_in_plain_torch(pool: Pool, values: dict[str, Any], world: int) -> None:
    expected = plain_training()
    for weights, norms in pool.run(trained, values, world=world):
        assert_same(weights, expected)
        # Never with what was made up to try it, but with padding, where all ranks must run the same number.
        assert len(norms) in (STEPS * (BATCH // world), STEPS * -(-BATCH // world)), "once for each micro-batch"


def test_exact_bits_with_hooks(pool: Pool) -> None:
    (expected, _), *_ = pool.run(trained, {"exact": True}, world=1)
    for strategy in ("ddp", "fsdp"):
        for weights, _ in pool.run(trained, {"exact": True, "strategy": strategy}, world=2):
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("values", "world"),
    [
        ({"strategy": "tp"}, 2),
        ({"strategy": "fsdp", "mesh.tp": 2}, 4),
        ({"strategy": "pp"}, 2),
        ({"strategy": "fsdp", "mesh.pp": 2}, 4),
    ],
    ids=str,
)
def test_hooks_get_the_full_gradient_of_sharded_layers(pool: Pool, values: dict[str, Any], world: int) -> None:
    """In a pipeline the embedding belongs to the first stage and, as the head, to the last."""
    expected = plain_training()
    for weights, norms in pool.run(trained, values, world=world):
        assert_same(weights, expected)
        assert len(norms) in (0, STEPS), "with the sum of the whole step, on the ranks that hold the parameter"


# ---- refused --------------------------------------------------------------------------------------------


class Refused(Hooked):
    def __init__(self, set_hook: Callable[[Any], Any]) -> None:
        self.set_hook = set_hook

    def model(self) -> nn.Module:
        model = super().model()
        self.set_hook(model)
        return model


def first_weight(model: Any) -> nn.Parameter:
    return model.transformer.h[0].mlp.c_fc.weight


def clamp(model: Any) -> None:
    first_weight(model).register_hook(lambda grad: grad.clamp(-1e3, 1e3))


def read_itself(model: Any) -> None:
    weight = first_weight(model)
    weight.register_hook(lambda grad: grad * weight.detach().sign())


def on_rank_0(model: Any) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
        first_weight(model).register_hook(lambda grad: 2 * grad)


def refusal(world: World, store: Any, set_hook: Callable[[Any], Any], values: dict[str, Any]) -> None:
    """A job that ends before its first step."""
    with open_watched(world, store, VALUES | values) as builder:
        try:
            loop.fit(Refused(set_hook), builder)
        finally:
            assert builder.run is None or builder.run.steps_done == 0


@pytest.mark.parametrize(
    ("set_hook", "values", "world", "words"),
    [
        (clamp, {}, 1, ["h.0.mlp.c_fc.weight", "not linear", "clip.value"]),
        (clamp, {"strategy": "fsdp"}, 2, ["h.0.mlp.c_fc.weight", "not linear"]),
        (read_itself, {"strategy": "fsdp"}, 2, ["h.0.mlp.c_fc.weight", "replaces"]),
        (on_rank_0, {"strategy": "ddp"}, 2, ["h.0.mlp.c_fc.weight", "rank 0", "rank 1"]),
    ],
)
def test_refused_before_the_first_step(
    pool: Pool, set_hook: Callable[[Any], Any], values: dict[str, Any], world: int, words: list[str]
) -> None:
    errors = pool.errors(refusal, set_hook, values, world=world)
    assert_user_errors(errors, *words)
    assert {error.cause for error in errors if isinstance(error, UserError)} == {"hook"}


def test_a_parameter_may_be_read_where_it_is_not_replaced(pool: Pool) -> None:
    pool.run(allowed, read_itself, {"strategy": "ddp"}, world=2)


def allowed(world: World, store: Any, set_hook: Callable[[Any], Any], values: dict[str, Any]) -> None:
    """A job that trains."""
    with open_watched(world, store, VALUES | values) as builder:
        loop.fit(Refused(set_hook), builder)


def late(world: World, store: Any, values: dict[str, Any], at: str) -> None:
    """A job: a custom loop that sets a hook after `setup`."""
    with open_watched(world, store, VALUES | {"checks.every": 1} | values) as builder:
        own, task = OwnRun(builder), Hooked()
        plain: Any = task.model()
        old = first_weight(plain)
        model, _ = own.setup(plain, task.optimizer(plain))
        if at == "on the old parameter":
            old.register_hook(lambda grad: 2 * grad)
        elif at == "before the loop":
            first_weight(plain).register_hook(lambda grad: 2 * grad)
        for step in own.steps(task.data()):
            if at == "in the loop":
                first_weight(plain).register_post_accumulate_grad_hook(lambda parameter: None)
            for batch in step:
                loss = task.loss(model, batch)
                step.backward(loss.total, loss.weight)
            step.apply()


@pytest.mark.parametrize("at", ["on the old parameter", "before the loop", "in the loop"])
def test_a_hook_that_comes_late(pool: Pool, at: str) -> None:
    errors = pool.errors(late, {"strategy": "fsdp"}, at, world=2)
    assert_user_errors(errors, "h.0.mlp.c_fc.weight", "run.setup")
    assert {error.cause for error in errors if isinstance(error, UserError)} == {"hook"}


def test_a_frozen_parameter_never_calls_its_hook(pool: Pool) -> None:
    pool.run(allowed, freeze_clamped, {"strategy": "fsdp"}, world=2)


def freeze_clamped(model: Any) -> None:
    clamp(model)
    first_weight(model).requires_grad_(False)


# ---- the probe ------------------------------------------------------------------------------------------

count = 0


def counted(grad: Tensor) -> Tensor:
    global count
    count += 1
    print("a gradient")
    return 2 * grad


def stops_at_nan(grad: Tensor) -> None:
    if grad.isnan().any():
        raise FloatingPointError("a gradient of NaN")


@pytest.mark.parametrize(
    "hook",
    [
        stops_at_nan,
        lambda g: None,
        lambda g: -3 * g,
        lambda g: (g.mul_(0.5), None)[1],
        lambda g: g @ torch.linspace(-1, 1, 9).view(3, 3),
        lambda g: g - g.mean(),
        lambda g: torch.where(torch.eye(3) > 0, g, 0.0),
        counted,
    ],
)
def test_linear_hooks_are_told(hook: Callable[[Tensor], Tensor | None], capsys: Any) -> None:
    assert problem_with({0: hook}, {}, nn.Parameter(torch.ones(3, 3))) is None
    assert count == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g.clamp(-1e6, 1e6),
        lambda g: g / g.norm(),
        lambda g: g + 1e-6,
        lambda g: g.relu(),
        lambda g: g.abs(),
        lambda g: torch.nan_to_num(g),
        lambda g: g * (g.abs() > 1e-6),
        lambda g: g + 0.01 * torch.randn_like(g),
        lambda g: g.sum(0),
        lambda g: g.double(),
        lambda g: 1 / 0,
    ],
)
def test_other_hooks_are_told(hook: Callable[[Tensor], Tensor]) -> None:
    assert problem_with({0: hook}, {}, nn.Parameter(torch.ones(3, 3)))


def test_an_optimizer_in_the_backward_is_told() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    assert problem_with({}, {0: step}, weight)
    assert torch.equal(weight, torch.ones(3, 3))
    assert weight.grad is None


def test_state_of_a_hook_is_as_before() -> None:
    halve, box = Halve(), {"norms": [1.0]}
    note = {0: halve, 1: lambda g: box["norms"].append(float(g.sum()))}
    assert problem_with(note, {}, nn.Parameter(torch.ones(3, 3))) is None
    assert halve.calls == 0
    assert box == {"norms": [1.0]}


def test_a_hook_can_be_removed_after_it_was_taken() -> None:
    layer = nn.Linear(2, 2)
    double = layer.weight.register_hook(lambda grad: 2 * grad)
    negate = layer.weight.register_post_accumulate_grad_hook(lambda p: p.grad.neg_())
    hooks = take_hooks(layer)["weight"]
    ones = torch.ones(2, 2)
    assert torch.equal(hooks(ones, lambda: layer.weight), -2 * ones)
    double.remove()
    assert torch.equal(hooks(ones, lambda: layer.weight), -ones)
    negate.remove()
    assert torch.equal(hooks(ones, lambda: layer.weight), ones)
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight.grad, ones)  # torch itself no longer calls them
