"""Hooks of DDP: what they lose, what they must not lose, and what they send. And DDP's other options."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config import DDPConfig, resolve
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.errors import ConfigError, UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.ddp import hook_table
from lockstep.parallel.ddp.comm_hooks import fp16_scale
from lockstep.parallel.ddp.driver import DDPDriver
from lockstep.parallel.driver import DriverSetup
from lockstep.plan.plan import make_plan
from lockstep.precision import PRECISIONS
from lockstep.recipes.char_lm import CharLM
from lockstep.runtime import context, control_word
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.world import World
from lockstep.task import Loss, MicroBatch, Task
from pool import Pool
from ranks.support import ALL_PAIRS, DEVICE, assert_user_errors, configured, delay_collectives, fit, flat
from ranks.test_strategies import assert_close, final

POWERSGD = {"ddp.hook": "powersgd", "ddp.powersgd_rank": 2, "ddp.powersgd_start": 0}
HOOKS = {"none": {}, "fp16": {"ddp.hook": "fp16"}, "bf16": {"ddp.hook": "bf16"}, "powersgd": POWERSGD}
MANY_BUCKETS = {"ddp.bucket_mb": 1e-4}


def test_the_table_of_hooks_is_that_of_the_settings() -> None:
    names = get_args(DDPConfig.model_fields["hook"].annotation)
    assert {*hook_table.COMM_HOOKS, "none"} == set(names) == set(HOOKS)


# ---- gradients as given ---------------------------------------------------------------------------------


class Linear(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, like: list[Tensor]):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros_like(tensor)) for tensor in like])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


class Sent:
    """Counts the numbers that this rank gives to all-reduces, and their bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.bytes = 0
        self._original = dist.all_reduce

    def __enter__(self) -> Sent:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            self.bytes += tensor.nbytes
            return self._original(tensor, *args, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._original


class Progress:
    """The only micro-batch of a step, with a gradient scale and a control word of the test's own."""

    is_last_micro_batch, batches = True, None

    def __init__(self, scale: float, word: ControlWord):
        self._scale, self._word = scale, word

    def before_forward(self, micro: MicroBatch) -> None:
        pass

    def begin_backward(self, loss: Loss) -> float:
        return self._scale

    def end_backward(self) -> None:
        pass

    def control_word(self) -> ControlWord:
        return self._word

    def constant(self, value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=DEVICE)


Step = tuple[list[list[Tensor]], list[ControlWord], float]  # gradients and word of every rank, loss scale


def exchange(world: World, store: Any, values: dict[str, Any], steps: list[Step]) -> dict[str, Any]:
    """A job: the sums over ranks that a driver leaves, step by step."""
    config = configured(values).config
    found: dict[str, Any] = {"sums": [], "words": [], "sent": [], "bytes": [], "states": []}
    with context.start(world, config, store=store) as runtime:
        setup = DriverSetup(config, runtime, PRECISIONS["fp32"])
        driver = DDPDriver(Linear(steps[0][0][0]).to(DEVICE), setup)
        for gradients, words, scale in steps:
            driver.begin_pass()
            driver.before_forward(MicroBatch(None, 0, 1), Progress(scale, words[world.rank]))
            total = driver.model([gradient.to(DEVICE) for gradient in gradients[world.rank]])
            with Sent() as sent:
                reduced = driver.finish_micro_batch(Loss(total, 1), Progress(scale, words[world.rank]))
            assert reduced is not None
            sums = [(p.grad * driver.to_sum).cpu() for p in driver.parameters.values() if p.grad is not None]
            found["sums"].append(sums)
            found["words"].append(driver.codec.unpack(reduced.packed_word.tolist()))
            found["sent"].append(sent.sizes)
            found["bytes"].append(sent.bytes)
            matrices = getattr(driver.hook, "matrices", {})
            found["states"].append({n: (m.query.cpu().clone(), _copy(m.error)) for n, m in matrices.items()})
        runtime.collectives.final_barrier()
    return found


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu().clone()


def drawn(world: int, shapes: list[tuple[int, ...]], scale: float = 1.0, seed: int = 0) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [[scale * torch.randn(shape, generator=g) for shape in shapes] for _ in range(world)]


def words(*weights: float, step: int = 7) -> list[ControlWord]:
    return [ControlWord(weight=weight, step=step, stop=rank % 2) for rank, weight in enumerate(weights)]


def total(gradients: list[list[Tensor]], number: int) -> Tensor:
    return torch.stack([rank[number].double() for rank in gradients]).sum(0)


SHAPES = [(12, 10), (10,), (4, 3, 5), (30, 8)]


def exchange_late(*arguments: Any) -> dict[str, Any]:
    """A job: the same, with collectives that run as late as they may."""
    delay_collectives()
    return exchange(*arguments)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "none"])
