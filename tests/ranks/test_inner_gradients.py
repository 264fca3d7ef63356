"""Losses that compute gradients themselves: penalties on gradients, and backward() where it does not belong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as borrowed_grad  # as many scripts import it

import lockstep
from lockstep.errors import UserError
from lockstep.parallel import inner_gradients
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import ResidualBlocks, Rows, assert_user_errors, fit, open_watched, trace_of, windows

STEPS, BATCH, SAMPLES = 3, 8, 20
VALUES = {"global_batch": BATCH, "micro_batch": 2, "steps": STEPS, "lr.schedule": "constant"}


class Trained(Task):
    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        self.terms = loss

    def model(self) -> nn.Module:
        return ResidualBlocks(depth=2).double()

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return Rows([torch.randn(SAMPLES, 6, generator=g).double(), torch.randn(SAMPLES, generator=g).double()])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(self.terms(model, *batch), len(batch[0]))


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """WGAN-GP: the critic is called before and after the gradient that is penalised."""
    between = x.flip(1).requires_grad_()
    scores = model(between)
    (slope,) = borrowed_grad(scores, between, torch.ones_like(scores), create_graph=True)
    return (model(x) * y).sum() + 10 * ((slope.norm(dim=1) - 1) ** 2).sum()


def penalty_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """No gradient reaches the model's output, and so no hook of FSDP."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - y) ** 2).sum()


