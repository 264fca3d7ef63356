"""The owner of a model's compiled code, from the first step to the last.

    watch     the first steps run eagerly: they are timed, and the sizes of their batches noted (compile=auto only)
    decide    all ranks exchange what they measured and decide alike, with the rule in decision.py
    try       the next batch is compiled and compared with eager; if that fails, the next target is tried, or none
    measure   the steps with compiled code are timed; if they are slower than before, the run goes back to eager

Compiling happens before the first gradient all-reduce with compiled code: otherwise one rank would compile while others
wait in a collective, whose timeout is shorter. Only training calls are compiled. Evaluations run eagerly, and so does a
batch whose shape the compiled code does not take, such as a short last one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.blocks import class_name, find_blocks
from lockstep.parallel.call_chain import CallChain, Link
from lockstep.parallel.call_state import StateSnapshot
from lockstep.parallel.compiled import history
from lockstep.parallel.compiled.decision import BLOCKS, LOSS, MODEL, Facts, Record, decide, preferred
from lockstep.parallel.compiled.shapes import Dims, SizesSeen, fits
from lockstep.parallel.compiled.targets import Function, Target, compiles_itself, separate_sizes
from lockstep.parallel.compiled.trial import (
    LOOSE_TOLERANCE,
    RANDOM,
    TOLERANCE,
    Outcome,
    Trial,
    difference,
    gradient_difference,
    tensors_in,
)
from lockstep.parallel.cudagraph.checks import first_line
from lockstep.parallel.cudagraph.graphs import GraphedCall, capture_calls, graph_link, release_captures
from lockstep.runtime.context import EventLogger, Runtime

if TYPE_CHECKING:
    from lockstep.parallel.driver import Driver

WARM_UP = 2  # steps that are not timed: they allocate, tune and connect
TIMED = 3  # steps that are timed, before and after compiling
TIMED_VARYING = 8  # the same if sizes vary, and steps with them
SLOWER = 1.02  # compiled steps that take longer than this many times an eager one are given up
MOST_COMPILES = 2
MISSES = 0.2  # compile once more if this part of the batches did not fit, and all ranks look after so many steps:
FIRST_LOOK, LAST_LOOK = 8, 1024  # at the first one, and then after twice as many, up to the last one
STAGES = ("watch", "try", "compiled", "eager")


class Compiler:
    """Decides what of a model to compile, compiles it, and chooses between compiled and eager code in every call."""

    def __init__(
        self, driver: Driver, config: RunConfig, runtime: Runtime, log_event: EventLogger, judged: bool, loose: bool
    ):
        """`judged`: compile only if it pays; otherwise at once. `loose`: 16 bits or TF32, see `trial.py`."""
        self.driver = driver
        self.model = driver.model
        self.config = config
        self.runtime = runtime
        self.log_event = log_event
        self.judged = judged
        self.tolerance = LOOSE_TOLERANCE if loose else TOLERANCE

        self.stage = "watch" if judged else "try"
        self.function: Function | None = None  # what the user's loss computes from the model and a batch
        self.target: Target | None = None
        self.compiles = 0
        self._targets: Sequence[str] = ()
        self._graphed: GraphedCall | None = None  # around the compiled function

        # What the steps so far have shown.
        self.sizes = SizesSeen()
        self._steps_left = 0
        self._began: float | None = None
        self._timings: list[float] = []
        self._eager_s = self._cost_s = 0.0

        # The batch that was compiled for, and how many batches since then did not fit.
        self._shapes: list[tuple[int, ...]] = []
        self._dynamic: Dims = frozenset()
        self._calls = self._misses = self._steps = 0
        self._next_look = FIRST_LOOK

        CallChain.of(self.model).install("compile", ModelCall(self))

    # ---- the calls of a step ----

    def around(self, function: Function) -> Function:
        """Return a function `(model, *args)` to call in place of `function`: compiled with the model, if that pays."""
        self.function = function

        def call(module: Any, *args: Any) -> Any:
            if self.stage == "compiled" and self.target is not None:
                return self._run(lambda: self._call_function(function, module, args), (args, {}))
            if self.stage in ("watch", "try"):
                self._prepare(lambda *args: function(module, *args), args, {})
                return call(module, *args) if self.stage == "compiled" else function(module, *args)
            return function(module, *args)

        return call

    def call_model(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model itself, for its link."""
        # Around a function, the choice is made already.
        if self.function is None:
            if self.stage in ("watch", "try"):
                self._prepare(inner, args, kwargs)
            if self.stage == "compiled":
                return self._run(lambda: inner(*args, **kwargs), (args, kwargs))

        return inner(*args, **kwargs)

    def _call_function(self, function: Function, module: Any, args: tuple[Any, ...]) -> Any:
        assert self.target is not None
        if self.target.function is None:
            return function(module, *args)
        return self.driver.call_inside(self._graphed or self.target, *args)

    def _run(self, call: Callable[[], Any], arguments: Any) -> Any:
        """Run compiled code, or eager code if the batch does not fit it: nothing is compiled any more."""
        if self._next_look <= LAST_LOOK:
            shapes = [tuple(t.shape) for t in tensors_in(arguments)]
            self._calls += 1
            self._misses += not fits(shapes, self._shapes, self._dynamic)
            self.sizes.add(shapes)

        with torch.compiler.set_stance("eager_on_recompile"):
            return call()

    def _prepare(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the batch while the steps are watched, or try to compile it."""
        if self.runtime.heartbeat.phase != "compute" or not torch.is_grad_enabled():
            return
        if self.stage == "watch":
            self.sizes.add([tuple(t.shape) for t in tensors_in((args, kwargs))])
        else:
            self._try(call, args, kwargs)

    # ---- between two steps ----

    def begin_step(self, steps_left: int) -> None:
        """Start the clock of a step."""
        if self.stage == "watch" or self._timings is not _ENOUGH:
            self._steps_left = steps_left
            self._began = time.perf_counter()

    def end_step(self) -> None:
        """End a step: all ranks come here together. They decide or measure, if it is time."""
        if self.stage == "eager":
            return
        if self.stage == "compiled":
            self._look_for_misses()
        if self._timings is _ENOUGH or self._began is None:
            return

        # The host waits for the device, in the few steps that are timed.
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()

        self._timings.append(time.perf_counter() - self._began)
        varying = len(self.sizes.shapes) > 1 if self.stage == "watch" else bool(self._dynamic)
        if len(self._timings) >= WARM_UP + (TIMED_VARYING if varying else TIMED):
            if self.stage == "watch":
                self._decide()
            elif self.stage == "compiled":
                self._conclude()

    def _decide(self) -> None:
        """Decide what to compile. Collective."""
        step_s = self._slowest(median(self._timings[WARM_UP:]))
        self._agree_on_sizes()
        self._eager_s = step_s
        records = self.runtime.collectives.run_on_rank0(
            lambda: {name: [r.cost_s, r.speedup] for name, r in history.read(self._key()).items()}
        )
        decision = decide(
            self._facts(step_s, {name: Record(*values) for name, values in records.items()}),
        )
        if decision.targets:
            self._targets = decision.targets
            self.stage = "try"
            self.log_event("compile", reason=decision.reason)
        else:
            self._stay_eager(decision.reason)

    def _facts(self, step_s: float, records: Mapping[str, Record]) -> Facts:
        blocks = find_blocks(self.model)
        one_of_each = {class_name(block): block for block in blocks}.values()
        return Facts(
            steps_left=self._steps_left,
            step_s=step_s,
            sizes_vary=bool(self.sizes.varying()),
            layers=_count_layers(self.model),
            blocks=len(blocks),
            block_layers=sum(map(_count_layers, one_of_each)),
            possible=self._possible(),
            records=records,
        )

    def _possible(self) -> tuple[str, ...]:
        # The model says itself which of its parts to compile.
        if compiles_itself(self.model):
            return (MODEL,)
        return (LOSS, MODEL, BLOCKS) if self.function else (MODEL, BLOCKS)

    def _conclude(self) -> None:
        """Compare the steps with those before compiling, remember the result, or go back to eager. Collective."""
        compiled_s = self._slowest(median(self._timings[WARM_UP:]))
        self._timings = _ENOUGH
        speedup = self._eager_s / compiled_s
        assert self.target is not None

        if self.runtime.is_main:
            history.write(self._key(), self.target.name, Record(self._cost_s, speedup))

        times = f"{self._eager_s * 1e3:.3g} ms before, {compiled_s * 1e3:.3g} ms now"
        if compiled_s > SLOWER * self._eager_s:
            self._remove_target()
            self._stay_eager(f"compiled steps are slower ({times})")
        else:
            self.log_event("compile", reason=f"steps are {speedup:.2f}x as fast ({times})", speedup=round(speedup, 3))

    def _look_for_misses(self) -> None:
        """Compile once more, with other dimensions dynamic, if too many batches do not fit. Collective at times."""
        self._steps += 1
        if self._steps < self._next_look or self._next_look > LAST_LOOK:
            return

        self._next_look *= 2
        shares = self.runtime.collectives.gather_json(self._misses / max(1, self._calls))
        self._calls = self._misses = 0
        if max(shares) > MISSES and self.compiles < MOST_COMPILES:
            self._agree_on_sizes()
            self._remove_target()
            self._targets = preferred(self._facts(0.0, {}))
            self.stage = "try"
            self.log_event("compile", reason=f"{max(shares):.0%} of the batches had another shape: once more")

    def _agree_on_sizes(self) -> None:
        for sizes in self.runtime.collectives.gather_json(self.sizes.sizes):
            self.sizes.merge(sizes)

    def _slowest(self, seconds: float) -> float:
        return max(self.runtime.collectives.gather_json(seconds))

    def _key(self) -> str:
        return history.signature(self.model, self.runtime.device, [self.sizes.sizes, bool(self.function)])

    # ---- compile and compare ----

    def _try(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compile the first target that works on all ranks, and compare it with eager. Collective."""
        began = time.perf_counter()
        release_captures(self.model)
        targets = self._targets or preferred(self._facts(0.0, {}))
        reasons: dict[str, str] = {}

        owner = getattr(self.function, "__self__", None)
        with StateSnapshot(self.model, self._generator(), [owner]) as snapshot, self.driver.no_exchange():
            for name in targets:
                problem = self._try_target(name, call, args, kwargs, snapshot)
                problems = [problem for problem in self.runtime.collectives.gather_json(problem) if problem]
                if not problems:
                    break

                reasons[name] = problems[0]
                self._remove_target()

        self.compiles += 1
        self._cost_s = time.perf_counter() - began
        self.runtime.heartbeat.beat("compute")
        self._report(reasons)

    def _report(self, reasons: Mapping[str, str]) -> None:
        """Log what is compiled, and why nothing better is. From here on calls may be captured."""
        why = "; ".join(f"not {name}: {problem}" for name, problem in reasons.items())
        if self.target is None:
            return self._stay_eager(why)

        self.stage = "compiled"
        self._timings = [] if self.judged else _ENOUGH
        self._began = None
        sizes = f", {len(self._dynamic)} dimensions dynamic" if self._dynamic else ""
        reason = f"compiled {self.target.name} in {self._cost_s:.1f} s{sizes}, equal to eager"
        self.log_event("compile", reason=f"{reason} ({why})" if why else reason)
        self._capture()

    def _capture(self) -> None:
        capture_calls(self.model, self.config, self.runtime, self.log_event)
        if self.target is not None and self.target.function is not None:
            self._graphed = graph_link(self.model, self.config, self.runtime, self.log_event)
            if self._graphed:
                self._graphed.inner = self.target

    def _try_target(
        self,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        snapshot: StateSnapshot,
    ) -> str | None:
        """Compile one target, run it forward and backward, and compare. Return what is wrong, or None."""
        # The first rank of each machine compiles before the others, which find its code on disk.
        first = self.runtime.world.local_rank == 0
        problem = None
        if not first:
            self._meet("compiled first")

        self.runtime.heartbeat.beat("compile")
        try:
            problem = self._compile_and_compare(name, call, args, kwargs, snapshot)
        except torch.OutOfMemoryError:
            problem = "out of memory"
        except Exception as error:
            problem = _explain(error)
        finally:
            snapshot.restore()

        if first:
            self._meet("compiled first")
        self._meet("compiled")
        return problem

    def _compile_and_compare(
        self,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        snapshot: StateSnapshot,
    ) -> str | None:
        self._shapes = [tuple(t.shape) for t in tensors_in((args, kwargs))]
        self._dynamic = frozenset() if self.sizes.irregular else self.sizes.varying()
        target = self.target = Target(name, self.model, self.function, bool(self._dynamic))
        trial = Trial([p for p in self.model.parameters() if p.requires_grad], args, kwargs)

        compiled = call
        if target.function is not None:
            compiled = lambda *args: self.driver.call_inside(target, *args)  # noqa: E731

        with separate_sizes() if self._dynamic else nullcontext():
            found = trial.run(compiled, self._dynamic if target.function is not None else frozenset())

        # A loss that counts its calls, say, would be compiled for every number.
        snapshot.restore()
        with torch.compiler.set_stance("fail_on_recompile"):
            trial.run(compiled)

        return self._compare(trial, call, found, snapshot)

    def _compare(self, trial: Trial, call: Callable[..., Any], found: Outcome, snapshot: StateSnapshot) -> str | None:
        """Compare with the same call without compiled code."""
        with torch.compiler.set_stance("force_eager"):
            snapshot.restore()
            generator = self._generator()
            before = generator.get_state()
            expected = trial.run(call)

            # Compiled code draws other random numbers than eager code. This second call draws others, too.
            other = None if torch.equal(before, generator.get_state()) else trial.run(call)

        if other is None:
            distance, limit = difference(expected, found), self.tolerance
        else:
            distance = gradient_difference(expected, found)
            limit = self.tolerance + RANDOM * gradient_difference(expected, other)

        if distance <= limit:
            return None
        return f"loss or gradients differ from eager by {distance:.2g} (relative; at most {limit:.2g} is allowed)"

    def _meet(self, name: str) -> None:
        """Wait for all ranks through the store: the timeout of a collective is shorter than compiling takes."""
        heartbeat = self.runtime.heartbeat
        heartbeat.beat("collective")
        heartbeat.set_detail(name)
        if not self.runtime.store_barrier(name, timedelta(seconds=self.config.hang.first)):
            seconds = f"{self.config.hang.first:.0f}"
            raise UserError(
                f"some ranks had not compiled the model after {seconds} s (hang.first={seconds})",
                "all ranks must have compiled it before their next gradient all-reduce",
                "set hang.first=3600, or compile=false",
            )

    def _generator(self) -> torch.Generator:
        device = self.runtime.device
        return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator

    def _remove_target(self) -> None:
        self._graphed = None
        if self.target is not None:
            self.target.remove()
            self.target = None

    def _stay_eager(self, reason: str) -> None:
        self.stage = "eager"
        self._timings = _ENOUGH
        CallChain.of(self.model).remove("compile")
        self.log_event("compile", reason=f"nothing: {reason}")
        self._capture()

    def release(self) -> None:
        """Free the memory of captures at the end of a run."""
        self._graphed = None


class ModelCall(Link):
    """The link of a model's call chain that keeps compiled code to training calls."""

    def __init__(self, compiler: Compiler):
        self._compiler = compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)

        # An evaluation, or a call outside a step: its shapes and modes would be compiled for once more.
        compiler = self._compiler
        if not torch.is_grad_enabled() or compiler.runtime.heartbeat.phase not in ("compute", "compile"):
            with torch.compiler.set_stance("force_eager"):
                return self.inner(*args, **kwargs)

        return compiler.call_model(self.inner, args, kwargs)


_ENOUGH: list[float] = []  # in place of timings: no step is timed any more


def _explain(error: Exception) -> str:
    """`Unsupported: Data-dependent branching (my_task.py, line 12)`"""
    name, text = type(error).__name__, first_line(error).removeprefix(f"{type(error).__name__}: ")

    # torch names the line of the user's code that it could not compile.
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error).partition("from user code:")[2])
    where = f" ({Path(places[-1][0]).name}, line {places[-1][1]})" if places else ""
    return f"{name}: {text}{where}"


def _count_layers(model: nn.Module) -> int:
    return sum(not any(True for _ in module.children()) for module in model.modules())
