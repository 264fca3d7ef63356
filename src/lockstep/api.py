"""Three ways to train: `lockstep train TARGET`, `lockstep.fit(task, config)`, and `lockstep.start()` for your own loop.

Each either trains in this process or hands a job to the launcher, whose ranks come back in through `work`. Torch is
imported only by a process that trains.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lockstep import targets
from lockstep.config import (
    Layer,
    Resolved,
    check,
    flatten,
    from_object,
    resolve,
    resolve_for,
    strongest_value,
    words_not_read,
)
from lockstep.config.settings import typed as typed_value
from lockstep.config.settings import under_new_names
from lockstep.engine.checks.names import check_names
from lockstep.errors import ExitCode, Preempted, RanksFailed, UserError, printable, shell_word
from lockstep.launch import frames
from lockstep.launch.job import PROGRAM, RESUME_COMMAND, Bounds, Job, as_json, parse_nnodes, parse_nproc
from lockstep.launch.ranks import rank_record
from lockstep.launch.supervisor import Outcome, supervise
from lockstep.launch.terminal import shares_log
from lockstep.launch.wire.messages import JobEnd
from lockstep.observe.history import read_history
from lockstep.observe.notebook import kernel
from lockstep.observe.notebook.follower import following
from lockstep.observe.notebook.result import result_html, result_text
from lockstep.observe.report import write_report
from lockstep.run_folder.checkpoint_facts import newest_checkpoint
from lockstep.run_folder.checkpoint_names import step_in
from lockstep.run_folder.events import append_event, belongs_to_earlier_run, end_of_earlier_run
from lockstep.run_folder.names import CHECKPOINTS, CONFIG, PLAN, SOURCES, SUMMARY, WEIGHTS
from lockstep.run_folder.paths import run_of
from lockstep.run_folder.resize import ask_for_size
from lockstep.run_folder.run_dir import choose_run_dir, refuse_another_run, stored
from lockstep.run_folder.start_from import choose_start
from lockstep.runtime import attempt_folder, environments
from lockstep.runtime.environments import current_world
from lockstep.runtime.host.threads import wait_asleep
from lockstep.runtime.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.engine.own_loop import OwnRun
    from lockstep.engine.setup import RunBuilder
    from lockstep.task import Task

# As `sys.excepthook`.
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]

# Takes the folder of a run that ended early and returns what to type to resume it.
ResumeCommand = Callable[[Path], str]

# The environment variable that carries the settings of the command line to a script that calls `lockstep.start`.
LAYERS = "LOCKSTEP_LAYERS"

# The source of settings that come from the run that is resumed begins with this.
STORED = "run "


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run."""

    path: Path  # of its folder
    step: int
    metric: str  # the setting `checkpoint.best`
    value: float


