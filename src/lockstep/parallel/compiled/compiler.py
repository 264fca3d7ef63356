"""The owner of a model's compiled code, from the first step to the last.

    time      the first steps run eagerly: they are timed, and the sizes of their batches noted (compile=auto only)
    decide    all ranks exchange what they measured and decide alike, with the rule in payoff.py; if that depends on
              how much there is to gain, the kernels of one more step are measured first
    try       the next batch is compiled and compared with eager; if that fails, the next target is tried, or none
    measure   the steps with compiled code are timed; if they are slower than before, the run goes back to eager

Compiling happens before the first gradient all-reduce with compiled code: otherwise one rank would compile while others
wait in a collective, whose timeout is shorter. Only training calls are compiled. Evaluations run eagerly, and so does a
batch whose shape the compiled code does not take, such as a short last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.calls.chain import CallChain, Link
from lockstep.parallel.compiled.batch_sizes import Arguments, SeenShapes, shapes_of
from lockstep.parallel.compiled.comparison import LOW_PRECISION_TOLERANCE, TOLERANCE
from lockstep.parallel.compiled.compilation import Compilation
from lockstep.parallel.compiled.cudnn_pause import CudnnPause
from lockstep.parallel.compiled.facts import CompileFacts, StepTimer
from lockstep.parallel.compiled.installed import InstalledCode
from lockstep.parallel.compiled.kernel_times import KernelTimer
from lockstep.parallel.compiled.payoff import SLOWER, STEPS, STEPS_VARYING, Candidates, decide, kernels_could_decide
from lockstep.parallel.compiled.side_effects import Function
from lockstep.parallel.compiled.targets import LOSS
from lockstep.parallel.cudagraph.graphs import capture_calls, release_captures
from lockstep.parallel.cudagraph.variants import RunLength
from lockstep.parallel.driver import Driver
from lockstep.parallel.micro_batches import MicroBatchDriver, runs_whole_model
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.runtime.context import EventLogger
from lockstep.task import MicroBatch

PATIENCE = 0.8  # part of hang.first after which compiling is given up, before the watchdog ends the run
MOST_MISSES = 0.2  # if a larger part of the batches does not fit, the run compiles again
MOST_COMPILES = 2  # but not more often than this
MOST_POSTPONED = 16  # steps in which some rank makes no call to compile, after which the run stays eager


class Compiler(StepPart):
    """Decides what of a model to compile, compiles it, and chooses between compiled and eager code in every call."""

    slot = "compile"
    in_micro_batch = False  # True from `before_forward` to `after_backward`

    def __init__(
        self,
        driver: MicroBatchDriver,
        config: RunConfig,
        log_event: EventLogger,
        only_if_it_pays: bool,
        low_precision: bool,
        cudnn_pause: CudnnPause | None = None,
    ):
        """Install the compiler on the model's call.

        only_if_it_pays: compile only if it pays; otherwise the first batch is compiled at once
        low_precision: something is computed in 16 bits or in TF32, see `comparison.py`
        cudnn_pause: the part that pauses cuDNN until the compiler knows whether sizes vary; None: cuDNN is not paused
        """
        self.driver = driver
        self.config = config
        self.log_event = log_event
        self.only_if_it_pays = only_if_it_pays
        self.tolerance = LOW_PRECISION_TOLERANCE if low_precision else TOLERANCE

        self.state: Literal["time", "try", "compiled", "eager"] = "time" if only_if_it_pays else "try"
        self._functions: list[Function] = []  # functions that call the model, see `around`
        self.code: InstalledCode | None = None  # what runs in training calls; None: eager code
        self.compiles = 0  # how often code was installed

        # Some rank makes no call to compile in this pass; and how many times in a row that was so.
        self._is_postponed = False
        self._postponed = 0

        # What the steps show, and what follows from it.
        self.known = CompileFacts(driver, config)
        self.shapes = SeenShapes()
        self._timer: StepTimer | None = StepTimer(*STEPS) if only_if_it_pays else None
        self._kernel_timer: KernelTimer | None = None  # set in the one step whose kernels are measured
        self._candidates = Candidates()
        self._length = RunLength()

        self._cudnn_pause = cudnn_pause

        CallChain.of(driver.model).install("compile", ModelCall(self))

    @property
    def banner(self) -> str:
        """A line that says what will be compiled, and when."""
        what = "the loss with the model, or as much of it as can be"
        if self.only_if_it_pays:
            what += " if it pays: the first steps are timed, and the decision is logged"
        elif self.config.compile == "auto":
            # This is the only sign that nothing is measured.
            reason = "a repeatable run must not depend on the time" if self.config.deterministic else "float8 needs it"
            what += f", in the first step: {reason}"

        return what

    # ---- the calls of a step ----

    @property
    def function(self) -> Function | None:
        """The function that calls the model, such as a task's loss; None if there is none, or more than one."""
        return self._functions[0] if len(self._functions) == 1 else None

    def around(self, function: Function, number: int = 1) -> Function:
        """Return a function to call in place of `function(model, *args)`, such as a task's loss.

        If there is one such function, and it pays, the function and the model are compiled together. With several of
        them, or if that fails, the model alone may be compiled.

        number: the number of this step in the log, for an error
        """
        if function not in self._functions:
            self._check_first_step(function, number)
            self._functions.append(function)

        def call(module: Any, *args: Any) -> Any:
            # With several functions only the model is compiled, in its own call: see `call_model`.
            if len(self._functions) > 1 or not self.is_training():
                return function(module, *args)

            if self.state in ("time", "try"):
                self.shapes.note(shapes_of(args))

            # Compile on the first training batch after the decision. The call below then runs the new code.
            if self.state == "try" and self._next_target() == LOSS and self._all_ranks_call():
                self._try((LOSS,), lambda *args: function(module, *args), (args, {}))

            code = self.code
            if code is None:
                return self.known.count_operations_once(function(module, *args))

            # In every call, because this counts the calls that do not fit.
            fitting = self._fits(code, args)

            # If the model or its blocks are compiled, torch's guards in them choose between compiled and eager code.
            if code.target.function is None:
                return code.run(lambda: function(module, *args))

            # If the loss is compiled, the eager one still exists beside it, and the choice is made here.
            if not fitting:
                return function(module, *args)

            return code.run(lambda: code.call_function(args))

        return call

    def _check_first_step(self, function: Function, number: int) -> None:
        """Refuse a further function once a step has begun: the first one may be compiled by then."""
        if self._functions and self._length.steps_left:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise UserError(
                f"run.compile({name}) got another function than before, in step {number}",
                "what is compiled is decided in the first steps",
                "call run.compile for each function, once, before the loop over run.steps(...)",
            )

    def call_model(self, link: Link, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the model itself in a training step. `link`: the compiler's link in the model's call chain."""
        # If a function calls the model (`around`), the sizes of the function's arguments are noted, not the model's.
        if self.state in ("time", "try") and self.function is None:
            self.shapes.note(shapes_of((args, kwargs)))

        if self.state == "time":
            self.shapes.keep_example(args, kwargs)
        elif self.state == "try" and self._next_target() != LOSS and self._all_ranks_call():
            # Compare compiled and eager code on this call of the model, without the user's loss, which may have side
            # effects.
            targets = [target for target in self._candidates.left or () if target != LOSS]
            self._try(targets, lambda *args, **kwargs: link.inner(*args, **kwargs), (args, kwargs))

        if self.code is None:
            returned = link.inner(*args, **kwargs)
            return returned if self.function else self.known.count_operations_once(returned)

        # Only to count the calls that do not fit: torch's guards choose between compiled and eager code.
        if self.function is None:
            self._fits(self.code, (args, kwargs))

        return self.code.run(lambda: link.inner(*args, **kwargs))

    def _fits(self, code: InstalledCode, arguments: Any) -> bool:
        """Return whether a call fits the compiled code, and count it."""
        # As long as the run may compile again, it notes all sizes.
        shapes = shapes_of(arguments)
        if code.still_checks:
            self.shapes.note(shapes)

        return code.takes(shapes)

    def _all_ranks_call(self) -> bool:
        """Return whether all ranks have come to a call that they can compile, in this pass. Collective."""
        # A loss may call the model on some ranks only, and a part of it on the others, which would never arrive.
        return not self._is_postponed and not self._postpone(False)

    def _postpone(self, calls_nothing: bool) -> bool:
        """Return whether to compile later, because some rank calls nothing that it can compile. Collective."""
        self._is_postponed = self.driver.runtime.collectives.any(calls_nothing)
        self._postponed = self._postponed + 1 if self._is_postponed else 0
        return self._is_postponed

    def begin_pass(self) -> None:
        self.in_micro_batch = False
        self._is_postponed = False

    def before_all_reduce(self) -> None:
        # The other ranks may wait for this one in `_all_ranks_call`.
        if self.state == "try" and not self._is_postponed:
            self._postpone(True)

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        self.in_micro_batch = True

    def after_backward(self, progress: PassProgress) -> None:
        self.in_micro_batch = False

    def is_training(self) -> bool:
        """Return whether the call of a loss or model belongs to training; evaluations make such calls, too."""
        return self.in_micro_batch and torch.is_grad_enabled()

    def _next_target(self) -> str | None:
        """Return the target to try next, or None if there is none left."""
        # With compile=true nothing was decided, and all targets are tried. The constructor could not list them: they
        # depend on the function, which `around` gets later.
        if self._candidates.left is None:
            self._candidates.left = self.known.preferred(self.function, self.shapes.varying)

        return self._candidates.left[0] if self._candidates.left else None

    # ---- between two steps ----

    def begin_step(self, steps_left: int) -> None:
        """Begin a step, and start the clock."""
        self._length.steps_left = steps_left
        if self._kernel_timer:
            self._kernel_timer.start()
        if self._timer:
            self._timer.begin_step()

    def end_step(self, progress: PassProgress) -> None:
        """End a step. All ranks come here together, so they can decide together."""
        self._length.steps_done += 1

        if self._postponed >= MOST_POSTPONED and self.state == "try":
            return self._stay_eager(f"in each of {MOST_POSTPONED} steps some rank did not call what was to be compiled")

        # This may take the code away, and let the next step compile again.
        if self.code:
            self._check_misses(self.code)

        # The last step before a decision that depends on its kernels.
        if self._kernel_timer:
            self.known.note_kernels(self._kernel_timer.stop())
            return self._decide()

        step_s = self._timer.end_step(self.driver.runtime) if self._timer else None
        if step_s is None:
            return

        # The timer has done its work. Without code it timed eager steps, with code compiled ones.
        self._timer = None
        if self.code:
            self._compare_with_eager(self.code, step_s)
        else:
            self.known.eager_s = step_s
            self._decide()

    def _decide(self) -> None:
        """Decide what to compile, from the seconds of an eager step and the sizes of batches so far. Collective."""
        self.shapes.agree(self.driver.runtime.collectives)
        if self._cudnn_pause:
            self._cudnn_pause.needed = bool(self.shapes.varying) or self.shapes.irregular

        # torch cannot go through a compiled graph twice.
        if self.driver.runtime.collectives.any(self.driver.inner_gradients.keeps_graphs):
            return self._stay_eager("the loss computes a gradient through the model and keeps its graph")

        # Kernels are measured at most once, in the next step, and then it is decided again.
        facts = self.known.gather(self._length.steps_left, 0.0, self.function, self.shapes)
        if self.driver.runtime.on_gpu and self._kernel_timer is None and kernels_could_decide(facts):
            self._kernel_timer = KernelTimer(self.driver.runtime.device)
            return

        self._kernel_timer = None
        decision = decide(facts)
        if decision.targets:
            self._start_try(Candidates([*decision.targets], decision.limit_s), decision.reason)
        else:
            self._stay_eager(decision.reason)

    def _compare_with_eager(self, code: InstalledCode, compiled_s: float) -> None:
        """Compare the seconds of a compiled step with those of an eager one. If it is slower, go back to eager."""
        eager_s = self.known.eager_s
        speedup = eager_s / compiled_s

        # A slow-down is remembered as well: the next run of this model then does not compile.
        self.known.remember(code.target.name, self._candidates.cost_s, speedup)

        times = f"{eager_s * 1e3:.3g} ms before, {compiled_s * 1e3:.3g} ms now"
        if compiled_s > SLOWER * eager_s:
            self._remove_code()
            self._stay_eager(f"compiled steps are slower ({times})")
        else:
            self.log_event("compile", reason=f"steps are {speedup:.2f}x as fast ({times})", speedup=round(speedup, 3))
            self._capture()

    def _check_misses(self, code: InstalledCode) -> None:
        """If too many batches do not fit, compile again with other dimensions dynamic. Collective at some steps."""
        share = code.end_step()
        if share is None or self.compiles >= MOST_COMPILES:
            return

        # One rank with many misses holds up all others in every step, so the worst share counts.
        largest = self.driver.runtime.collectives.max(share)
        if largest <= MOST_MISSES:
            return

        # With compile=auto it must pay in the steps that are left, and the limit is lower by what was spent before.
        self.shapes.agree(self.driver.runtime.collectives)
        if self.only_if_it_pays:
            spent_s = self.driver.runtime.collectives.max(self._candidates.cost_s)
            facts = self.known.gather(self._length.steps_left, spent_s, self.function, self.shapes)
            decision = decide(facts)
            candidates = Candidates([*decision.targets], decision.limit_s)
        else:
            candidates = Candidates(self.known.preferred(self.function, self.shapes.varying))

        # Otherwise the code stays, and batches that do not fit run eagerly.
        if candidates.left:
            self._remove_code()
            self._start_try(candidates, f"once more: {largest:.0%} of the batches had another shape")

    # ---- compile and compare ----

    def _start_try(self, candidates: Candidates, reason: str) -> None:
        """Let the next training call compile the first of the candidates."""
        self.state = "try"
        self._timer = None
        self._candidates = candidates
        self.log_event("compile", reason=reason)

    def _try(self, targets: Sequence[str], call: Callable[..., Any], arguments: Arguments) -> None:
        """Compile the first of these targets that works on all ranks, and compare it with eager. Collective."""
        # A capture would replay the code from before, and it holds memory that compiling may need.
        release_captures(self.driver.model)
        compilation = Compilation(self, call, arguments)
        candidates = self._candidates
        untried = [target for target in candidates.left or () if target not in targets]

        for name in targets:
            # At least one second, so that all ranks try the same targets: their costs differ a little.
            left_s = max(1.0, candidates.limit_s - candidates.cost_s)
            limit_s = min(left_s, PATIENCE * self.config.hang.first)
            given_up = f"it is given up after {limit_s:.0f} s, and compile=false compiles nothing"
            self.log_event("compile", reason=f"begins with {name}: {given_up}")

            # A try that fails costs time as well, and leaves less for the next one.
            began = time.perf_counter()
            problem = compilation.run(name, limit_s)
            candidates.cost_s += time.perf_counter() - began

            if problem is None:
                return self._install(compilation)

            # Once the time is over, the targets that are left are not tried either.
            candidates.problems[name] = problem
            if compilation.gave_up:
                return self._stay_eager(candidates.why)

        candidates.left = untried
        if not untried:
            self._stay_eager(candidates.why)

    def _install(self, compilation: Compilation) -> None:
        """Run this code from now on, and log what it is and why nothing better is."""
        target = compilation.target
        assert target is not None

        # Later calls are compared with these shapes. With a function around the model, these are the shapes of its
        # arguments. If the model alone was compiled inside it, those of this call are not known here: any that were
        # seen will do, since dimensions that vary are dynamic.
        if self.function is not None and target.function is None:
            shapes = self.shapes.smallest()
        else:
            shapes = shapes_of(compilation.arguments)

        self.code = InstalledCode(target, shapes, compilation.dynamic)
        self.state = "compiled"
        self.compiles += 1
        self.shapes.drop_examples()

        # Steps are timed before anything is captured: a capture would make some of them slow.
        if self.only_if_it_pays:
            self._timer = StepTimer(*(STEPS_VARYING if compilation.dynamic else STEPS))
        else:
            self._capture()

        why = self._candidates.why
        sizes = f", {len(compilation.dynamic)} dimensions dynamic" if compilation.dynamic else ""
        reason = f"compiled {target.name} in {self._candidates.cost_s:.1f} s{sizes}, {compilation.note}"
        self.log_event("compile", reason=f"{reason} ({why})" if why else reason)

    def _capture(self) -> None:
        """Capture calls from now on: those of the compiled function, or else of the model."""
        capture_calls(self.driver.model, self.config, self.driver.runtime, self.log_event, self._length)
        if self.code and self.code.target.function is not None:
            assert self.function is not None
            self.code.capture(self.function, self.driver, self.config, self.log_event, self._length)

    def _remove_code(self) -> None:
        """Return the model to its eager code, if there is compiled code."""
        if self.code is not None:
            self.code.remove()
            self.code = None

    def _stay_eager(self, reason: str) -> None:
        """End all attempts to compile, and log why. Calls may still be captured."""
        self.state = "eager"
        self._timer = None
        self._kernel_timer = None
        self.shapes.drop_examples()
        # Eager calls need no link, and the loss is called as the user wrote it (`around`).
        CallChain.of(self.driver.model).remove("compile")

        self.log_event("compile", reason=f"nothing: {reason}")
        self._capture()

    def close(self) -> None:
        """Leave the model without compiled code, and free the memory of captures."""
        # The step whose kernels are measured may have failed.
        if self._kernel_timer:
            self._kernel_timer.abandon()

        self._remove_code()
        self.state = "eager"
        CallChain.of(self.driver.model).remove("compile")


def compiler_of(driver: Driver) -> Compiler | None:
    """Return the compiler of a driver's model. A pipeline has none: it compiles its stages without a decision."""
    return driver.compiler if runs_whole_model(driver) else None


class ModelCall(Link):
    """The link of a model's call chain that keeps compiled code to training calls."""

    def __init__(self, compiler: Compiler):
        self._compiler = compiler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # While torch traces this call, nothing of the choice below may become part of the graph.
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)

        compiler = self._compiler
        if compiler.is_training():
            return compiler.call_model(self, args, kwargs)

        if compiler.code is None:
            return self.inner(*args, **kwargs)

        # An evaluation, or a call outside a step, runs eagerly: torch would compile again for its shapes and modes.
        # `_call_impl` is the model's call without links; blocks inside it may be compiled by themselves.
        with compiler.code.target.uncompiled():
            return compiler.driver.model._call_impl(*args, **kwargs)
