"""Custom loops that make several updates: two optimizers in turn, several passes over a batch, SAM.

All of them are compared with plain PyTorch, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from lockstep.callbacks import Unfreeze
from lockstep.engine.own_loop import OwnRun, SeveralModels, _are_trained_in_turn
from lockstep.runtime.world import World
from lockstep.task import Loss
from pool import Pool
from ranks.support import assert_user_errors, open_watched, windows
from zoo import SLOW_TO_IMPORT

STEPS, BATCH, LENGTH = 6, 8, 40
VALUES = {"global_batch": BATCH, "micro_batch": 2, "steps": STEPS}
UNUSED = {"ddp.find_unused_parameters": True}
STRATEGIES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, UNUSED),
    (3, UNUSED),
    (2, {"strategy": "fsdp"}),
    (2, {"strategy": "zero1", **UNUSED}),
]
EXACT = (3, {"strategy": "fsdp", "exact": True})
DATA = TensorDataset(torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(1)).double())


class Gan(nn.Module):
    """A generator that moves points, and a discriminator that tells them from the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.discriminator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def forward(self, which: str, x: Tensor) -> Tensor:
        """Return the SUM of the loss of one of the two. The generator's loss also depends on the discriminator."""
        fake = self.generator(x.flip(0) * 0.5)
        if which == "generator":
            return F.softplus(-self.discriminator(fake)).sum()
        return F.softplus(-self.discriminator(x)).sum() + F.softplus(self.discriminator(fake.detach())).sum()


def optimizers_of(model: Any) -> tuple[Any, Any]:
    # Adam moves its moments, and decay the weights, even where a gradient is 0.
    generator = torch.optim.AdamW(model.generator.parameters(), lr=0.02, weight_decay=0.1)
    return generator, torch.optim.SGD(model.discriminator.parameters(), lr=0.05, momentum=0.9)


def scheduler_of(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


# A loss without its step: which of the two is trained in a pass.
Plan = Callable[[int], list[str]]


def critic_first(step: int) -> list[str]:
    """n_critic = 2: the generator moves in every third step."""
    return ["generator" if step % 3 == 2 else "discriminator"]


def both(step: int) -> list[str]:
    """The usual loop: two backwards through one batch, the generator against the new discriminator."""
    return ["discriminator", "generator"]


def batches() -> Iterator[Tensor]:
    for ids in windows(LENGTH, BATCH, "drop", STEPS):
        yield DATA[ids][0]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_pytorch(plan: Plan) -> Tensor:
    model = Gan()
    generator, discriminator = optimizers_of(model)
    scheduler = scheduler_of(discriminator)
    for step, x in enumerate(batches()):
        for which in plan(step):
            generator.zero_grad()
            discriminator.zero_grad()
            # Halves of the batch in turn: `flip` of the tests' model is within a micro-batch.
            sum((model(which, part) for part in x.split(2)), torch.zeros(())).div(len(x)).backward()
            (generator if which == "generator" else discriminator).step()
            if which == "discriminator":
                scheduler.step()
    return flat(model)


def train_two_models(world: World, store: Any, values: dict[str, Any]) -> tuple[Tensor, float]:
    """The usual loop, in its usual words."""
    with open_watched(world, store, VALUES | {"evaluate.batch": 8} | values) as builder:
        own = OwnRun(builder)
        plain = Gan()
        parts = plain.generator, plain.discriminator, *optimizers_of(plain)
        generator, discriminator, first, second, _ = own.setup(*parts, scheduler_of(parts[-1]))
        assert next(generator.parameters()) is next(plain.generator.parameters())
        for step in own.steps(DATA, passes=2):
            for (x,) in step:
                fake = generator(x.flip(0) * 0.5)
                loss = F.softplus(-discriminator(x)).sum() + F.softplus(discriminator(fake.detach())).sum()
                step.backward(loss, weight=len(x))
            step.apply(second)
            for (x,) in step:
                fake = generator(x.flip(0) * 0.5)
                step.backward(F.softplus(-discriminator(fake)).sum(), weight=len(x))
            step.apply(first)

        def eval_loss(models: Any, batch: Any) -> Loss:
            generate, discriminate = models
            return Loss(F.softplus(-discriminate(generate(batch[0]))).sum(), len(batch[0]))

        evaluated = own.evaluate(DATA, eval_loss)["loss"]
        whole = builder.driver.model
        full = [builder.driver.full_tensor(name, p).detach().flatten() for name, p in whole.named_parameters()]
        own.close()
        return torch.cat(full).cpu(), evaluated


def test_a_copy_of_one_of_two_models_is_a_model_by_itself() -> None:
    """For a moving average of the generator's weights."""
    plain = Gan()
    generator, _ = SeveralModels([plain.generator, plain.discriminator])
    copied = copy.deepcopy(generator)
    assert type(copied) is nn.Sequential
    assert torch.equal(flat(copied), flat(plain.generator))
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in plain.parameters()}