@dataclass(repr=False)
class RunResult:
    """What a finished run leaves behind. Printed, or as the last line of a notebook's cell, it shows its curve.

    It holds paths and numbers, no tensors: weights and history are read from the run folder when they are asked for, so
    a result can be kept for as long as its folder.
    """

    run_dir: Path
    summary: dict[str, Any]
    task: Task

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The log of the run: a record per log line or evaluation, by step.

        A record of a log line has "step", "loss", "lr", "metrics" and more. Its "eval" is None, or the evaluation after
        that step: its "loss" and its metrics. An evaluation between two log lines has "step" and "eval" only.
        """
        return read_history(self.run_dir)

    @property
    def best(self) -> Best | None:
        """The best checkpoint by `checkpoint.best`; None without that setting."""
        best = self.summary.get("best")
        if best is None:
            return None

        path = self.run_dir / CHECKPOINTS / Path(best["checkpoint"]).name
        return Best(path, best["step"], best["metric"], best["value"])

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The trained weights by name, on the CPU."""
        from safetensors.torch import load_file

        return load_file(str(self.run_dir / WEIGHTS))

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, on the CPU."""
        from safetensors.torch import load_model

        from lockstep.checkpoint.state.tensor_names import frozen_names

        model = self.task.model()
        missing, extra = load_model(model, str(self.run_dir / WEIGHTS), strict=False)

        # With checkpoint.frozen=false the frozen weights are only in the task's model.
        wrong = sorted([*extra, *set(missing) - frozen_names(model)])
        if wrong:
            raise UserError(
                f"the weights in {self.run_dir} do not fit the model that the task builds",
                f"{wrong[0]!r} is on one side only",
                "build the model that was trained",
            )

        return model

    def __repr__(self) -> str:
        return result_text(self.run_dir, self.summary)

    def _repr_html_(self) -> str:
        return result_html(self.run_dir, self.summary)


# ---- lockstep train TARGET ----


def train(
    target: str,
    layers: list[Layer],
    resume_command: ResumeCommand,
    nproc: str | int | None = None,
    nnodes: str | None = None,
    join: str | None = None,
    arguments: Sequence[str] = (),
) -> int:
    """Run `lockstep train`: in this process, or in processes of a launcher. Returns an exit code.

    `nproc`, `nnodes` and `join` are as typed on the command line; `arguments` are passed on to a script.
    """
    # Settings that were typed for the run that is resumed still hold, unless they are typed again.
    layers = [*stored_layer(strongest_value(layers, "resume"), layers), *layers]

    # Misspelt targets and keys are reported before torch is imported, which takes seconds. Layers are checked again,
    # because options such as --resume were added after `read_layers`.
    targets.check(target)
    check(layers)
    check_names(layers)
    parse_nproc(nproc)
    parse_nnodes(nnodes)

    # Without a launcher this process trains, alone or as a rank of torchrun. `--nproc 1` does ask for a launcher, which
    # restarts that one rank. A platform that runs this command on several machines says where they meet.
    shape = environments.place(nproc, nnodes, join)
    if shape.here:
        wait_asleep()
        _replace_excepthook(_show_folded)
        with _resume_hint(resume_command):
            run_target(target, layers, arguments)

        return 0

    # Cloud platforms set these variables for each machine; with --nnodes they are not ambiguous.
    of_machine = nnodes is not None and "LOCAL_RANK" not in os.environ
    if not of_machine and environments.launched():
        option = "--nnodes" if nproc is None else "--nproc"
        raise UserError(
            f"{option} cannot be used here: another launcher has already made this process a rank",
            "WORLD_SIZE, RANK and LOCAL_RANK in the environment",
            f"leave {option} out under torchrun; or unset WORLD_SIZE, RANK and LOCAL_RANK",
        )

    # The folder is chosen before the task is imported, so only what was typed counts. On several machines it is not
    # made yet: the coordinator's choice applies.
    asked, resume = strongest_value(layers, "run_dir"), strongest_value(layers, "resume") or "never"
    run_dir = choose_run_dir(asked, resume, targets.name_of(target), make=shape.join is None)
    if shape.source:
        print(printable(f"lockstep: {shape.source}"), file=sys.stderr)

    program = {} if shape.join is None else {PROGRAM: targets.program_of(target)}
    job = Job(
        {"target": target, "layers": layers, "arguments": list(arguments), **program},
        run_dir,
        parse_nproc(shape.nproc),
        parse_nnodes(shape.nnodes),
        shape.join,
        node=shape.node,
        run_dir_was_chosen=not asked,
        goes_back_to=choose_start(resume, run_dir).goes_back_to,
        resume_command=os.environ.get(RESUME_COMMAND) or resume_command(run_dir),
    )
    ending, ended_here = _launch(job)
    if ending.code and (ended_here or not shares_log()):
        print(printable(f"lockstep: {_describe_exit(ending)}"), file=sys.stderr)

    return ending.code


def _describe_exit(ending: JobEnd) -> str:
    """`exit code 1 (never restart): rank 1: SIGKILL: killed from outside`, for the log of a platform."""
    code = ExitCode(ending.code)
    why = "it was preempted by a signal" if code == ExitCode.RESTART else code.meaning
    failure = ending.failure

    # A mistake of the user was shown in the lines above, with what to do.
    if failure and not (code == ExitCode.REFUSED and failure.for_user):
        rank = f"rank {failure.rank}: " if failure.rank is not None else ""
        why = f"{rank}{failure.kind}: {failure.message}".partition("\n")[0]

    return f"exit code {ending.code} ({code.advice}): {why}"


def run_target(target: str, layers: list[Layer], arguments: Sequence[str] = ()) -> None:
    """Train a target in this process: a task, or a script with its own loop and its own command-line arguments."""
    if targets.is_script(target):
        import runpy

        # As with `python script.py`, the script's own folder comes first on the path.
        os.environ[LAYERS] = json.dumps(layers)
        targets.put_on_path(Path(target))
        sys.argv = [target, *arguments]
        try:
            runpy.run_path(target, run_name="__main__")
        except SystemExit as ending:
            if refusal := _argparse_error(ending):
                raise UserError(
                    f"the script {target} does not take the arguments that it got",
                    f"{shlex.join(arguments) or 'no arguments'}: {refusal}",
                    f"give the script's own arguments after --, as in: {shell_word(target)} -- --name value; "
                    f"python {shell_word(target)} --help lists them",
                ) from None
            raise

        return

    task_class = targets.load_class(target)
    _check_launcher_folder([("task default", task_class.defaults), *layers])
    resolved = resolve_for(task_class.defaults, task_class.presets, layers)

    # The task is made last: its constructor may take a while, and a misspelt key is reported before that.
    _fit_here(targets.make_task(task_class, resolved.config.task), resolved, targets.name_of(target))


def _argparse_error(ending: SystemExit) -> str:
    """Return what argparse has refused, if it ended the script; else ""."""
    for frame, _ in traceback.walk_tb(ending.__traceback__):
        if frame.f_code is argparse.ArgumentParser.error.__code__:
            return str(frame.f_locals["message"])

    return ""


def stored_layer(resume: str | None, typed: list[Layer], leave_out: tuple[str, ...] = ()) -> list[Layer]:
    """Return, as a layer, what was typed for the run at `resume`; nothing if no run is named.

    Keys that begin with one of `leave_out` are not taken over.
    """
    if resume in (None, "auto", "never"):
        return []

    run = run_of(Path(resume))
    sources = under_new_names(stored(run, SOURCES))

    # Settings in the code are read from the code as it is now. `run_dir` and `resume` must be typed again.
    was_typed = ("command line", "file ", STORED)
    values = {
        key: value
        for key, value in under_new_names(flatten(stored(run, CONFIG))).items()
        if str(sources.get(key)).startswith(was_typed) and not key.startswith(("run_dir", "resume", *leave_out))
    }
    if not values:
        return []

    # Print what is taken over. Settings that are typed again are compared with the checkpoint by the line `resumed`.
    typed_again = {key for _, given in typed for key in flatten(given)}
    taken = " ".join(f"{key}={typed_value(value)}" for key, value in values.items() if key not in typed_again)
    if taken and _speaks_for_all():
        print(printable(f"lockstep: taken over from {run}: {taken}"), file=sys.stderr)

    return [(f"{STORED}{run}", values)]


def resize(run: Path, count: int) -> None:
    """Ask the launcher of `run` for `count` processes, or refuse a number that its mesh or its batch does not allow."""
    settings, plan = stored(run, CONFIG), stored(run, PLAN)
    samples = plan.get("samples")

    # A size that the run's settings do not allow is refused here, before the launcher is asked.
    if settings and plan and isinstance(samples, int | None) and count > 0:
        from lockstep.parallel.mesh import plan_mesh
        from lockstep.plan.plan import make_plan

        config = resolve([(f"{STORED}{run}", under_new_names(flatten(settings)))]).config
        mesh = plan_mesh(config, World(size=count))
        make_plan(config, mesh.data_size, samples)

    ask_for_size(run, count)


# ---- lockstep.fit(task, config) ----


def fit(
    task: Task | type[Task],
    config: Any = None,
    *,
    nproc: str | int | None = None,
    callbacks: Sequence[Any] = (),
    resume_command: ResumeCommand | None = None,
    **values: Any,
) -> RunResult:
    """Train `task`. `config` is a mapping, a RunConfig or a file; `values` override it (`fit(task, steps=100)`).

    A class is constructed with the options in the configuration (`fit(MyTask, preset="tiny")`).

    With `nproc` (a number or "auto") it starts its own ranks and returns when they are done; inside a rank (ours or
    torchrun's) it trains in this process. `callbacks` are called after those of the task: see `lockstep.callbacks`.
    A script with its own command line passes `resume_command`, a function of the run folder that returns what to type
    to resume that run.
    """
    _shorten_user_errors()
    targets.check_is_task(task)
    layers: list[Layer] = [("argument", from_object(config)), ("argument", from_object(values))]

    # A script that calls fit(nproc=4) may itself be started by torchrun or srun: then its ranks exist already.
    is_rank = nproc is None or environments.launched() or not current_world().alone
    count = Bounds(1, 1) if is_rank else parse_nproc(nproc)
    resolved = resolve_for(task.defaults, task.presets, layers)
    check_names([("task default", task.defaults), *layers])
    if isinstance(task, type):
        task = targets.make_task(task, resolved.config.task)
    else:
        resolved = _without_options(task, resolved, layers)

    # For the run folder: the class's name, after that of the notebook if it is known.
    name = "-".join(filter(None, [kernel.notebook_name(), type(task).__name__.lower()]))
    if is_rank:
        with _resume_hint(resume_command or _advice_unless_launched("fit")):
            return _fit_here(task, resolved, name, callbacks)

    asked, resume = resolved.config.run_dir, resolved.config.resume
    run_dir = choose_run_dir(asked, resume, name)
    refuse_another_run(run_dir, resume)  # before any process is started

    # Rank 0 has no notebook: this process shows its records.
    in_notebook = resolved.config.log.progress in ("auto", "live") and kernel.shell() is not None
    if in_notebook:
        layers = [*layers, ("notebook", {"log": {"progress": "off"}})]

    # Ranks are separate processes: they get the task in a file and leave their results in the run folder.
    pickled = _pickled(task, resolved.config.task, callbacks)
    with pickled as path, following(run_dir) if in_notebook else nullcontext():
        job = Job(
            {"task": path, "name": name, "layers": layers},
            run_dir,
            count,
            run_dir_was_chosen=not asked,
            goes_back_to=choose_start(resume, run_dir).goes_back_to,
            resume_command=(resume_command or _advice_for("fit"))(run_dir),
        )
        _raise_unless_done(_launch(job).ending, run_dir, count, Path(path).parent)

    return RunResult(run_dir, json.loads((run_dir / SUMMARY).read_text()), task)


def _without_options(task: Task, resolved: Resolved, layers: list[Layer]) -> Resolved:
    """Return the configuration of a task object, without the options that were fixed when it was made.

    Options that `layers` set could not be applied any more, so they are refused. Options of a default preset are
    dropped, so that they are not recorded as if they had been used.
    """
    preset_asked = any(values.get("preset") for _, values in layers)
    name = type(task).__name__
    for option, value in resolved.config.task.items():
        source = resolved.sources.get(f"task.{option}", "argument")
        is_default = source == "task default" or (source.startswith("preset") and not preset_asked)
        if not is_default:
            raise UserError(
                f"task.{option} = {value} ({source}) cannot be applied to a {name} object",
                "an object, whose options were set when it was made",
                f"pass the class, lockstep.fit({name}, ...), which makes an object with these options",
            )

    return resolved.without_options()


@contextmanager
def _pickled(task: Task, options: dict[str, Any], callbacks: Sequence[Any]) -> Iterator[str]:
    """Write the task, the options it was made with, and the callbacks to a private file for the ranks.

    cloudpickle stores classes of a script or notebook by value: the ranks could not import them.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="lockstep-task-") as folder:
        path = Path(folder) / "task"
        path.write_bytes(cloudpickle.dumps((task, options, list(callbacks))))
        yield str(path)


