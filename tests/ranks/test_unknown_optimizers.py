"""Optimizers that do not know DTensors: those that need whole parameters, and those that treat all elements alike."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.transfer import to_device
from lockstep.errors import UserError
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.optim.capabilities import StepHooks, needs_full_parameters
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.registry import TRAITS
from lockstep.optim.unknown.probe import ProbeFailed, check_independent
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import DEVICE, ResidualBlocks, Rows, assert_user_errors, fit, open_watched, trace_of, windows

STEPS, BATCH, SAMPLES = 3, 8, 20
VALUES = {"global_batch": BATCH, "micro_batch": 2, "steps": STEPS, "lr.schedule": "constant"}


# ---- optimizers as people write them ----


class Plain(torch.optim.Optimizer):
    """p -= rate * change(p, gradient)."""

    def __init__(self, parameters: Any, lr: float = 0.05):
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            for p in [p for p in group["params"] if p.grad is not None]:
                p.sub_(group["lr"] * self.change(p, p.grad, self.state[p], group))

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lamb(Plain):
    """With numbers on the host, as many public ones have: `.item()` of a DTensor's norm is that of a shard."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].mul_(0.9).add_(grad, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        # Two counters that depend on how often the step is called.
        change = state["m"] / (1 - 0.9 ** group["n"]) / (state["v"].sqrt() / self.calls + 1e-6)
        return change * (p.data.norm().item() / change.norm().item())


class Lion(Plain):
    """Elementwise, through an index that DTensors refuse."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["m"] = torch.zeros_like(p)
        change = (0.9 * state["m"] + 0.1 * grad).sign()
        change[grad == 0] = 0.0
        state["m"].lerp_(grad, 0.01)
        return change


class Normalised(Plain):
    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad / (torch._foreach_norm([grad])[0].add_(1e-8))


class Shampoo(Plain):
    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if grad.dim() != 2:
            return grad
        if not state:
            state["left"] = torch.eye(len(grad), dtype=grad.dtype, device=grad.device) * 1e-3
        state["left"] += grad @ grad.T
        values, vectors = torch.linalg.eigh(state["left"])
        return vectors @ torch.diag(values.clamp(min=1e-9) ** -0.5) @ vectors.T @ grad


class GlobalNorm(Plain):
    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        norms = [q.grad.norm() for group in self.param_groups for q in group["params"]]
        return grad / torch.stack(norms).norm()


class InFloat32(Plain):
    """As one with a kernel of its own."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if p.dtype != torch.float32:
            raise TypeError(f"float32 expected, not {p.dtype}")
        return grad


class CoupledInFloat32(InFloat32):
    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        others = [q.grad.norm() for group in self.param_groups for q in group["params"]]
        return super().change(p, grad, state, group) / torch.stack(others).norm()


class ClipsLarge(Plain):
    """Clips all gradients together, once they are large."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        norms = [q.grad.norm() for group in self.param_groups for q in group["params"]]
        return grad * (100.0 / torch.stack(norms).norm()).clamp(max=1.0)


class Langevin(Plain):
    """Adds noise to every update."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(p)


# ---- what they are taken for ----


def small() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 6, 3), nn.Linear(6, 4), nn.Linear(4, 1))


ON_DTENSORS = [
    resolve_name(path) for path, traits in TRAITS.items() if traits.works_on_shards and path.startswith("torch.")
]
INDEPENDENT = [*ON_DTENSORS, torch.optim.Rprop, torch.optim.Adafactor, Lion, Lamb, Normalised, Shampoo]


@pytest.mark.parametrize("kind", INDEPENDENT, ids=lambda kind: kind.__name__)
def test_a_trial_accepts_independent_updates_and_leaves_the_optimizer_alone(kind: Any) -> None:
    optimizer = kind(small().parameters(), lr=0.0)  # as a warm-up leaves it
    before = len(optimizer.state)
    check_independent(optimizer)
    assert (len(optimizer.state), optimizer.param_groups[0]["lr"]) == (before, 0.0)
    assert getattr(optimizer, "calls", 0) == 0


def test_a_trial_accepts_muon() -> None:
    check_independent(torch.optim.Muon([p for p in small().parameters() if p.dim() == 2]))


@pytest.mark.parametrize("kind", [GlobalNorm, ClipsLarge])
def test_a_trial_fails_if_parameters_are_coupled(kind: Any) -> None:
    with pytest.raises(ProbeFailed, match="depends on the others"):
        check_independent(kind(small().parameters()))