def adversarial(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same graph twice, and a gradient that stays in the input."""
    x.requires_grad_()
    clean = ((model(x) - y) ** 2).sum()
    clean.backward(inputs=[x], retain_graph=True)
    assert x.grad is not None
    return clean + ((model((x + 0.1 * x.grad.sign()).detach()) - y) ** 2).sum()


def of_parameters(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    total = ((model(x) - y) ** 2).sum()
    slopes = torch.autograd.grad(total, list(model.parameters()), create_graph=True)
    return total + 0.0 * sum(slope.sum() for slope in slopes)


def own_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    total = ((model(x) - y) ** 2).sum()
    total.backward(retain_graph=True)  # the line to name
    return total


def of_something_else(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """An inner optimization that does not touch the model."""
    shift = torch.zeros(6, dtype=x.dtype, device=x.device, requires_grad=True)
    (shift - 0.3).square().sum().backward()
    assert shift.grad is not None
    return ((model(x - shift.grad) - y) ** 2).sum()


def huber(found: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(found, y, reduction="sum")


def compiled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """While torch compiles, it computes gradients of stand-ins for the model's output."""
    return torch.compile(huber, backend="aot_eager")(model(x), y)


def functional(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """torch.func computes with create_graph=True, whatever it computes."""
    slope = torch.func.grad(lambda shift: (shift - 0.3).square().sum())(torch.zeros_like(x[0]))
    return ((model(x - slope) - y) ** 2).sum()


def on_one_rank(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A gradient with a graph that has nothing to do with the model, on one rank only."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
        shift = torch.zeros(6, requires_grad=True)
        torch.autograd.grad(shift.square().sum(), shift, create_graph=True)
    return ((model(x) - y) ** 2).sum()


def by_hand(task: Trained, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain PyTorch, with the whole batch at once."""
    model = task.model()
    model.load_state_dict(initial)
    optimizer = task.optimizer(model)
    data = task.data()
    for ids in windows(SAMPLES, BATCH, "short", STEPS):
        loss = task.loss(model, task.collate([data[i] for i in ids]))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def whole_weights(world: Any, store: Any, task: Task, values: dict[str, Any]) -> Any:
    """A job: the weights before the first step and after the last, as plain tensors."""
    from lockstep.engine import loop

    with open_watched(world, store, VALUES | values) as builder:
        loop.fit(task, builder)
        driver, trace = builder.driver, trace_of(builder)
        assert driver is not None
        states = (trace.initial, trace.steps[-1].weights)
        return [{name: driver.full_tensor(name, tensor).cpu() for name, tensor in state.items()} for state in states]


def assert_as_by_hand(pool: Pool, task: Trained, values: dict[str, Any], world: int) -> None:
    initial, found = pool.run(whole_weights, task, values, world=world)[0]
    for name, expected in by_hand(task, initial).items():
        error = float((found[name] - expected).norm() / expected.norm())
        assert error <= 1e-12, f"{name}: {error:.1e}"


LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"strategy": "ddp"}, 2),
    ({"strategy": "zero1"}, 2),
    ({"strategy": "fsdp"}, 3),
    ({"strategy": "fsdp-grads"}, 2),
    ({"strategy": "hsdp", "fsdp.replicas": 2}, 4),
    ({"strategy": "fsdp", "exact": True}, 2),
    ({"strategy": "fsdp", "remat": "full"}, 2),
]


@pytest.mark.parametrize(("values", "world"), LAYOUTS, ids=lambda value: str(value))
def test_a_gradient_penalty_is_that_of_plain_pytorch(pool: Pool, values: dict[str, Any], world: int) -> None:
    assert_as_by_hand(pool, Trained(penalised), values, world)


@pytest.mark.parametrize("loss", [adversarial, of_something_else, of_parameters], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp-grads"])
def test_other_gradients_inside_a_loss(pool: Pool, loss: Any, strategy: str) -> None:
    assert_as_by_hand(pool, Trained(loss), {"strategy": strategy}, 2)


def in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).sub_(y) ** 2).sum()


def test_a_loss_may_change_the_output_of_a_pipeline_in_place(pool: Pool) -> None:
    assert_as_by_hand(pool, Trained(in_place), {"strategy": "pp"}, 2)


ALLOWED = [(compiled, "pp"), (functional, "tp"), (of_something_else, "pp")]


@pytest.mark.parametrize(("loss", "strategy"), ALLOWED, ids=lambda value: getattr(value, "__name__", value))
def test_gradients_of_something_else_are_nobodys_business(pool: Pool, loss: Any, strategy: str) -> None:
    assert_as_by_hand(pool, Trained(loss), {"strategy": strategy}, 2)


def test_one_rank_may_compute_a_gradient_of_something_else_alone(pool: Pool) -> None:
    """FSDP gathers nothing more for it."""
    assert_as_by_hand(pool, Trained(on_one_rank), {"strategy": "fsdp"}, 2)


@pytest.mark.parametrize("loss", [penalised, adversarial, of_something_else], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_selective_remat_goes_through_a_graph_once(pool: Pool, loss: Any, strategy: str) -> None:
    values = {"strategy": strategy, "remat": "selective"}
    if loss is of_something_else:
        assert_as_by_hand(pool, Trained(loss), values, 2)
    else:
        errors = pool.errors(fit, Trained(loss), VALUES | values, world=2)
        assert_user_errors(errors, "remat=selective", "test_inner_gradients.py", "remat=full")


def test_a_loss_of_gradients_only(pool: Pool) -> None:
    """Its gradients reach no hook of FSDP, which would drop them."""
    assert_as_by_hand(pool, Trained(penalty_alone), {"strategy": "fsdp"}, 2)


def errors_of(pool: Pool, loss: Any, strategy: str) -> list[BaseException | None]:
    return pool.errors(fit, Trained(loss), VALUES | {"strategy": strategy}, world=2)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "tp"])
def test_gradients_of_sharded_parameters_are_refused(pool: Pool, strategy: str) -> None:
    errors = errors_of(pool, of_parameters, strategy)
    assert_user_errors(errors, "the gradient of 'blocks.0.up.weight', which is sharded", "strategy=zero1")
    assert_user_errors(errors, "slopes = torch.autograd.grad(total")


def test_tensor_parallelism_refuses_what_it_would_get_wrong(pool: Pool) -> None:
    errors = errors_of(pool, penalised, "tp")
    assert_user_errors(errors, "cannot differentiate again", "test_inner_gradients.py", "borrowed_grad(")


def test_a_pipeline_refuses_gradients_inside_a_loss(pool: Pool) -> None:
    errors = errors_of(pool, penalised, "pp")
    assert_user_errors(errors, "a pipeline (mesh.pp)", "borrowed_grad(")


class InHalfPrecision(Trained):
    def model(self) -> nn.Module:
        return super().model().float()

    def data(self) -> Any:
        return Rows([tensor.float() for tensor in super().data().tensors])


def of_the_output(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = model(x)
    total = ((found - y) ** 2).sum()
    (slope,) = torch.autograd.grad(total, found, retain_graph=True)
    return total + 0.0 * slope.detach().sum()


def of_its_target(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    y.requires_grad_()
    (slope,) = torch.autograd.grad((y**2).sum(), y)
    return ((model(x) - slope.detach()) ** 2).sum()


def test_a_pipeline_that_scales_its_loss_judges_gradients_inside_it_alike(pool: Pool) -> None:
    """For the loss scale it calls the loss once more, before the schedule."""
    values = VALUES | {"strategy": "pp", "precision": "fp16"}
    errors = pool.errors(fit, InHalfPrecision(of_the_output), values, world=2)
    assert_user_errors(errors, "a pipeline (mesh.pp)", "torch.autograd.grad(total, found")
    pool.run(fit, InHalfPrecision(of_its_target), values, world=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_backward_inside_a_loss_is_named_with_its_line(pool: Pool, strategy: str) -> None:
    errors = errors_of(pool, own_backward, strategy)
    assert_user_errors(errors, "the loss calls backward() itself", "test_inner_gradients.py")
    assert_user_errors(errors, "total.backward(retain_graph=True)  # the line to name")


def test_backward_in_a_loop_of_ones_own_is_named_with_its_line(pool: Pool) -> None:
    errors = pool.errors(own_loop_with_backward, world=2)
    assert_user_errors(errors, "calls backward() itself", "loss.backward()  # in the loop", "step.backward(")


def own_loop_with_backward(world: Any, store: Any) -> None:
    from lockstep.engine.own_loop import OwnRun

    with open_watched(world, store, VALUES | {"strategy": "fsdp"}) as builder:
        task, own = Trained(penalised), OwnRun(builder)
        plain = task.model()
        model, _ = own.setup(plain, task.optimizer(plain))
        try:
            for step in own.steps(task.data(), task.collate):
                for x, y in step:
                    loss = ((model(x) - y) ** 2).sum()
                    loss.backward()  # in the loop
                    step.backward(loss, len(x))
                step.apply()
        except BaseException as error:
            builder.fail(error)
            assert torch.autograd._engine_run_backward is inner_gradients.TORCH_ENGINE  # pyrefly: ignore[missing-attribute]
            raise


class Small(Task):
    """A run inside the loop of another one."""

    fails = False

    def model(self) -> nn.Module:
        return nn.Linear(6, 1)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def data(self) -> Any:
        return Rows([torch.zeros(16, 6), torch.zeros(16, 1)])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if self.fails:
            raise ValueError("a mistake of the user")
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))


def own_loop_around(small: Small, folder: Path) -> None:
    """A custom loop that computes gradients itself by mistake, after a run in its body."""
    settings = {"steps": 2, "global_batch": 8, "log.progress": "off", "checks.loss": "off"}
    with lockstep.start(run_dir=folder / "outer", **settings) as run:
        plain = small.model()
        model, _ = run.setup(plain, small.optimizer(plain))
        for step in run.steps(small.data()):
            for x, _ in step:
                with contextlib.suppress(ValueError):
                    lockstep.fit(small, run_dir=folder / f"inner-{step.index}", **settings)
                loss = model(x).square().sum()
                loss.backward(retain_graph=True)
                step.backward(loss, len(x))
            step.apply()


@pytest.mark.parametrize("fails", [False, True])
def test_backward_in_a_loop_is_refused_after_a_run_inside_it(tmp_path: Path, fails: bool) -> None:
    """The inner run switched the interception off, and the gradients of the outer model were doubled."""
    small = Small()
    small.fails = fails
    with pytest.raises(UserError, match=r"the loss calls backward\(\) itself"):
        own_loop_around(small, tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"outer", "inner-0"}
    assert torch.autograd._engine_run_backward is inner_gradients.TORCH_ENGINE  # pyrefly: ignore[missing-attribute]


def own_loop_that_fails(small: Small, folder: Path) -> None:
    settings = {"steps": 2, "global_batch": 8, "log.progress": "off", "checks.loss": "off"}
    with lockstep.start(run_dir=folder, **settings) as run:
        plain = small.model()
        run.setup(plain, small.optimizer(plain))
        for step in run.steps(small.data()):
            batches = iter(step)
            next(batches)
            raise ValueError("a mistake of the user")


def test_a_loop_that_fails_and_keeps_its_iterator_leaves_torch_as_it_was(tmp_path: Path) -> None:
    """The traceback keeps the iterator of the batches, which Python does not close before the run has ended."""
    with pytest.raises(ValueError, match="a mistake") as caught:
        own_loop_that_fails(Small(), tmp_path / "run")

    assert torch.autograd._engine_run_backward is inner_gradients.TORCH_ENGINE  # pyrefly: ignore[missing-attribute]
    del caught
    assert torch.autograd._engine_run_backward is inner_gradients.TORCH_ENGINE  # pyrefly: ignore[missing-attribute]


def test_torch_is_left_as_it_was() -> None:
    engine = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
    calls: list[inner_gradients.InnerGradient] = []

    def loss() -> None:
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        raise RuntimeError(str(borrowed_grad(x.prod(), x)[0].tolist()))

    with pytest.raises(RuntimeError, match=r"\[1.0, 1.0\]"), inner_gradients.InnerGradients(calls.append):
        loss()
    assert torch.autograd._engine_run_backward is engine  # pyrefly: ignore[missing-attribute]
    assert [call.accumulates for call in calls] == [True, False]
    assert "x.sum().backward()" in calls[0].call_site


def test_edges_of_a_graph_are_followed_like_tensors() -> None:
    """torch takes a GradientEdge wherever it takes a tensor."""
    model = nn.Linear(2, 1)
    names = {id(p): name for name, p in model.named_parameters()}
    total = model(torch.ones(3, 2)).sum()
    of_total, of_weight = (torch.autograd.graph.get_gradient_edge(tensor) for tensor in (total, model.weight))

    def refuse(inner: inner_gradients.InnerGradient) -> None:
        inner_gradients.refuse_backward(inner, names)

    for outputs, inputs in ((of_total, None), (of_total, [of_weight]), (total, [of_weight])):
        with pytest.raises(UserError, match="calls backward"), inner_gradients.InnerGradients(refuse):
            torch.autograd.backward(outputs, inputs=inputs)
    assert model.weight.grad is None
    edges = inner_gradients.InnerGradient("", [of_total], [of_weight], True, True, False)
    assert inner_gradients.asked_for(edges, names) == "weight"
    assert edges.reaches({id(model.bias)})
    assert edges.reaches((), {"AddmmBackward0"})
    assert not edges.reaches({id(total)}, {"MulBackward0"})