def _raise_unless_done(ending: JobEnd, run_dir: Path, count: Bounds, errors: Path) -> None:
    """If the ranks of `fit` ended early, raise what a run in this process would have raised.

    That is the exception of the rank that failed first, which it has left in the folder `errors`.
    """
    if failure := ending.failure:
        who = f"rank {failure.rank} failed first"
        if failure.rank is None:
            who = "they could not be started" if failure.traits.dismisses_node else "their launcher gave up"

        error = rank_record.load_exception(errors, failure)
        if error is not None:
            where = f"raised on rank {failure.rank} of {count}; {run_dir / 'logs'} holds the output of all ranks"
            trace = [] if failure.for_user else frames.fold(failure.traceback)
            error.add_note("\n".join([where, *trace]))
            error.__dict__["lockstep_rank"] = failure.rank  # its launcher has shown it
            raise error

        raise RanksFailed(
            f"lockstep.fit on {count} processes: {who}",
            f"{failure.kind}: {failure.message}",
            f"fix that; {run_dir / 'logs'} holds the output of all ranks",
        )

    if ending.code:
        # The signal follows from the exit code alone, and the step that the run has reached from its checkpoints.
        signal = "SIGINT" if ending.code == ExitCode.INTERRUPTED else "SIGTERM"
        checkpoint = newest_checkpoint(run_dir / CHECKPOINTS)
        step = step_in(checkpoint.name) if checkpoint else None
        raise Preempted(step or 0, signal, str(checkpoint) if checkpoint else None)