def test_nothing_is_overwritten_while_it_travels(pool: Pool, hook: str) -> None:
    steps = [(drawn(2, SHAPES, seed=seed), words(3, 4, step=seed), 1.0) for seed in range(2)]
    prompt, late = (pool.run(job, HOOKS[hook] | MANY_BUCKETS, steps, world=2) for job in (exchange, exchange_late))
    for found, expected in zip(late, prompt, strict=True):
        assert found["words"] == expected["words"]
        for step, sums in enumerate(found["sums"]):
            assert all(torch.equal(a, b) for a, b in zip(sums, expected["sums"][step], strict=True))


@pytest.mark.parametrize("buckets", [{}, MANY_BUCKETS], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("hook", HOOKS)
def test_the_word_arrives_exact(pool: Pool, hook: str, buckets: dict[str, Any]) -> None:
    """Between gradients of any size, and with weights that no float32 holds."""
    weights = (2.0**31 + 1, 2.0**24 + 3.25, 12345.0)
    steps = [(drawn(3, SHAPES, scale), words(*weights, step=step), 1.0) for step, scale in ((4095, 1e-9), (4094, 1e6))]
    for found in pool.run(exchange, HOOKS[hook] | buckets, steps, world=3):
        for word, step in zip(found["words"], (4095, 4094), strict=True):
            assert (word.weight, word.steps, word.stop) == (sum(weights), 3 * step, 1)


def exchange_as_with_many_ranks(*arguments: Any) -> dict[str, Any]:
    """A job: the same, as on a number of ranks whose mean could round the word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.parallel.ddp.driver.mean_is_exact", lambda ranks: False)
        return exchange(*arguments)


@pytest.mark.parametrize("hook", HOOKS)
def test_with_many_ranks_the_word_travels_apart(pool: Pool, hook: str) -> None:
    """In float64, which keeps every fraction too, and next to gradients whose sums stay the same."""
    weights = (2.0**31 + 1.1, 2.0**24 + 3.25, 12345.0)
    steps = [(drawn(3, SHAPES), words(*weights, step=1024), 1.0)]
    usual = pool.run(exchange, HOOKS[hook], steps, world=3)
    for found, expected in zip(pool.run(exchange_as_with_many_ranks, HOOKS[hook], steps, world=3), usual, strict=True):
        assert found["words"][0].weight == pytest.approx(sum(weights), rel=1e-15)
        assert (found["words"][0].steps, found["words"][0].stop) == (3 * 1024, 1)
        for here, there in zip(found["sums"][0], expected["sums"][0], strict=True):
            torch.testing.assert_close(here, there, rtol=0.02, atol=0.02)  # half precision, added in another order


@pytest.mark.parametrize("hook", HOOKS)
def test_all_ranks_get_the_same_bits(pool: Pool, hook: str) -> None:
    steps = [(drawn(4, SHAPES, seed=seed), words(1, 2, 3, 4), 1.0) for seed in range(3)]
    first, *others = pool.run(exchange, HOOKS[hook] | MANY_BUCKETS, steps, world=4)
    for found in others:
        for here, there in zip(first["sums"], found["sums"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("scale", [1e-20, 1e-9, 1.0, 1e9])
@pytest.mark.parametrize(("hook", "bits"), [("fp16", 11), ("bf16", 8)])
def test_half_sums_are_off_by_what_is_said(pool: Pool, hook: str, bits: int, scale: float) -> None:
    """N x 2^-bits of the sum of the absolute values, at any size: plain fp16 would send zeros, or overflow."""
    gradients = drawn(3, SHAPES, scale)
    sizes = [[tensor.abs() for tensor in rank] for rank in gradients]
    for found in pool.run(exchange, HOOKS[hook], [(gradients, words(1, 1, 1), 1.0)], world=3):
        for number, summed in enumerate(found["sums"][0]):
            off = (summed.double() - total(gradients, number)).abs()
            assert (off <= 3 * 2.0**-bits * total(sizes, number)).all()
            assert off.any(), "nothing was rounded: was it compressed at all?"


WORD = control_word.LENGTH  # numbers


@pytest.mark.parametrize(("hook", "more"), [("bf16", 0), ("fp16", 4)])
def test_half_the_bytes_travel(pool: Pool, hook: str, more: int) -> None:
    """And the word, which has its place in the bucket, as it is; fp16 also agrees on a scale."""
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES)
    for found in pool.run(exchange, HOOKS[hook], [(drawn(2, SHAPES), words(1, 1), 1.0)], world=2):
        assert found["bytes"] == [2 * (numbers + WORD) + 4 * WORD + more]


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_half_is_exact_where_the_numbers_fit(pool: Pool, hook: str) -> None:
    g = torch.Generator().manual_seed(0)
    whole = [[torch.randint(-60, 61, shape, generator=g).float() * 2.0**-30 for shape in SHAPES] for _ in range(4)]
    for found in pool.run(exchange, HOOKS[hook], [(whole, words(1, 1, 1, 1), 1.0)], world=4):
        for number, summed in enumerate(found["sums"][0]):
            assert torch.equal(summed.double(), total(whole, number))


def test_tiny_gradients_of_many_ranks_do_not_become_zero(pool: Pool) -> None:
    """The scale of such a bucket, times 4 ranks, is more than a float32 can hold."""
    tiny = [[torch.full(shape, 2.0**-120) for shape in SHAPES] for _ in range(4)]
    for found in pool.run(exchange, HOOKS["fp16"], [(tiny, words(1, 1, 1, 1), 1.0)], world=4):
        for number, summed in enumerate(found["sums"][0]):
            assert torch.equal(summed.double(), total(tiny, number))


@pytest.mark.parametrize("largest", [1e-40, 3e-30, 0.99, 1.0, 65504.0, 3e38])
def test_the_scale_of_fp16_uses_its_range_and_never_overflows(largest: float) -> None:
    value = torch.tensor(largest)
    for ranks in (2, 3, 8, 100):
        scale = fp16_scale(value, ranks)
        assert torch.frexp(scale).mantissa == 0.5, "not a power of two"
        together = float(scale * value) * ranks
        assert together <= 2**15
        assert together > 2**12 or scale == 2.0**126


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hook", HOOKS)
def test_what_is_not_finite_stays_so_everywhere(pool: Pool, hook: str, value: float) -> None:
    """On every rank, so that all of them skip the step. powersgd then goes on as if that step had not been."""
    spoiled = drawn(2, SHAPES, seed=1)
    spoiled[1][0][3, 4] = value
    good = [(drawn(2, SHAPES, seed=seed), words(3, 4), 1.0) for seed in (0, 2)]
    steps = [good[0], (spoiled, words(3, 4), 1.0), good[1]]
    for found in pool.run(exchange, HOOKS[hook], steps, world=2):
        finite = [all(torch.isfinite(tensor).all() for tensor in sums) for sums in found["sums"]]
        assert finite == [True, False, True]
        assert found["words"][1].weight == 7
        for before, after in [(found["states"][0].get("weights.0"), found["states"][1].get("weights.0"))]:
            assert before is None or all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- powersgd -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3])
def test_powersgd_sends_two_thin_matrices(pool: Pool, rank: int) -> None:
    n, m = 40, 30
    values = POWERSGD | {"ddp.powersgd_rank": rank, "ddp.error_feedback": False, "ddp.powersgd_start": 1}
    steps = [(drawn(2, [(n, m)], seed=seed), words(1, 1), 1.0) for seed in range(3)]
    for found in pool.run(exchange, values, steps, world=2):
        assert found["sent"] == [[n * m + WORD], [rank * n + WORD, rank * m], [rank * n + WORD, rank * m]]


def test_error_feedback_sends_one_number_more_and_keeps_four_bytes_a_parameter(pool: Pool) -> None:
    steps = [(drawn(2, [(40, 30)]), words(1, 1), 1.0)]
    for found in pool.run(exchange, POWERSGD, steps, world=2):
        assert found["sent"] == [[1, 2 * 40 + WORD, 2 * 30]]
        assert found["states"][0]["weights.0"][1].nbytes == 4 * 40 * 30


def test_powersgd_finds_a_matrix_of_its_rank(pool: Pool) -> None:
    factors = [drawn(3, [(40, 2), (2, 30)], seed=seed) for seed in range(3)]
    left = factors[0][0][0]  # shared by the ranks, so that the sum has the rank of the parts
    steps = [([[left @ right] for _, right in ranks], words(1, 1, 1), 1.0) for ranks in factors]
    for found in pool.run(exchange, POWERSGD, steps, world=3):
        for (summed,), (gradients, _, _) in zip(found["sums"], steps, strict=True):
            expected = total(gradients, 0)
            assert float((summed - expected).norm() / expected.norm()) < 1e-5


def test_error_feedback_loses_nothing(pool: Pool) -> None:
    """Over all steps: what was applied, and what is still to be sent, is the mean gradient. Weights and loss scales
    that change from step to step do not spoil that."""
    weights = [(3.0, 5.0), (1.0, 0.0), (400.0, 2.0), (0.0, 7.0)]
    scales = [1.0, 1.0, 64.0, 0.5]
    steps = []
    for seed, (pair, scale) in enumerate(zip(weights, scales, strict=True)):
        steps.append((drawn(2, [(20, 15)], sum(pair), seed), words(*pair), scale))
    parts = pool.run(exchange, POWERSGD | {"ddp.bucket_mb": 1e-4}, steps, world=2)
    units = [sum(pair) * scale for pair, scale in zip(weights, scales, strict=True)]
    sums = parts[0]["sums"]
    applied = torch.stack([summed[0].double() / unit for summed, unit in zip(sums, units, strict=True)])
    asked = torch.stack(
        [total(gradients, 0) / sum(pair) for (gradients, _, _), pair in zip(steps, weights, strict=True)]
    )
    late = torch.stack([part["states"][-1]["weights.0"][1].double() for part in parts]).sum(0)
    assert float(late.norm()) > 0.1 * float(asked.sum(0).norm()), "nothing was left out: no test of what is"
    assert float((applied.sum(0) + late - asked.sum(0)).norm() / asked.sum(0).norm()) < 1e-5


class Deep(Task):
    """Two samples in a step: the gradients of its matrices have rank 2 at most."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 14), nn.Tanh(), nn.Linear(14, 1))

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(40, 12, generator=g), torch.randn(40, generator=g))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        weight = 1 + x[:, 0].abs().round()
        return Loss((weight * (model(x).squeeze(-1) - y) ** 2).sum(), weight.sum())