# Of several models with an optimizer each it is known that a loss reaches a part of them only.
WITHOUT_KEY = [(world, dict(values.items() - UNUSED.items())) for world, values in STRATEGIES]


@pytest.mark.parametrize(("world", "values"), WITHOUT_KEY, ids=str)
def test_two_models_are_what_they_are_in_plain_pytorch(pool: Pool, world: int, values: dict[str, Any]) -> None:
    expected = plain_pytorch(both)
    reference = Gan()
    nn.utils.vector_to_parameters(expected, reference.parameters())
    loss = F.softplus(-reference.discriminator(reference.generator(DATA[:][0]))).mean().item()
    for weights, evaluated in pool.run(train_two_models, values, world=world):
        assert (weights - expected).abs().max() <= 1e-12
        assert evaluated == pytest.approx(loss, rel=1e-12)


def test_two_models_are_two_calls_for_exact_fsdp(pool: Pool) -> None:
    world, values = EXACT
    errors = pool.errors(train_two_models, values, world=world)
    assert_user_errors(errors, "a block of the model is called more than once in a forward", "a module around it")


def train_gan(world: World, store: Any, plan: Plan, values: dict[str, Any]) -> Tensor:
    with open_watched(world, store, VALUES | values) as builder:
        own = OwnRun(builder)
        plain = Gan()
        first, second = optimizers_of(plain)
        model, first, second, _ = own.setup(plain, first, second, scheduler_of(second))
        for step in own.steps(DATA, passes=len(plan(0))):
            for which in plan(step.index):
                for (x,) in step:
                    step.backward(model(which, x), weight=len(x))
                step.apply(first if which == "generator" else second)
        names = [name for name, _ in plain.named_parameters()]
        full = [builder.driver.full_tensor(name, plain.get_parameter(name)).detach().flatten() for name in names]
        own.close()
        return torch.cat(full).cpu()


@pytest.mark.parametrize(("world", "values"), [*STRATEGIES, EXACT], ids=str)
@pytest.mark.parametrize("plan", [critic_first, both])
def test_a_gan_is_what_it_is_in_plain_pytorch(pool: Pool, plan: Plan, world: int, values: dict[str, Any]) -> None:
    expected = plain_pytorch(plan)
    for weights in pool.run(train_gan, plan, values, world=world):
        assert (weights - expected).abs().max() <= 1e-12


# ---- a model of transformers ------------------------------------------------------------------------------

TOKENS = TensorDataset(torch.randint(0, 17, (LENGTH, 6), generator=torch.Generator().manual_seed(2)))


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(9)
    size = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def bodies_and_tables(model: Any) -> tuple[Any, Any, Any]:
    """Two optimizers, and a scheduler for the first."""
    from transformers import get_cosine_schedule_with_warmup

    tables = [model.transformer.wte.weight, model.transformer.wpe.weight]
    bodies = [p for p in model.parameters() if not any(p is table for table in tables)]
    adam = torch.optim.AdamW(bodies, lr=0.01)
    return adam, torch.optim.SGD(tables, lr=0.1, momentum=0.9), get_cosine_schedule_with_warmup(adam, 1, STEPS)


def token_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def train_language_model(world: World, store: Any, values: dict[str, Any]) -> Tensor:
    with open_watched(world, store, VALUES | values) as builder:
        own = OwnRun(builder)
        plain = language_model()
        model, adam, sgd, _ = own.setup(plain, *bodies_and_tables(plain))
        for step in own.steps(TOKENS):
            for (tokens,) in step:
                step.backward(token_loss(model, tokens), weight=tokens[:, 1:].numel())
            step.apply(sgd if step.index % 2 else adam)
        full = [builder.driver.full_tensor(name, p).detach().flatten() for name, p in plain.named_parameters()]
        own.close()
        return torch.cat(full).cpu()