def test_an_optimizer_that_draws_noise_is_refused_for_its_noise() -> None:
    """On one process the second parameter gets other numbers than on a rank that updates only this one."""
    with pytest.raises(ProbeFailed, match="draws random numbers"):
        check_independent(Langevin(small().parameters()))


def test_what_takes_float32_only_is_tried_in_it() -> None:
    check_independent(InFloat32(small().parameters()))
    with pytest.raises(ProbeFailed, match="depends on the others"):
        check_independent(CoupledInFloat32(small().parameters()))


def test_a_trial_never_proves_that_shards_are_enough() -> None:
    """Lion is elementwise; so, on small parameters, is what looks at matrices only if they are large."""
    assert needs_full_parameters(Lion(small().parameters()), StepHooks([]))
    assert not needs_full_parameters(torch.optim.Rprop(small().parameters()), StepHooks([]))


# ---- as in plain PyTorch ----


class Unknown(Task):
    """Every block under another optimizer, or all of them under one."""

    def __init__(self, kind: Any = None):
        self.kind = kind

    def model(self) -> nn.Module:
        return ResidualBlocks(depth=6).double()

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def optimizer(self, model: Any) -> Any:
        if self.kind:
            return self.kind(model.parameters())
        one, *blocks = model.blocks
        muon = [one.up.weight, one.down.weight]
        rest = [one.up.bias, one.down.bias, *model.out.parameters()]
        kinds = [torch.optim.Adafactor, Lamb, Lion, Normalised, Shampoo]
        others = [kind(block.parameters(), lr=0.02) for kind, block in zip(kinds, blocks, strict=True)]
        return [torch.optim.Muon(muon, lr=0.02), torch.optim.Rprop(rest), *others]

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return Rows([torch.randn(SAMPLES, 6, generator=g).double(), torch.randn(SAMPLES, generator=g).double()])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))


def whole_weights(world: Any, store: Any, values: dict[str, Any]) -> Any:
    """A job: the weights before the first step and after the last, as plain tensors."""
    from lockstep.engine import loop
    from lockstep.runtime.shards import full_tensor

    with open_watched(world, store, VALUES | values) as builder:
        loop.fit(Unknown(), builder)
        trace = trace_of(builder)
        states = (trace.initial, trace.steps[-1].weights)
        return [{name: full_tensor(tensor).cpu() for name, tensor in state.items()} for state in states]


def by_hand(initial: dict[str, Tensor], resumed_after: int = 0) -> dict[str, Tensor]:
    task = Unknown()
    model = task.model()
    model.load_state_dict(initial)
    model.to(DEVICE)  # eigenvectors are not unique: a GPU finds others than a CPU
    optimizers = task.optimizer(model)
    data = task.data()
    for number, ids in enumerate(windows(SAMPLES, BATCH, "short", STEPS)):
        loss = task.loss(model, to_device(task.collate([data[i] for i in ids]), torch.device(DEVICE)))
        model.zero_grad()
        (loss.total / loss.weight).backward()
        for optimizer in optimizers:
            if number == resumed_after:
                optimizer.calls = 0  # torch does not save what is neither state nor a setting of a group
            optimizer.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm() / tensor.norm())
        assert error <= 1e-12, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("strategy", "world"), [("zero1", 2), ("fsdp", 3), ("fsdp-grads", 2), ("hsdp", 4), ("tp", 2)])
def test_whole_parameters_give_the_numbers_of_plain_pytorch(pool: Pool, strategy: str, world: int) -> None:
    initial, found = pool.run(whole_weights, {"strategy": strategy}, world=world)[0]
    assert_same(found, by_hand(initial))


def test_their_state_is_saved_in_shards_and_read_on_another_number_of_ranks(pool: Pool, tmp_path: Any) -> None:
    values = {"run_dir": str(tmp_path / "run"), "strategy": "fsdp", "steps": STEPS, "checkpoint.every": 1}
    initial, _ = pool.run(whole_weights, values | {"steps": 2}, world=2)[0]
    _, found = pool.run(whole_weights, values | {"strategy": "fsdp-grads", "resume": "auto"}, world=3)[0]
    assert_same(found, by_hand(initial, resumed_after=2))


# ---- refused ----


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tp", "pp"])
def test_an_optimizer_that_couples_parameters_is_refused(pool: Pool, strategy: str) -> None:
    errors = pool.errors(fit, Unknown(GlobalNorm), VALUES | {"strategy": strategy}, world=2)
    assert_user_errors(errors, "GlobalNorm cannot be used here", "depends on the others", "strategy=ddp")