LOSSLESS = {
    "powersgd of full rank": (POWERSGD | {"ddp.powersgd_rank": 24}, final, {}),
    "without views": ({"ddp.gradient_as_bucket_view": False}, final, {}),
    "static graph": ({"ddp.static_graph": True, "micro_batch": 3}, final, {2: {"micro_batch": 5}}),
}


@pytest.fixture(scope="module")
def single(pool: Pool) -> dict[str, Any]:
    return pool.run(final, {}, world=1)[0]


@pytest.mark.parametrize("world", [2, 4] if ALL_PAIRS else [4])
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_settings_equal_the_single_process(pool: Pool, single: dict[str, Any], name: str, world: int) -> None:
    values, job, for_world = LOSSLESS[name]
    for found in pool.run(job, values | for_world.get(world, {}), world=world):
        assert_close(found["weights"], single["weights"])


@pytest.mark.parametrize(("rank", "feedback"), [(2, False), (4, True)])
def test_powersgd_of_the_gradients_rank_equals_the_single_process(pool: Pool, rank: int, feedback: bool) -> None:
    """With feedback it needs room for what rounding has left: of a matrix of just its rank, every step doubles that."""
    values = {"global_batch": 2, "micro_batch": 1, "steps": 15, "clip.norm": 1.0}
    (expected,) = pool.run(fit, Deep(), values, world=1)
    compressed = POWERSGD | {"ddp.powersgd_rank": rank, "ddp.error_feedback": feedback}
    for found in pool.run(fit, Deep(), values | compressed, world=2):
        assert_close(found.steps[-1].weights, expected.steps[-1].weights)