@pytest.mark.parametrize(("world", "values"), [(1, {}), (2, {}), (2, {"strategy": "fsdp"})], ids=str)
def test_a_model_of_transformers_with_two_optimizers_in_turn(pool: Pool, world: int, values: dict[str, Any]) -> None:
    pool.preload(*SLOW_TO_IMPORT)
    model = language_model()
    adam, sgd, scheduler = bodies_and_tables(model)
    for step, ids in enumerate(windows(LENGTH, BATCH, "drop", STEPS)):
        model.zero_grad()
        (tokens,) = TOKENS[ids]
        (token_loss(model, tokens) / tokens[:, 1:].numel()).backward()
        (sgd if step % 2 else adam).step()
        if step % 2 == 0:
            scheduler.step()

    for weights in pool.run(train_language_model, values, world=world):
        assert (weights - flat(model)).abs().max() <= 1e-12


# ---- two gradients for one update -------------------------------------------------------------------------

RHO = 0.05


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def cost(model: nn.Module, x: Tensor) -> Tensor:
    return ((model(x).squeeze(-1) - x.sum(-1).sin()) ** 2).sum()


def plain_sam() -> Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in batches():
        optimizer.zero_grad()
        (cost(model, x) / len(x)).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad * RHO / norm)  # type: ignore[operator]
        optimizer.zero_grad()
        (cost(model, x) / len(x)).backward()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
        optimizer.step()
    return flat(model)


def train_sam(world: World, store: Any, values: dict[str, Any]) -> Tensor:
    with open_watched(world, store, VALUES | values) as builder:
        own = OwnRun(builder)
        plain = network()
        model, _ = own.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
        for step in own.steps(DATA, passes=2):
            for (x,) in step:
                step.backward(cost(model, x), weight=len(x))
            norm = step.measure().grad_norm
            before = [p.detach().clone() for p in plain.parameters()]
            with torch.no_grad():
                for p in plain.parameters():
                    p.add_(p.grad * RHO / norm)
            for (x,) in step:
                step.backward(cost(model, x), weight=len(x))
            with torch.no_grad():
                for p, old in zip(plain.parameters(), before, strict=True):
                    p.copy_(old)
            assert step.apply().applied
        full = [builder.driver.full_tensor(name, p).detach().flatten() for name, p in plain.named_parameters()]
        own.close()
        return torch.cat(full).cpu()


@pytest.mark.parametrize(("world", "values"), [(1, {}), (2, {}), (2, {"strategy": "fsdp"}), (3, {"exact": True})])
def test_sam_is_what_it_is_in_plain_pytorch(pool: Pool, world: int, values: dict[str, Any]) -> None:
    expected = plain_sam()
    for weights in pool.run(train_sam, values, world=world):
        assert (weights - expected).abs().max() <= 1e-12


def measure_before_unfreezing(world: World, store: Any) -> list[tuple[float, float]]:
    """A job: the norm of each step, measured and applied without a change in between; one layer is trained later."""
    found = []
    with open_watched(world, store, VALUES) as builder:
        own = OwnRun(builder)
        own.add_callback(Unfreeze({"0.*": 3}))
        plain = network()
        model, _ = own.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in own.steps(DATA, passes=2):
            for (x,) in step:
                step.backward(cost(model, x), weight=len(x))
            measured = step.measure()
            assert (next(model.parameters()).grad is None) == (step.index < 3)
            for (x,) in step:
                step.backward(cost(model, x), weight=len(x))
            applied = step.apply()
            assert applied is not None
            found.append((measured.grad_norm, applied.grad_norm))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_measured_gradient_leaves_out_what_is_not_trained_yet(pool: Pool, world: int) -> None:
    for measured, applied in pool.run(measure_before_unfreezing, world=world)[0]:
        assert measured == pytest.approx(applied, rel=1e-12)


def skip_after_measuring(world: World, store: Any, values: dict[str, Any]) -> None:
    """A job: the gradient of the first pass is finite in every step, and that of the second is not."""
    with open_watched(world, store, VALUES | values) as builder:
        own = OwnRun(builder)
        plain = network()
        model, _ = own.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in own.steps(DATA, passes=2):
            for (x,) in step:
                step.backward(cost(model, x), weight=len(x))
            assert not step.measure().applied
            for (x,) in step:
                step.backward(cost(model, x) * torch.nan, weight=len(x))
            step.apply()
        own.close()


