"""Try to compile a target on a real call, on all ranks, and compare it with eager.

`Candidates` are the targets of one decision, which are tried in turn. `Compilation` tries one of them.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.call_state import StateSnapshot
from lockstep.parallel.compiled.batch_sizes import Arguments, Dims
from lockstep.parallel.compiled.deadline import Deadline, TookTooLong
from lockstep.parallel.compiled.isolated_call import RANDOM, CallResult, IsolatedCall, difference, gradient_difference
from lockstep.parallel.compiled.side_effects import Function, Unsuitable
from lockstep.parallel.compiled.targets import Target, compiling
from lockstep.parallel.cudagraph.checks import first_line
from lockstep.parallel.driver import Driver

PROGRESS_S = 5.0  # seconds between two calls of `progress`
FIRST_RANK = timedelta(seconds=120)  # the other ranks wait at most this long for the first one of every machine


@dataclass
class Candidates:
    """The targets to try, and what was wrong with those that were tried."""

    left: Sequence[str] | None = None  # None: not decided, see `Judge.preferred`
    limit_s: float = inf  # seconds for all tries
    problems: dict[str, str] = field(default_factory=dict)
    cost_s: float = 0.0  # seconds of all tries

    @property
    def seconds_left(self) -> float:
        """Seconds that are left for the next try."""
        # At least one, so that all ranks try the same targets: their costs differ a little.
        return max(1.0, self.limit_s - self.cost_s)

    @property
    def why(self) -> str:
        """Why nothing better is compiled, for the log; empty if the first target worked."""
        return "; ".join(f"not {name}: {problem}" for name, problem in self.problems.items())


@dataclass
class Compilation:
    """One try to compile a model on a real call, on all ranks: `run` is called for one target after another."""

    # What is called, and with which batches.
    driver: Driver
    call: Callable[..., Any]  # the eager call; with a target on the model it runs compiled code
    arguments: Arguments
    examples: Sequence[Arguments]  # further calls of other sizes, which may need a version of their own
    function: Function | None  # (model, *args), such as a task's loss; None: there is only the model
    dynamic: Dims  # dimensions that vary from batch to batch

    # What is allowed: how far results may differ from eager ones, and how long it may take.
    tolerance: float
    eager_fits: bool  # into memory: steps have run eagerly
    timeout: timedelta
    progress: Callable[[str, float], None]  # called now and then, by another thread

    # The result of `run`.
    target: Target | None = field(init=False, default=None)  # on the model now; None: nothing worked so far
    note: str = field(init=False, default="equal to eager")
    gave_up: bool = field(init=False, default=False)  # some rank reached the limit

    def run(self, name: str, limit_s: float) -> str | None:
        """Compile one target, and return what is wrong with it on some rank, or None. Collective.

        If it works, it stays on the model as `self.target`.

        limit_s: seconds after which compiling is given up, see `deadline.py`
        """
        runtime = self.driver.runtime
        began = time.monotonic()

        # The first rank of each machine compiles before the others, which then find its code on disk. The others wait
        # for the first ranks of all machines. Their wait counts: if no time is left, they do not compile.
        first = runtime.world.local_rank == 0
        if not first:
            self._wait("compiled first", FIRST_RANK)

        # Buffers and generators are as before when this ends, whatever was tried. No rank may exchange gradients here,
        # because the others compile at another time.
        runtime.heartbeat.beat("compile")
        with StateSnapshot(self.driver.model, self._generator()) as snapshot, self.driver.no_exchange():
            left_s = limit_s - (time.monotonic() - began)
            problem = self._try(name, snapshot, left_s) if left_s > 0 else self._give_up(TookTooLong(limit_s))

        # Arrive without waiting: the other ranks may now look for this rank's code.
        if first:
            runtime.store_barrier("compiled first", timedelta(0))

        # All ranks must have compiled before any of them exchanges gradients again.
        if not self._wait("compiled", self.timeout):
            seconds = f"{self.timeout.total_seconds():.0f}"
            raise UserError(
                f"some ranks had not compiled the model after {seconds} s (hang.first={seconds})",
                "all ranks must have compiled it before their next gradient all-reduce",
                "set hang.first=3600, or compile=false",
            )

        # All ranks keep the target, or none of them does: compiled and eager ranks would differ in the last bits.
        problems = [problem for problem in runtime.collectives.gather_json(problem) if problem]
        self.gave_up = any(runtime.collectives.gather_json(self.gave_up))
        if problems and self.target is not None:
            self.target.remove()
            self.target = None

        # The step goes on.
        runtime.heartbeat.beat("compute")
        return problems[0] if problems else None

    def _try(self, name: str, snapshot: StateSnapshot, limit_s: float) -> str | None:
        """Compile one target on this rank, compare it with eager, and return what is wrong with it, or None."""
        driver = self.driver
        trainable = [parameter for parameter in driver.model.parameters() if parameter.requires_grad]
        isolated = IsolatedCall(trainable, self.arguments)

        num_blocks = len(find_blocks(driver.model))
        alone = driver.runtime.world.alone
        began = time.monotonic()

        # Whatever is raised here is a problem of this target, not of the run: the next target is tried, or none.
        try:
            with compiling(num_blocks), reported(partial(self.progress, name)), Deadline(limit_s) as deadline:
                self.target = Target(name, driver.model, self.function, bool(self.dynamic), alone, deadline.check)
                found = self._run_compiled(isolated, self.target)
        except torch.OutOfMemoryError:
            return "out of memory"
        except TookTooLong as error:
            # A single graph may have taken far longer than the limit, and the next run should know how long.
            self.progress(name, time.monotonic() - began)
            return self._give_up(error)
        except Exception as error:
            return explain(error)

        # A model that only fits into memory when it is compiled cannot be compared. Where eager steps have run, a lack
        # of memory comes from compiled and eager gradients side by side, and then eager code is kept.
        try:
            return self._compare(isolated, found, snapshot)
        except torch.OutOfMemoryError:
            if self.eager_fits:
                return "out of memory while it was compared with eager"

            self.note = "not compared with eager, which does not fit into memory"
            return None
        except Exception as error:
            return explain(error)

    def _give_up(self, error: TookTooLong) -> str:
        """Note that the time was over on this rank, and return it as the problem of this target."""
        self.gave_up = True
        return str(error)

    def _run_compiled(self, isolated: IsolatedCall, target: Target) -> CallResult:
        """Run forward and backward, so that torch compiles them, and return the result."""
        # What torch compiles inside the model is reached by the eager call; a compiled loss is a function of its own.
        call = self.call
        dynamic: Dims = frozenset()
        if target.function is not None:
            call = lambda *args: self.driver.call_inside(target, *args)  # noqa: E731
            dynamic = self.dynamic

        # Every example may need a version of the code for its class of sizes.
        found = isolated.run(call, dynamic)
        for arguments in self.examples:
            IsolatedCall(isolated.parameters, arguments).run(call, dynamic)

        # A second run must not compile again. It would if an attribute changed with every call, for example, because
        # torch compiles for its value.
        with torch.compiler.set_stance("fail_on_recompile"):
            isolated.run(call)

        return found

    def _compare(self, isolated: IsolatedCall, found: CallResult, snapshot: StateSnapshot) -> str | None:
        """Compare with the same call without compiled code."""
        with torch.compiler.set_stance("force_eager"):
            # The eager call starts from the same buffers and random numbers as the compiled one.
            snapshot.restore()
            generator = self._generator()
            before = generator.get_state()
            expected = isolated.run(self.call)

            # Compiled code draws other random numbers than eager code. This second call draws others, too.
            draws_random = not torch.equal(before, generator.get_state())
            other = isolated.run(self.call) if draws_random else None

        # Without random numbers every result and every gradient must agree. With them only the gradients as a whole
        # can be judged, by how much two eager calls differ.
        if other is None:
            distance = difference(expected, found)
            limit = self.tolerance
        else:
            distance = gradient_difference(expected, found)
            limit = self.tolerance + RANDOM * gradient_difference(expected, other)

        if distance <= limit:
            return None
        return f"loss or gradients differ from eager by {distance:.2g} (relative; at most {limit:.2g} is allowed)"

    def _wait(self, name: str, timeout: timedelta) -> bool:
        """Wait for all ranks through the store: the timeout of a collective is shorter than compiling takes."""
        # The watchdog must see that this rank waits, and not take it for the one that hangs.
        heartbeat = self.driver.runtime.heartbeat
        heartbeat.beat("collective")
        heartbeat.set_detail(name)
        return self.driver.runtime.store_barrier(name, timeout)

    def _generator(self) -> torch.Generator:
        """Return the generator of the model's device, from which dropout draws."""
        device = self.driver.runtime.device
        if device.type == "cuda":
            return torch.cuda.default_generators[device.index or 0]
        return torch.default_generator


@contextmanager
def reported(progress: Callable[[float], None]) -> Iterator[None]:
    """Call `progress` with the seconds so far, every few seconds in a `with` block, from a thread of its own."""
    began = time.monotonic()
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(PROGRESS_S):
            progress(time.monotonic() - began)

    thread = threading.Thread(target=report, name="compile progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def explain(error: Exception) -> str:
    """`Unsupported: Data-dependent branching (my_task.py, line 12)`"""
    # torch puts what a backend raises into an exception of its own.
    cause = getattr(error, "inner_exception", error)
    name = type(cause).__name__
    text = first_line(cause)

    # Our own refusal is a sentence already.
    if isinstance(cause, Unsuitable):
        return text.removeprefix("Unsuitable: ")

    # torch names the line of the user's code that it could not compile.
    _, _, stack = str(error).partition("from user code:")
    places = re.findall(r'File "([^"]+)", line (\d+)', stack)
    where = ""
    if places:
        file, line = places[-1]
        where = f" ({Path(file).name}, line {line})"

    # Some messages begin with the name of the exception already.
    return f"{name}: {text.removeprefix(f'{name}: ')}{where}"