LEAVE = 3


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_powersgd_goes_on_from_a_checkpoint_with_the_same_bits(pool: Pool, tmp_path: Path, strategy: str) -> None:
    values = POWERSGD | {"strategy": strategy}
    whole = pool.run(final, values, world=3)
    kept = values | {"run_dir": str(tmp_path), "resume": "auto"}
    assert pool.run(final, kept, LEAVE, world=3)[0]["summary"] == {"left": LEAVE}
    for found, expected in zip(pool.run(final, kept, world=3), whole, strict=True):
        assert torch.equal(flat(found["weights"]), flat(expected["weights"]))


@pytest.mark.parametrize("world", [2, 4] if ALL_PAIRS else [2])
def test_powersgd_goes_on_with_another_number_of_ranks(pool: Pool, tmp_path: Path, world: int) -> None:
    """Only the sum of the ranks' errors counts, and that is shared out."""
    expected = pool.run(final, POWERSGD, world=3)[0]
    kept = POWERSGD | {"run_dir": str(tmp_path), "resume": "auto"}
    pool.run(final, kept, LEAVE, world=3)
    for found in pool.run(final, kept, world=world):
        assert_close(found["weights"], expected["weights"])


@pytest.mark.parametrize("after", [{}, {"strategy": "fsdp"}], ids=["ddp", "fsdp"])
def test_with_and_without_powersgd_in_turn(
    pool: Pool, single: dict[str, Any], tmp_path: Path, after: dict[str, Any]
) -> None:
    exact = POWERSGD | {"ddp.powersgd_rank": 24}
    for number, (first, second) in enumerate([(exact, after), (after, exact)]):
        kept = {"run_dir": str(tmp_path / str(number)), "resume": "auto"}
        pool.run(final, first | kept, LEAVE, world=3)
        for found in pool.run(final, second | kept, world=2):
            assert_close(found["weights"], single["weights"])