def test_a_pass_that_is_only_measured_is_no_step_between_two_skipped_ones(pool: Pool) -> None:
    values = {"nonfinite.max_in_a_row": 2}
    with pytest.raises(Exception, match=r"step 2: .*2 such steps in a row.*max_in_a_row=2"):
        pool.run(skip_after_measuring, values, world=1)


def test_passes_draw_the_same_numbers(pool: Pool) -> None:
    def job(world: World, store: Any) -> list[list[float]]:
        drawn: list[list[float]] = []
        with open_watched(world, store, VALUES | {"log.every": 1}) as builder:
            own = OwnRun(builder)
            plain = network()
            model, _ = own.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
            for step in own.steps(DATA, passes=2):
                for _ in range(2):
                    drawn.append([])
                    for (x,) in step:
                        drawn[-1].append(float(torch.rand(())))
                        step.backward(cost(model, x), weight=len(x))
                    step.apply()
            own.close()
        return drawn

    drawn = pool.run(job, world=2)[0]
    assert len(drawn) == 2 * STEPS  # a step is one step, however many passes it makes
    assert drawn[::2] == drawn[1::2]
    assert len({number for numbers in drawn for number in numbers}) == STEPS * BATCH // 2 // 2


# ---- what is refused --------------------------------------------------------------------------------------


def refused(world: World, store: Any, body: Callable[..., None], values: dict[str, Any], passes: int) -> None:
    with open_watched(world, store, VALUES | values) as builder:
        own = OwnRun(builder)
        plain = Gan()
        model, first, second = own.setup(plain, *optimizers_of(plain))
        for step in own.steps(DATA, passes=passes):
            body(step, model, first, second)


def discriminate(step: Any, model: Any) -> None:
    for (x,) in step:
        step.backward(model("discriminator", x), weight=len(x))


def after_one_pass(act: Callable[..., Any]) -> Callable[..., None]:
    """Return the body of a loop: one pass over the batches, and then `act`."""

    def body(step: Any, model: Any, first: Any, second: Any) -> None:
        discriminate(step, model)
        act(step, model, first, second)

    return body


applies_once = after_one_pass(lambda step, model, first, second: step.apply(second))
names_none = after_one_pass(lambda step, model, first, second: step.apply())
names_the_other = after_one_pass(lambda step, model, first, second: step.apply(first))
names_a_stranger = after_one_pass(
    lambda step, model, first, second: step.apply(torch.optim.SGD(model.parameters(), lr=0.1))
)
measures_last = after_one_pass(lambda step, model, first, second: step.measure())
applies_without_a_pass = after_one_pass(lambda step, model, first, second: (step.apply(second), step.apply(first)))
goes_on_after_the_end = after_one_pass(
    lambda step, model, first, second: (step.apply(second), discriminate(step, model))
)

MISTAKES = [
    (names_none, 1, ("must name the optimizers to step, because there are 2", "step.apply(optimizer)")),
    (names_the_other, 1, ("step 1 has no gradient for any parameter of the optimizer",)),
    (names_a_stranger, 1, ("something other than the optimizers of run.setup",)),
    (measures_last, 1, ("step.measure() was called in the last of 1 passes", "passes=2")),
    (applies_once, 2, ("step 1 ended without step.apply() in pass 2 of 2",)),
    (applies_without_a_pass, 2, ("step.apply() was called after 0 of",)),
    (goes_on_after_the_end, 1, ("went over the batches of step 1 again", "passes=2")),
    (applies_once, 0, ("run.steps(passes=0)",)),
]


@pytest.mark.parametrize(("body", "passes", "words"), MISTAKES)
def test_mistakes_are_named(pool: Pool, body: Callable[..., None], passes: int, words: tuple[str, ...]) -> None:
    assert_user_errors(pool.errors(refused, body, UNUSED, passes, world=2), *words)


def train_with(world: World, store: Any, values: dict[str, Any], between: Any, before_apply: Any) -> None:
    """A loop that keeps a line of a plain one, in front of every backward or of the update."""
    with open_watched(world, store, VALUES | values) as builder:
        own = OwnRun(builder)
        plain = network()
        model, optimizer = own.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in own.steps(DATA):
            for (x,) in step:
                between(plain, optimizer)
                step.backward(cost(model, x), weight=len(x))
            before_apply(plain, optimizer)
            step.apply()
        own.close()


def nothing(model: Any, optimizer: Any) -> None:
    pass