# ---- lockstep.start() ----


@contextmanager
def start(config: Any = None, **values: Any) -> Iterator[OwnRun]:
    """Set up a run for your own loop: see `engine/own_loop.py`.

    Start the script with `lockstep train SCRIPT.py --nproc N` or torchrun.
    """
    from lockstep.engine.own_loop import OwnRun

    _shorten_user_errors()
    layers: list[Layer] = [("argument", from_object(config)), ("argument", from_object(values))]
    # What was typed on the command line wins over the script's own arguments.
    layers += [(source, value) for source, value in json.loads(os.environ.get(LAYERS, "[]"))]
    _check_launcher_folder(layers)
    resolved = resolve(layers)
    check_names(layers)

    for key in ("preset", "task"):
        if getattr(resolved.config, key):
            raise UserError(
                f"{key} has no meaning in a script with its own loop, which has no task",
                "",
                f"leave {key} out; your script's own arguments are its options",
            )

    name = kernel.notebook_name() or Path(sys.argv[0]).stem or "run"
    with _resume_hint(_advice_unless_launched("start")), running(resolved, name) as builder:
        if LAYERS not in os.environ:
            _warn_of_words(builder)

        own = OwnRun(builder)
        regular_exit = None
        try:
            yield own
        except SystemExit as error:
            if error.code:
                raise

            regular_exit = error  # sys.exit() inside the loop is a regular end, if all ranks do it

        own.close(f"sys.exit() at {rank_record.raising_line(regular_exit)}" if regular_exit else "")

    if regular_exit is not None:
        raise regular_exit