def test_leaving_powersgd_says_what_is_left_behind(pool: Pool, tmp_path: Path) -> None:
    kept = {"run_dir": str(tmp_path), "resume": "auto"}
    pool.run(final, POWERSGD | kept, LEAVE, world=2)
    pool.run(final, kept, world=2)
    assert "ddp.hook: in the checkpoint, but not in use here" in (tmp_path / "events.jsonl").read_text()


def char_lm(world: World, store: Any, values: dict[str, Any]) -> float:
    """A job: the loss of the smallest character model on text it has not seen."""
    preset = CharLM.presets["tiny"]
    settings = {"clip.norm": 1.0, "lr.schedule": "cosine", "lr.peak": 5e-3, "lr.warmup": 4, "steps": 60}
    resolved = configured(settings | {"global_batch": 8, "evaluate.batch": 16} | values)
    with context.start(world, resolved.config, store=store) as runtime:
        return loop.fit(CharLM(**preset["task"]), open_run(resolved, runtime, "test"))["eval_loss"]


def test_powersgd_trains_the_character_model_as_well(pool: Pool) -> None:
    plain = pool.run(char_lm, {}, world=2)[0]
    compressed = POWERSGD | {"ddp.powersgd_rank": 4, "ddp.powersgd_start": 10}
    assert pool.run(char_lm, compressed, world=2)[0] == pytest.approx(plain, rel=0.02)