def clips(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clips_values(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-6)


def clips_with_norm(model: Any, optimizer: Any) -> None:
    gradients = [p.grad for p in model.parameters()]
    nn.utils.clip_grads_with_norm_(model.parameters(), 1e-6, nn.utils.get_total_norm(gradients))


def zeroes(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def unscales(model: Any, optimizer: Any) -> None:
    """What a GradScaler does."""
    gradients = [p.grad for p in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(()), torch.tensor(0.5))


def measures(model: Any, optimizer: Any) -> None:
    """What a log line may do: it changes no gradient."""
    gradients = [p.grad for p in model.parameters()]
    nn.utils.get_total_norm(gradients)
    torch._foreach_mul_([gradient.clone() for gradient in gradients], 2.0)


def freezes_the_last(model: Any, optimizer: Any) -> None:
    model[2].bias.grad = None


KEPT_LINES = [
    (1, {}, lambda model, optimizer: optimizer.zero_grad(), nothing, "before step.backward"),
    (2, {}, lambda model, optimizer: model.zero_grad(set_to_none=False), nothing, "before step.backward"),
    (2, {"strategy": "fsdp"}, lambda model, optimizer: optimizer.zero_grad(), nothing, "before step.backward"),
    (1, {}, nothing, clips, "before step.apply()"),
    (2, {}, nothing, clips, "before step.apply()"),
    (2, {"strategy": "fsdp"}, nothing, clips, "before step.apply()"),
    (2, {"strategy": "fsdp"}, nothing, clips_values, "before step.apply()"),
    (2, {"strategy": "fsdp"}, nothing, clips_with_norm, "before step.apply()"),
    (2, {"strategy": "fsdp"}, nothing, zeroes, "before step.apply()"),
    (2, {"strategy": "fsdp"}, nothing, unscales, "before step.apply()"),
]


@pytest.mark.parametrize(("world", "values", "between", "before_apply", "words"), KEPT_LINES)
def test_sums_are_not_dropped_or_clipped(
    pool: Pool, world: int, values: dict[str, Any], between: Any, before_apply: Any, words: str
) -> None:
    errors = pool.errors(train_with, values, between, before_apply, world=world)
    assert_user_errors(errors, f"the gradients of this step were dropped or changed {words}", "clip.norm=1")


def test_one_gradient_may_be_set_to_none(pool: Pool) -> None:
    """A head that does not learn at first: the others do."""
    pool.run(train_with, {}, nothing, freezes_the_last, world=2)


def test_gradients_of_shards_may_be_measured(pool: Pool) -> None:
    """And they have torch's own class again when the loop has ended."""

    def train(world: World, store: Any) -> None:
        gradients: list[Any] = []

        def measures_and_keeps(model: Any, optimizer: Any) -> None:
            measures(model, optimizer)
            gradients.extend(p.grad for p in model.parameters())

        train_with(world, store, {"strategy": "fsdp"}, nothing, measures_and_keeps)
        assert len(gradients) > 0
        assert {type(gradient) for gradient in gradients} == {DTensor}

    pool.run(train, world=2)


def test_models_that_are_trained_in_turn() -> None:
    """The optimizers say so: each has the parameters of other models. Two for all models may share one loss."""
    plain = Gan()
    models = [plain.generator, plain.discriminator]
    assert _are_trained_in_turn(models, [*optimizers_of(plain)])
    assert not _are_trained_in_turn([plain], [*optimizers_of(plain)])
    assert not _are_trained_in_turn(models, [torch.optim.SGD(plain.parameters(), lr=0.1)])

    weights, biases = ([p for p in plain.parameters() if p.dim() == dim] for dim in (2, 1))
    assert not _are_trained_in_turn(models, [torch.optim.SGD(group, lr=0.1) for group in (weights, biases)])


def test_a_key_that_is_set_stays(pool: Pool) -> None:
    errors = pool.errors(train_two_models, {"ddp.find_unused_parameters": False}, world=2)
    assert_user_errors(errors, "no gradient for 0.0.weight", "ddp.find_unused_parameters=true")


def test_buckets_need_every_gradient(pool: Pool) -> None:
    """DDP sums whole buckets: a step that trains a part of the model is refused, with the setting that allows it."""
    errors = pool.errors(refused, applies_once, {}, 1, world=2)
    assert_user_errors(errors, "no gradient for generator.0.weight", "ddp.find_unused_parameters=true")