def _warn_of_words(builder: RunBuilder) -> None:
    """Warn of settings on the command line of a script that `lockstep train` did not start."""
    if words := words_not_read(sys.argv[1:], builder.config):
        typed = shlex.join(words)
        nproc = "" if builder.runtime.world.alone else f" --nproc {builder.runtime.world.size}"
        command = f"lockstep train {shlex.join([sys.argv[0], *words])}{nproc}"
        builder.recorder.event("warning", reason=f"{typed}: only `lockstep train` reads settings: {command}")


def _shorten_user_errors() -> None:
    """Let a script that ends with a UserError show it as `lockstep train` does: its text, without a traceback.

    The text says what to do; frames of Lockstep would only hide it. The line of the script comes first.
    """
    _replace_excepthook(_show_uncaught)


def _replace_excepthook(hook: ExceptHook) -> None:
    # Notebooks, debuggers and the user's own code may show exceptions in another way.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = hook


def _show_folded(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error of the user's code as the launcher does: without the frames of Lockstep and of libraries."""
    text = "".join(traceback.format_exception(kind, error, trace))
    lines = frames.fold(text, recorded=hasattr(error, "lockstep_recorded"))
    print(printable("\n".join(lines)), file=sys.stderr)


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        return

    lines = [f"{rank_record.raising_line(error)}: {error}", *getattr(error, "__notes__", [])]
    print(printable("\n".join(lines)), file=sys.stderr)


# ---- a rank of our launcher ----

# The source of the run folder, if the launcher has chosen it.
FROM_LAUNCHER = "launcher"


def work(spec: dict[str, Any]) -> None:
    """Do the work of one rank: `spec` is what `train` or `fit` gave to the launcher (`Job.spec_for_ranks`)."""
    # A rank is forked from a process that was started elsewhere: it needs the paths of the launcher.
    sys.path += [folder for folder in spec["path"] if folder not in sys.path]
    layers = [(source, values) for source, values in spec["layers"]]
    if "run_dir" in spec:
        layers.append((FROM_LAUNCHER, {"run_dir": spec["run_dir"]}))

    if "target" in spec:
        sys.argv = [spec["target"]]
        run_target(spec["target"], layers, spec.get("arguments", ()))
        return

    import cloudpickle

    task, options, callbacks = cloudpickle.loads(Path(spec["task"]).read_bytes())
    resolved = resolve_for(task.defaults, task.presets, layers)
    # An object that was made by the user has no options in its configuration, see `_without_options`.
    if not options:
        resolved = resolved.without_options()

    try:
        _fit_here(task, resolved, spec["name"], callbacks)
    except Exception as error:
        rank_record.leave_exception(Path(spec["task"]).parent, current_world().rank, error)
        raise


# ---- training in this process ----


def _fit_here(task: Task, resolved: Resolved, name: str, callbacks: Sequence[Any] = ()) -> RunResult:
    from lockstep.engine import loop

    with running(resolved, name, task.unit) as builder:
        builder.callbacks += callbacks
        summary = loop.fit(task, builder)

    return RunResult(builder.folder.path, summary, task)


@contextmanager
def running(resolved: Resolved, name: str, unit: str = "sample") -> Iterator[RunBuilder]:
    """Open a run in this process; if its body fails, record that in the run folder and raise it with an explanation."""
    from lockstep.engine import setup
    from lockstep.engine.diagnose import explained
    from lockstep.runtime import context

    world = current_world()
    with (
        rank_record.recording_early(world.rank) as record,
        context.start(world, resolved.config, on_error=record) as runtime,
    ):
        builder = setup.open_run(resolved, runtime, name, unit)
        try:
            with explained(builder):
                yield builder
        except BaseException as error:
            # This comes first: the launcher looks for the rank that failed first, and the clean-up may hang.
            record(error)
            builder.fail(error)
            raise


# ---- the launcher, and the folder that all ranks must share ----


def _launch(job: Job) -> Outcome:
    """Run a job on the ranks of a launcher until they end; record why, if they fail."""
    earlier_end = end_of_earlier_run(job.run_dir)
    outcome = supervise(replace(job, spec=as_json({**job.spec, "path": sys.path})))

    # All launchers of a job have the same folder: one of them writes there.
    failure = outcome.ending.failure
    if failure is None or not outcome.ended_here:
        return outcome

    # A request that was refused is no end of the run that the folder holds.
    if failure.for_user and belongs_to_earlier_run(job.run_dir, earlier_end):
        return outcome

    # Rank 0 may only have recorded a lost peer; the launcher has found which rank failed first.
    message = failure.message if failure.rank is None else f"rank {failure.rank}: {failure.message}"
    append_event(job.run_dir, {"time": failure.time, "event": "error", "type": failure.kind, "message": message})

    with suppress(OSError):  # on a full disk the report is the least of the problems
        write_report(job.run_dir)

    return outcome


def _check_launcher_folder(layers: list[Layer]) -> None:
    """Refuse a folder that is set in the code: the launcher has already chosen one, without running that code."""
    if not any(source == FROM_LAUNCHER for source, _ in layers):
        return

    # The launcher has read `--resume` and `run_dir=` from the command line itself.
    in_code = [values for source, values in layers if source in ("argument", "task default")]
    for key, option in (("run_dir", "run_dir="), ("resume", "--resume ")):
        value = next((values[key] for values in in_code if values.get(key)), None)
        if value:
            raise UserError(
                f"{key}={value} is set in the code, which the launcher has not read",
                "the launcher has already chosen the run folder",
                f"give it on the command line as well: {option}{value}",
            )


def _speaks_for_all() -> bool:
    """Return whether this process prints what would be the same on every rank."""
    try:
        return current_world().rank == 0
    except UserError:
        return True  # the launcher of one of several machines


# ---- what to type to resume ----


def make_resume_command(command: Sequence[str], arguments: Sequence[str], resume: Sequence[str]) -> ResumeCommand:
    """Return a function that takes a run folder and returns the typed command, with that folder and `resume` added."""

    def command_for(run_dir: Path) -> str:
        # What follows -- belongs to the script.
        end = arguments.index("--") if "--" in arguments else len(arguments)
        words = list(arguments[:end])
        # An older --resume, with its value, gives way to the new one.
        while resume[0] in words:
            start_of_old = words.index(resume[0])
            del words[start_of_old : start_of_old + len(resume)]

        if not any(word.startswith("run_dir=") for word in words):
            words.append(f"run_dir={run_dir}")

        return shlex.join([*command, *words, *resume, *arguments[end:]])

    return command_for


def _advice_for(call: str) -> ResumeCommand:
    """Return a function that returns the call, `fit` or `start`, with which a script resumes a run."""
    return lambda run_dir: f'lockstep.{call}(..., run_dir="{run_dir}", resume="auto")'


def _advice_unless_launched(call: str) -> ResumeCommand | None:
    """Return the advice for a script, or None if `lockstep train` or our launcher says what to type."""
    launched = LAYERS in os.environ or attempt_folder.current() is not None
    return None if launched else _advice_for(call)


@contextmanager
def _resume_hint(resume_command: ResumeCommand | None) -> Iterator[None]:
    """Print how to resume if the body is preempted. (With a launcher, the launcher prints it.)"""
    try:
        yield
    except Preempted as error:
        if error.save_failed and resume_command and _speaks_for_all():
            problem = f"the save of step {error.step} failed: what was trained since the newest checkpoint is lost"
            print(f"lockstep: {problem}", file=sys.stderr)

        # A checkpoint in a storage elsewhere has no folder that could be named here.
        with suppress(UserError):
            if error.checkpoint and resume_command and _speaks_for_all():
                print(f"lockstep: to resume: {resume_command(run_of(Path(error.checkpoint)))}", file=sys.stderr)

        raise
