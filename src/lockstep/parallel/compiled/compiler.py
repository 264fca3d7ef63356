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

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.parallel.blocks import class_name, find_blocks
from lockstep.parallel.call_chain import CallChain, Link
from lockstep.parallel.compiled import history
from lockstep.parallel.compiled.attempt import Arguments, Attempt
from lockstep.parallel.compiled.constants import Constants
from lockstep.parallel.compiled.decision import BLOCKS, LOSS, MODEL, Facts, Record, decide, preferred
from lockstep.parallel.compiled.shapes import Dims, Shape, SizesSeen, fits
from lockstep.parallel.compiled.targets import Function, Target, compiles_itself
from lockstep.parallel.compiled.trial import LOOSE_TOLERANCE, TOLERANCE, tensors_in
from lockstep.parallel.cudagraph.graphs import GraphedCall, capture_calls, graph_link, release_captures
from lockstep.parallel.driver import Driver
from lockstep.runtime.context import EventLogger, Runtime

WARM_UP, TIMED = 2, 3  # steps that are not timed (they allocate, tune and connect), and steps that are
# The same if sizes vary: kernels are tuned for each new size, and steps differ.
WARM_UP_VARYING, TIMED_VARYING = 12, 12
SLOWER = 1.02  # compiled steps that take longer than this many times an eager one are given up
MOST_COMPILES = 2
MISSES = 0.2  # compile once more if this part of the batches did not fit. All ranks look after so many steps:
FIRST_LOOK, LAST_LOOK = 8, 1024  # at the first one, and then after twice as many, up to the last one
MOST_EXAMPLES = 3
ALIGNED = 8  # some kernels have a version for sizes that are multiples of this


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

        self.stage: Literal["watch", "try", "compiled", "eager"] = "watch" if judged else "try"
        self.function: Function | None = None  # what the user's loss computes from the model and a batch
        self.target: Target | None = None
        self.compiles = 0
        self._targets: Sequence[str] | None = None  # to try next; None: see `preferred`
        self._problems: dict[str, str] = {}  # of the targets that were tried
        self._graphed: GraphedCall | None = None  # around the compiled function
        self._constants: Constants | None = None  # what that function reads besides its arguments
        self._own_compile = compiles_itself(self.model)  # asked before any code of ours is on the model

        # Calls of the model in the watched steps, one for each class of sizes: some kernels need aligned ones.
        self._examples: dict[tuple[bool, ...], Arguments] = {}

        # What the steps so far have shown.
        self.sizes = SizesSeen()
        self._steps_left = 0
        self._began: float | None = None
        self._timings: list[float] | None = []  # None: no step is timed any more
        self._eager_s = self._cost_s = 0.0
        self._key = ""  # of the records of this model on this machine

        # The batch that was compiled for, and how many batches since then did not fit.
        self._shapes: list[Shape] = []
        self._dynamic: Dims = frozenset()
        self._varying: Dims = frozenset()  # dimensions that vary, as all ranks have agreed
        self._calls = self._misses = self._steps = 0
        self._next_look = FIRST_LOOK

        CallChain.of(self.model).install("compile", ModelCall(self))

    # ---- the calls of a step ----

    def around(self, function: Function) -> Function:
        """Return a function `(model, *args)` to call in place of `function`: compiled with the model, if that pays."""
        self.function = function

        def call(module: Any, *args: Any) -> Any:
            if self.stage in ("watch", "try"):
                self._note_sizes(args)
            if self.stage == "try" and self._next_target() == LOSS and self._is_training():
                self._try((LOSS,), lambda *args: function(module, *args), (args, {}))

            if self.stage != "compiled":
                return function(module, *args)
            if not self._note_call(args) and self.target and self.target.function:
                return function(module, *args)
            return self._run(lambda: self._call_function(function, module, args))

        return call

    def call_model(self, link: Link, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model itself in a training step, for its link."""
        if self.stage in ("watch", "try") and self.function is None:
            self._note_sizes((args, kwargs))

        if self.stage == "watch":
            self._keep_example(args, kwargs)
        elif self.stage == "try" and self._next_target() != LOSS:
            # The model alone is called for a trial, never the user's loss, which may have side effects.
            targets = [target for target in self._targets or () if target != LOSS]
            self._try(targets, lambda *args, **kwargs: link.inner(*args, **kwargs), (args, kwargs))

        if self.stage != "compiled":
            return link.inner(*args, **kwargs)
        if self.function is None:
            self._note_call((args, kwargs))
        return self._run(lambda: link.inner(*args, **kwargs))

    def _call_function(self, function: Function, module: Any, args: tuple[Any, ...]) -> Any:
        assert self.target is not None
        if self.target.function is None:
            return function(module, *args)
        if self._graphed and self._constants and self._constants.hold:
            return self.driver.call_inside(self._graphed, *args)
        return self.driver.call_inside(self.target, *args)

    def _run(self, call: Callable[[], Any]) -> Any:
        """Run compiled code, or eager code if the batch does not fit it: nothing is compiled any more."""
        with torch.compiler.set_stance("eager_on_recompile"):
            return call()

    def _note_call(self, arguments: Any) -> bool:
        """Count a call, and return whether it fits the compiled code."""
        shapes = _shapes(arguments)
        fitting = fits(shapes, self._shapes, self._dynamic)
        if self._next_look <= LAST_LOOK:
            self.sizes.add(shapes)
            self._calls += 1
            self._misses += not fitting

        return fitting

    def _note_sizes(self, arguments: Any) -> None:
        self.sizes.add(_shapes(arguments))

    def _keep_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kind = tuple(size % ALIGNED == 0 for shape in _shapes((args, kwargs)) for size in shape)
        if len(self._examples) < MOST_EXAMPLES:
            self._examples.setdefault(kind, (args, kwargs))

    def _is_training(self) -> bool:
        return self.runtime.heartbeat.phase == "compute" and torch.is_grad_enabled()

    def _next_target(self) -> str | None:
        """Return the target to try next, or None if there is none left."""
        if self._targets is None:
            self._targets = preferred(self._facts(0.0, {}))
        return self._targets[0] if self._targets else None

    # ---- between two steps ----

    def begin_step(self, steps_left: int) -> None:
        """Start the clock of a step."""
        if self._timings is not None:
            self._steps_left = steps_left
            self._began = time.perf_counter()

    def end_step(self) -> None:
        """End a step: all ranks come here together. They decide or measure, if it is time."""
        if self.stage == "eager":
            return
        if self.stage == "compiled":
            self._look_for_misses()
        if self._timings is None or self._began is None or self.stage == "try":
            return

        # The host waits for the device, in the few steps that are timed.
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()

        self._timings.append(time.perf_counter() - self._began)
        warm_up, timed = self._timed_steps()
        if len(self._timings) >= warm_up + timed:
            step_s = self._slowest(median(self._timings[warm_up:]))
            if self.stage == "watch":
                self._decide(step_s)
            elif self.stage == "compiled":
                self._conclude(step_s)

    def _timed_steps(self) -> tuple[int, int]:
        """Return how many steps to leave out, and how many to time. The same on all ranks, whose batches may differ."""
        if self.stage == "compiled" and self._dynamic:
            return WARM_UP_VARYING, TIMED_VARYING
        return WARM_UP, TIMED

    def _decide(self, step_s: float) -> None:
        """Decide what to compile. Collective."""
        # torch cannot go through a compiled graph twice.
        if any(self.runtime.collectives.gather_json(self.driver.keeps_graphs)):
            return self._stay_eager("the loss computes a gradient through the model and keeps its graph")

        self._agree_on_sizes()
        self._eager_s = step_s
        self._key = history.signature(self.model, self.runtime.device, [self.sizes.describe(), bool(self.function)])
        found = self.runtime.collectives.run_on_rank0(
            lambda: {name: [record.cost_s, record.speedup] for name, record in history.read(self._key).items()}
        )
        records = {name: Record(*values) for name, values in found.items()}
        decision = decide(self._facts(step_s, records))
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
            sizes_vary=bool(self._varying),
            layers=_count_layers(self.model),
            blocks=len(blocks),
            block_layers=sum(map(_count_layers, one_of_each)),
            all_block_layers=sum(map(_count_layers, blocks)),
            cold=self.runtime.collectives.run_on_rank0(history.is_cold) if step_s else False,
            possible=self._possible(),
            records=records,
        )

    def _possible(self) -> tuple[str, ...]:
        # The model says itself which of its parts to compile.
        if self._own_compile:
            return (MODEL,)

        # DDP would look for the parameters in a result of the compiled loss, and not find them.
        options = self.config.ddp
        hidden = options.static_graph or options.find_unused_parameters
        return (LOSS, MODEL, BLOCKS) if self.function and not hidden else (MODEL, BLOCKS)

    def _conclude(self, compiled_s: float) -> None:
        """Compare the steps with those before compiling, remember the result, or go back to eager."""
        self._timings = None
        speedup = self._eager_s / compiled_s
        assert self.target is not None

        if self.runtime.is_main:
            history.write(self._key, self.target.name, Record(self._cost_s, speedup))

        times = f"{self._eager_s * 1e3:.3g} ms before, {compiled_s * 1e3:.3g} ms now"
        if compiled_s > SLOWER * self._eager_s:
            self._remove_target()
            self._stay_eager(f"compiled steps are slower ({times})")
        else:
            self.log_event("compile", reason=f"steps are {speedup:.2f}x as fast ({times})", speedup=round(speedup, 3))
            self._capture()

    def _look_for_misses(self) -> None:
        """Compile once more, with other dimensions dynamic, if too many batches do not fit. Collective at times."""
        self._steps += 1
        if self._steps < self._next_look or self._next_look > LAST_LOOK:
            return

        self._next_look *= 2
        shares = self.runtime.collectives.gather_json(self._misses / max(1, self._calls))
        self._calls = self._misses = 0
        if max(shares) <= MISSES or self.compiles >= MOST_COMPILES:
            return

        self._agree_on_sizes()
        facts = self._facts(self._eager_s, {})
        targets = decide(facts).targets if self.judged else preferred(facts)
        if targets:
            self._remove_target()
            self._targets = targets
            self.stage = "try"
            self.log_event("compile", reason=f"once more: {max(shares):.0%} of the batches had another shape")

    def _agree_on_sizes(self) -> None:
        """Give all ranks the same sizes, merged in the order of the ranks. Collective."""
        agreed = SizesSeen()
        for sizes, irregular in self.runtime.collectives.gather_json([self.sizes.sizes, self.sizes.irregular]):
            agreed.merge(sizes)
            agreed.irregular |= irregular

        self.sizes.sizes, self.sizes.irregular = agreed.sizes, agreed.irregular
        self._varying = frozenset() if agreed.irregular else agreed.varying()

    def _slowest(self, seconds: float) -> float:
        return max(self.runtime.collectives.gather_json(seconds))

    # ---- compile and compare ----

    def _try(self, targets: Sequence[str], call: Callable[..., Any], arguments: Arguments) -> None:
        """Compile the first of these targets that works on all ranks, and compare it with eager. Collective."""
        began = time.perf_counter()
        release_captures(self.model)
        dynamic = self._varying  # not what this rank has seen since: all ranks must compile alike
        attempt = Attempt(
            driver=self.driver,
            call=call,
            arguments=arguments,
            examples=list(self._examples.values()) if dynamic and targets != (LOSS,) else (),
            function=self.function,
            dynamic=dynamic,
            tolerance=self.tolerance,
            eager_fits=self.judged,
            timeout=timedelta(seconds=self.config.hang.first),
        )
        for name in targets:
            problem = attempt.run(name)
            if not problem:
                break
            self._problems[name] = problem

        self._cost_s += time.perf_counter() - began
        self._targets = [target for target in self._targets or () if target not in targets]
        if attempt.target is not None:
            self._install(attempt)
        elif not self._targets:
            self._stay_eager("; ".join(f"not {name}: {problem}" for name, problem in self._problems.items()))

    def _install(self, attempt: Attempt) -> None:
        """Run this code from now on, and log what it is and why nothing better is."""
        self.target = attempt.target
        assert self.target is not None
        self.stage = "compiled"
        self.compiles += 1
        self._dynamic = attempt.dynamic
        # With a function, the sizes are those of its arguments, even if the model alone is compiled.
        self._shapes = [tuple(sizes[0] for sizes in dims) for dims in self.sizes.sizes or []]
        if self.function is None or self.target.function is not None:
            self._shapes = _shapes(attempt.arguments)
        self._examples.clear()

        # Captures would disturb the steps that are timed.
        self._began = None
        self._timings = [] if self.judged else None
        if not self.judged:
            self._capture()

        why = "; ".join(f"not {name}: {problem}" for name, problem in self._problems.items())
        sizes = f", {len(self._dynamic)} dimensions dynamic" if self._dynamic else ""
        reason = f"compiled {self.target.name} in {self._cost_s:.1f} s{sizes}, {attempt.note}"
        self.log_event("compile", reason=f"{reason} ({why})" if why else reason)

    def _capture(self) -> None:
        """Capture calls from now on: those of the compiled function, or else of the model."""
        capture_calls(self.model, self.config, self.runtime, self.log_event)
        if self.target is not None and self.target.function is not None:
            assert self.function is not None
            self._constants = Constants(self.function)
            if not self._constants.hold:
                reason = "not captured: the loss may read values that change (attributes of the task, globals)"
                return self.log_event("graph", reason=reason)
            self._graphed = graph_link(self.model, self.config, self.runtime, self.log_event)
            if self._graphed:
                self._graphed.inner = self.target

    def _remove_target(self) -> None:
        self._graphed = None
        self._problems.clear()
        self._cost_s = 0.0
        if self.target is not None:
            self.target.remove()
            self.target = None

    def _stay_eager(self, reason: str) -> None:
        self.stage = "eager"
        self._timings = None
        self._examples.clear()
        CallChain.of(self.model).remove("compile")
        self.log_event("compile", reason=f"nothing: {reason}")
        self._capture()

    def release(self) -> None:
        """Return the model without compiled code, and free the memory of captures."""
        self._remove_target()
        self.stage = "eager"
        CallChain.of(self.model).remove("compile")


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
            if compiler.target is None:
                return self.inner(*args, **kwargs)
            with compiler.target.uncompiled():
                return compiler.model._call_impl(*args, **kwargs)

        return compiler.call_model(self, args, kwargs)


def _count_layers(model: nn.Module) -> int:
    return sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())


def _shapes(arguments: Any) -> list[Shape]:
    return [tuple(tensor.shape) for tensor in tensors_in(arguments)]