# ---- what is told, and what is refused ------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_a_lossy_exchange_is_told(pool: Pool, tmp_path: Path, hook: str) -> None:
    pool.run(final, HOOKS[hook] | {"run_dir": str(tmp_path), "steps": 1}, world=2)
    told = next(row["facts"] for row in read_jsonl(tmp_path / "events.jsonl") if "facts" in row)
    assert told.get("exchange", "none").startswith(hook)


OPTIONS = ["ddp.hook=fp16", "ddp.static_graph=true", "ddp.gradient_as_bucket_view=false", "ddp.sync_batchnorm=true"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rival", ["strategy=fsdp", "strategy=hsdp", "ddp.find_unused_parameters=true", "mesh.tp=2"])
def test_options_of_ddp_without_ddp_are_refused(option: str, rival: str) -> None:
    pairs = [text.split("=") for text in (option, rival)]
    values = {key: {"true": True, "false": False, "2": 2}.get(value, value) for key, value in pairs}
    with pytest.raises(ConfigError) as error:
        resolve([("command line", values)])
    (problem,) = error.value.problems
    assert option.split("=")[0] in problem.problem
    assert rival.split("=")[0] in problem.problem


def test_a_static_graph_and_accumulation_are_refused() -> None:
    config = configured({"ddp.static_graph": True, "global_batch": 8, "micro_batch": 2, "steps": 1}).config
    with pytest.raises(UserError, match="micro_batch=4"):
        make_plan(config, data_size=2, samples=100)
    assert make_plan(config, data_size=4, samples=100).accumulation == 1
    assert make_plan(config, data_size=1, samples=100).accumulation == 4


def test_sync_batchnorm_is_refused_where_it_cannot_work(pool: Pool) -> None:
    values = {"global_batch": 8, "steps": 1, "ddp.sync_batchnorm": True}
    assert_user_errors(pool.errors(fit, Deep(), values, world=2), "ddp.sync_batchnorm", "no BatchNorm")


def gradient_bytes(world: World, store: Any, views: bool) -> int:
    """A job: what buckets and gradients take together, after an exchange."""
    config = configured({"ddp.hook": "bf16", "ddp.gradient_as_bucket_view": views}).config
    with context.start(world, config, store=store) as runtime:
        driver = DDPDriver(nn.Linear(30, 20), DriverSetup(config, runtime, PRECISIONS["fp32"]))
        held: dict[int, int] = {}

        def note(tensor: Tensor) -> None:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

        assert driver.hook is not None
        original = driver.hook.reduce_bucket
        driver.hook.reduce_bucket = lambda bucket: note(bucket.buffer) or original(bucket)
        driver.begin_pass()
        progress = Progress(1.0, ControlWord(weight=1))
        driver.before_forward(MicroBatch(None, 0, 1), progress)
        driver.finish_micro_batch(Loss(driver.model(torch.ones(2, 30)).sum(), 1), progress)
        for parameter in [*driver.parameters.values(), driver._word_parameter]:
            assert parameter.grad is not None
            note(parameter.grad)
        runtime.collectives.final_barrier()
        return sum(held.values())


def test_without_views_gradients_take_four_bytes_more_a_parameter(pool: Pool) -> None:
    numbers = 30 * 20 + 20 + WORD
    assert pool.run(gradient_bytes, True, world=2) == [4 * numbers] * 2
    assert pool.run(gradient_bytes, False, world=2) == [8 * numbers] * 2


def test_without_views_an_unused_parameter_is_still_named(pool: Pool) -> None:
    values = {"global_batch": 8, "micro_batch": 2, "steps": 2, "ddp.gradient_as_bucket_view": False}
    assert_user_errors(pool.errors(fit, HalfUsed(), values, world=2), "no gradient for 2.weight")


class HalfUsed(Deep):
    """Its last layer takes part in the first micro-batch only."""

    def model(self) -> nn.Module:
        self.calls = 0
        return Skipping(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 1))


class Skipping(nn.Sequential):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self[1](self[0](x))
        return self[2](hidden) if self.calls == 1 else hidden.sum(-1, keepdim=True)
