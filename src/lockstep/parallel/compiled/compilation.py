"""Try to compile a target on a real call, on all ranks, and compare it with eager; give it up if it takes too long.

The step that is interrupted to compile goes on as if nothing had happened: a trial works on copies of the batch, leaves
no gradients behind (comparison.py), and buffers and random generators are restored. deadline.py has the limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.calls.state import StateSnapshot
from lockstep.parallel.compiled.batch_sizes import Arguments, Dims
from lockstep.parallel.compiled.comparison import (
    RANDOM,
    CallResult,
    buffer_difference,
    difference,
    gradient_difference,
    missing_effects,
    run_isolated,
)
from lockstep.parallel.compiled.deadline import Deadline, TookTooLong, reported
from lockstep.parallel.compiled.facts import torch_cache
from lockstep.parallel.compiled.side_effects import Unsuitable
from lockstep.parallel.compiled.targets import Target, compiling
from lockstep.parallel.cudagraph.checks import first_line

if TYPE_CHECKING:
    from lockstep.parallel.compiled.compiler import Compiler

FIRST_RANK = timedelta(seconds=120)  # the other ranks wait at most this long for the first one of every machine


class Compilation:
    """One try to compile a model on a real call, on all ranks: `run` is called for one target after another."""

    def __init__(self, compiler: Compiler, call: Callable[..., Any], arguments: Arguments):
        """Store the call.

        compiler: knows the model, the sizes of its batches, and how far results may differ from eager ones
        call: the eager call; with a target on the model it runs compiled code
        """
        self.compiler = compiler
        self.driver = compiler.driver
        self.call = call
        self.arguments = arguments

        # What the ranks have agreed on, not what this one has seen since: all ranks must compile alike.
        self.dynamic = compiler.shapes.varying

        # The result of `run`.
        self.target: Target | None = None  # the target on the model now; None: nothing worked so far
        self.note = "equal to eager"
        self.gave_up = False  # some rank reached the limit
        self._dropped: set[Path] = set()  # files of torch's cache that could not be loaded

    def run(self, name: str, limit_s: float) -> str | None:
        """Compile one target, and return what is wrong with it on some rank, or None. Collective.

        If it works, it stays on the model as `self.target`.

        limit_s: seconds after which compiling is given up
        """
        runtime = self.driver.runtime
        began = time.monotonic()

        # The first rank of each machine compiles before the others, which then find its code on disk. The others wait
        # for the first ranks of all machines. Their wait counts: if no time is left, they do not compile.
        first = runtime.world.local_rank == 0
        if not first:
            self._wait("compiled first", FIRST_RANK)

        # Buffers and generators are as before when this ends, whatever was tried. No gradients are exchanged here,
        # because the ranks compile at different times.
        runtime.heartbeat.beat("compile")
        with StateSnapshot(self.driver.model, self._generator()) as snapshot:
            left_s = limit_s - (time.monotonic() - began)
            problem = self._try(name, snapshot, left_s) if left_s > 0 else self._give_up(TookTooLong(limit_s))

        # Arrive without waiting: the other ranks may now look for this rank's code.
        if first:
            runtime.store_barrier("compiled first", timedelta(0))

        # All ranks must have compiled before any of them exchanges gradients again.
        seconds = self.compiler.config.hang.first
        if not self._wait("compiled", timedelta(seconds=seconds)):
            raise UserError(
                f"some ranks had not compiled the model after {seconds:.0f} s (hang.first={seconds:.0f})",
                "all ranks must have compiled it before their next gradient all-reduce",
                "set hang.first=3600, or compile=false",
            )

        # All ranks keep the target, or none of them does: compiled and eager ranks would differ in the last bits.
        problems = [problem for problem in runtime.collectives.all_gather_json(problem) if problem]
        self.gave_up = runtime.collectives.any(self.gave_up)
        if problems:
            self._remove_target()

        # The step goes on.
        runtime.heartbeat.beat("compute")
        return problems[0] if problems else None

    def _try(self, name: str, snapshot: StateSnapshot, limit_s: float) -> str | None:
        """Compile one target on this rank, compare it with eager, and return what is wrong with it, or None."""
        model = self.driver.model
        config = self.compiler.config
        blocks = find_blocks(model, config.blocks)
        function = self.compiler.function
        alone = self.driver.runtime.world.alone
        progress = partial(self.compiler.known.remember_unfinished, name)
        began = time.monotonic()

        # Whatever is raised here is a problem of this target, not of the run: the next target is tried, or none.
        try:
            with compiling(len(blocks)), reported(progress), Deadline(limit_s) as deadline:
                self.target = Target(name, model, blocks, function, bool(self.dynamic), alone, deadline.check)
                breaks = _graph_breaks()
                found = self._run_compiled(self.target, snapshot)
        except torch.OutOfMemoryError:
            return "out of memory"
        except TookTooLong as error:
            # A single graph may have taken far longer than the limit, and the next run should know how long.
            progress(time.monotonic() - began)
            return self._give_up(error)
        except Exception as error:
            if not self._drop_broken_library(error):
                return explain(error)

            # Once more, in the time that is left.
            self._remove_target()
            snapshot.restore()
            return self._try(name, snapshot, limit_s - (time.monotonic() - began))

        # Between two graphs torch compiles the inside of a block, and not its recomputation. A later call may run only
        # a part of that code, and its backward then finds other tensors than its forward has kept, and raises.
        if config.remat != "none" and _graph_breaks() > breaks:
            return f"remat={config.remat} needs one graph, and torch breaks it"

        # A model that only fits into memory when it is compiled cannot be compared. Where eager steps have run, a lack
        # of memory comes from compiled and eager gradients side by side, and then eager code is kept.
        try:
            return self._compare(found, snapshot)
        except torch.OutOfMemoryError:
            if self.compiler.only_if_it_pays:
                return "out of memory while it was compared with eager"

            self.note = "not compared with eager, which does not fit into memory"
            return None
        except Exception as error:
            return explain(error)

    def _drop_broken_library(self, error: Exception) -> bool:
        """Delete a file of torch's cache that could not be loaded, and return whether it was that, for the first time.

        A compiler that is killed leaves half a file behind, which torch would try to load in every later run.
        """
        cause = getattr(error, "inner_exception", error)
        cache = torch_cache()
        if cache is None or not isinstance(cause, ImportError) or not cause.path:
            return False

        # Nothing but what torch has compiled: the import of a module of the user's may fail as well.
        library = Path(cause.path)
        if not library.is_relative_to(cache) or library.suffix != ".so" or library in self._dropped:
            return False

        self._dropped.add(library)
        library.unlink(missing_ok=True)
        return True

    def _remove_target(self) -> None:
        if self.target is not None:
            self.target.remove()
            self.target = None

    def _give_up(self, error: TookTooLong) -> str:
        """Note that the time was over on this rank, and return it as the problem of this target."""
        self.gave_up = True
        return str(error)

    def _run_compiled(self, target: Target, snapshot: StateSnapshot) -> CallResult:
        """Run forward and backward, so that torch compiles them, and return the result."""
        # What torch compiles inside the model is reached by the eager call; a compiled loss is a function of its own.
        call = self.call
        dynamic: Dims = frozenset()
        if target.function is not None:
            call = target
            dynamic = self.dynamic

        found = self._run(call, self.arguments, snapshot, dynamic)

        # Sizes that vary may need a version of the code for each class of them. The examples are calls of the model.
        if self.dynamic and target.function is None:
            for arguments in self.compiler.shapes.examples:
                self._run(call, arguments, snapshot)

        # A second run must not compile again. It would if an attribute changed with every call, for example, because
        # torch compiles for its value.
        with torch.compiler.set_stance("fail_on_recompile"):
            self._run(call, self.arguments, snapshot)

        return found

    def _run(
        self, call: Callable[..., Any], arguments: Arguments, snapshot: StateSnapshot, dynamic: Dims = frozenset()
    ) -> CallResult:
        return run_isolated(call, arguments, [*self.driver.parameters.values()], snapshot, dynamic)

    def _compare(self, found: CallResult, snapshot: StateSnapshot) -> str | None:
        """Compare with the same call without compiled code."""
        with torch.compiler.set_stance("force_eager"):
            # The eager call starts from the same buffers and random numbers as the compiled one.
            snapshot.restore()
            generator = self._generator()
            before = generator.get_state()
            expected = self._run(self.call, self.arguments, snapshot)

            # Compiled code draws other random numbers than eager code. This second call draws others, too.
            draws_random = not torch.equal(before, generator.get_state())
            other = self._run(self.call, self.arguments, snapshot) if draws_random else None

        # What a call leaves on the model counts as much as what it returns.
        if lost := missing_effects(expected, found):
            return f"it does not change the same attributes and buffers as eager: {', '.join(lost)}"

        # Without random numbers every result and every gradient must agree. With them only the gradients as a whole
        # can be compared, by how much two eager calls differ.
        if other is None:
            distance = max(difference(expected, found), buffer_difference(expected, found))
            limit = self.compiler.tolerance
        else:
            distance = gradient_difference(expected, found)
            limit = self.compiler.tolerance + RANDOM * gradient_difference(expected, other)

        if distance <= limit:
            return None
        return (
            f"loss, gradients or buffers differ from eager by {distance:.2g} (relative; at most {limit:.2g} is allowed)"
        )

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


def _graph_breaks() -> int:
    """Return how often torch has broken a graph in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


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