def hooked(world: Any, store: Any) -> None:
    def optimizer(parameters: Any) -> Any:
        made = Normalised(parameters)
        made.register_step_post_hook(lambda *_: None)
        return made

    fit(world, store, Unknown(optimizer), VALUES | {"strategy": "fsdp"})


def test_a_hook_on_the_step_of_whole_parameters_is_refused(pool: Pool) -> None:
    assert_user_errors(pool.errors(hooked, world=2), "Normalised cannot be used here", "a hook on its step")


class Clipped(Unknown):
    """Its optimizer clips by itself, in a hook that knows only its own parameters."""

    stepped_by: type[torch.optim.Optimizer] = torch.optim.SGD

    def optimizer(self, model: Any) -> Any:
        def clip(optimizer: Any, *_: Any) -> None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

        made = self.stepped_by(model.parameters(), lr=0.1)
        made.register_step_pre_hook(clip)
        return made


@pytest.mark.parametrize("strategy", ["zero1", "pp"])
def test_a_hook_before_the_step_of_some_parameters_is_refused(pool: Pool, strategy: str) -> None:
    errors = pool.errors(fit, Clipped(), VALUES | {"strategy": strategy}, world=2)
    assert_user_errors(errors, "SGD cannot be used here", "register_step_pre_hook", "clip.norm=1")


class Averaged(Unknown):
    """Its optimizer averages the weights by itself, in a hook after each step."""

    def optimizer(self, model: Any) -> Any:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.register_step_post_hook(lambda *_: None)
        return made


@pytest.mark.parametrize("strategy", ["zero1", "pp"])
def test_a_hook_after_the_step_of_some_parameters_is_refused(pool: Pool, strategy: str) -> None:
    """The updates of the other ranks are not there yet when it is called."""
    errors = pool.errors(fit, Averaged(), VALUES | {"strategy": strategy}, world=2)
    assert_user_errors(errors, "SGD cannot be used here", "register_step_post_hook", "after_step()")


@pytest.mark.parametrize("task", [Clipped(), Averaged()], ids=lambda task: type(task).__name__)
def test_a_hook_on_the_step_of_master_weights_is_refused(task: Unknown) -> None:
    """It would be called for a few parameters at a time, and see float32 copies."""
    model = nn.Linear(2, 2).bfloat16()
    optimizers = Optimizers(task.optimizer(model), model)
    with pytest.raises(UserError, match="SGD cannot be used here: parameters are stored in bfloat16") as error:
        optimizers.use_masters(MasterWeights(optimizers.all, model, "master", seed=0))
    assert "precision=bf16," in error.value.fix


class ClippedShards(Clipped):
    stepped_by = torch.optim.Rprop  # it gets this rank's shards as plain tensors


def test_a_hook_before_the_step_of_plain_shards_is_refused(pool: Pool) -> None:
    errors = pool.errors(fit, ClippedShards(), VALUES | {"strategy": "fsdp"}, world=2)
    assert_user_errors(errors, "Rprop cannot be used here", "register_step_pre_hook", "clip.norm=1")


def clipped_weights(world: Any, store: Any, values: dict[str, Any]) -> Any:
    from lockstep.engine import loop
    from lockstep.runtime.shards import full_tensor

    with open_watched(world, store, VALUES | values) as builder:
        loop.fit(Clipped(), builder)
        return {name: full_tensor(tensor) for name, tensor in trace_of(builder).steps[-1].weights.items()}


def test_clipping_before_the_step_of_shards_is_that_of_whole_gradients(pool: Pool) -> None:
    expected = pool.run(clipped_weights, {}, world=1)[0]
    assert_same(pool.run(clipped_weights, {"strategy": "fsdp"}, world=2)[0], expected)


def test_a_hook_before_the_step_finds_gradients_at_their_true_size() -> None:
    """A fused optimizer could divide them itself, after the hook."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert Optimizers(optimizer, model).divides_gradients
    optimizer.register_step_pre_hook(lambda *_: None)
    assert not Optimizers(optimizer, model).divides_gradients


def test_nothing_is_tried_where_parameters_are_whole() -> None:
    class Picky(Plain):
        def change(self, p: Tensor, *rest: Any) -> Tensor:
            raise UserError("it was called", "", "")

    model = nn.Linear(2, 2)
    assert Optimizers(Picky(model.parameters()), model).banner == {}
