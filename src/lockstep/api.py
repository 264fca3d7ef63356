"""The ways in: `lockstep train TARGET`, `lockstep.fit(task, config)`, and `lockstep.start()` for your own loop."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import targets
from lockstep.config import Layer, Resolved, check, from_object, resolve, resolve_for
from lockstep.errors import Preempted, RanksFailed, UserError
from lockstep.launch import failure
from lockstep.launch.job import FROM_LAUNCHER, Count, Job, parse_nnodes, parse_nproc
from lockstep.launch.run_dir import choose_run_dir, latest, latest_step, lock, prepare, refuse_another_run, run_of
from lockstep.launch.supervisor import Ending, supervise
from lockstep.observe.report import write_report
from lockstep.observe.sinks import JsonlSink
from lockstep.runtime.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.engine.own_loop import OwnRun
    from lockstep.task import Task

Again = Callable[[Path], str]  # the folder of a run that has ended early -> what to type to go on in it

LAYERS = "LOCKSTEP_LAYERS"  # configuration from the command line, for a script that calls `lockstep.start`


@dataclass
class RunResult:
    """What a finished run leaves behind."""

    run_dir: Path
    summary: dict[str, Any]
    task: Task

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(str(self.run_dir / "model.safetensors"))

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, on the CPU."""
        from safetensors.torch import load_model

        model = self.task.model()
        load_model(model, str(self.run_dir / "model.safetensors"))
        return model


@dataclass(frozen=True)
class Processes:
    """How many, where: as typed."""

    nproc: str | int | None = None
    nnodes: str | None = None
    join: str | None = None

    @property
    def launched(self) -> bool:
        """Whether somebody watches over the ranks, and starts them again. Otherwise this process trains by itself."""
        return self.nproc is not None or self.nnodes is not None


def train(target: str, layers: list[Layer], asked: Processes, again: Again) -> int:
    """`lockstep train`: start the workers, or be the only one. `again`: what to type to go on. Returns an exit code."""
    targets.check(target)
    check(layers)  # misspelt keys are reported before torch is imported
    nproc, nnodes = parse_nproc(asked.nproc), parse_nnodes(asked.nnodes)
    if asked.launched and World.launched():
        raise UserError(
            f"--nproc {asked.nproc}" if asked.nproc is not None else f"--nnodes {asked.nnodes}",
            "RANK and WORLD_SIZE in the environment: some launcher has already made this process a rank",
            "leave --nproc out under torchrun; or unset RANK and WORLD_SIZE",
        )
    if not asked.launched:
        with _told(again):
            run_target(target, layers)
        return 0
    run_dir = _run_dir(_last(layers, "run_dir"), _last(layers, "resume") or "never", targets.name_of(target), layers)
    spec = {"target": target, "layers": layers, "again": again(run_dir)}
    return _launch(spec, run_dir, nproc, nnodes, asked.join).code


@contextmanager
def _told(again: Again | None) -> Iterator[None]:
    """Whoever is asked to leave learns how to go on; a launcher says it otherwise."""
    try:
        yield
    except Preempted as left:
        if left.checkpoint and again and World.from_env().rank == 0:
            print(f"lockstep: to go on: {again(run_of(Path(left.checkpoint)))}", file=sys.stderr)
        raise


def _last(layers: list[Layer], key: str) -> Any:
    given = [values[key] for _, values in layers if values.get(key)]
    return given[-1] if given else None


def _run_dir(asked: str | None, resume: str, name: str, layers: list[Layer]) -> Path:
    """The run's folder; if the launcher has chosen it, a layer that tells the ranks is added."""
    run_dir = choose_run_dir(asked, resume, name)
    if not asked:
        layers.append((FROM_LAUNCHER, {"run_dir": str(run_dir)}))
    return run_dir


def _check_one_place(layers: list[Layer]) -> None:
    """The launcher has chosen the folder before it could know what the code says about it."""
    if not any(source == FROM_LAUNCHER for source, _ in layers):
        return
    for key in ("run_dir", "resume"):
        said = [values[key] for source, values in layers if source in ("argument", "task default") and values.get(key)]
        if said:
            typed = f"--resume {said[0]}" if key == "resume" else f"run_dir={said[0]}"
            raise UserError(
                f"{key}={said[0]} in the code", "a launcher that did not know of it", f"type it too: {typed}"
            )


def typed_again(command: Sequence[str], arguments: Sequence[str], resume: Sequence[str]) -> Again:
    """The words that were typed, with the folder, and with `resume`, those that mean to go on in it."""

    def again(run_dir: Path) -> str:
        words = list(arguments)
        while resume[0] in words:
            place = words.index(resume[0])
            del words[place : place + len(resume)]
        place = [] if any(word.startswith("run_dir=") for word in words) else [f"run_dir={run_dir}"]
        return shlex.join([*command, *words, *place, *resume])

    return again


def run_target(target: str, layers: list[Layer]) -> None:
    """In this process: a task's run, or a script's own loop."""
    if targets.is_script(target):
        import runpy

        os.environ[LAYERS] = json.dumps(layers)
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
        return
    kind = targets.load_class(target)
    _check_one_place([("task default", kind.defaults), *layers])
    resolved = targets.settled(kind, resolve_for(kind.defaults, kind.presets, layers))
    _fit_here(targets.make_task(kind, resolved.config.task), resolved, targets.name_of(target))


def fit(
    task: Task | type[Task],
    config: Any = None,
    *,
    nproc: str | int | None = None,
    again: Again | None = None,
    **values: Any,
) -> RunResult:
    """Train `task`. `config` is a mapping, a RunConfig or a file; `values` override it (`fit(task, steps=100)`).

    Of a class an object is made, with the options in the configuration (`fit(MyTask, preset="tiny")`).

    With `nproc` above 1 (or "auto") it starts its own workers and returns when they are done; inside a worker
    (ours or torchrun's) it trains right here. A script with options of its own says in `again` what to type to go on
    in a run's folder.
    """
    layers: list[Layer] = [("argument", from_object(config)), ("argument", from_object(values))]
    count = Count(1, 1) if World.launched() else parse_nproc(nproc)
    resolved = resolve_for(task.defaults, task.presets, layers)
    if isinstance(task, type):
        resolved = targets.settled(task, resolved)
        task = targets.make_task(task, resolved.config.task)
    else:
        resolved = _without_options(task, resolved, layers)
    name = type(task).__name__.lower()
    if nproc is None or World.launched():
        with _told(again):
            return _fit_here(task, resolved, name)
    run_dir = _run_dir(resolved.config.run_dir, resolved.config.resume, name, layers)
    refuse_another_run(run_dir, resolved.config.resume)  # before any process is started
    to_go_on = again(run_dir) if again else f'run_dir="{run_dir}", resume="auto"'
    with _shipped(task, resolved.config.task) as path:
        ending = _launch({"task": path, "layers": layers, "again": to_go_on}, run_dir, count)
    if culprit := ending.failure:
        raise RanksFailed(
            f"lockstep.fit on {count} processes",
            f"rank {culprit.rank} failed first: {culprit.kind}: {culprit.message}",
            f"mend that; {run_dir / 'logs'} holds everything the ranks said",
        )
    if ending.code:
        step, path = latest_step(run_dir / "checkpoints"), latest(run_dir / "checkpoints")
        signal = "SIGINT" if ending.code == Preempted.INTERRUPTED else "SIGTERM"
        raise Preempted(step or 0, signal, str(path) if path else None)
    return RunResult(run_dir, json.loads((run_dir / "summary.json").read_text()), task)


@contextmanager
def start(config: Any = None, **values: Any) -> Iterator[OwnRun]:
    """Your own loop: see `engine/own_loop.py`. Start it with `lockstep train SCRIPT.py --nproc N` or torchrun."""
    from lockstep.engine import setup
    from lockstep.engine.diagnose import explained
    from lockstep.engine.own_loop import OwnRun
    from lockstep.runtime import context

    layers: list[Layer] = [("argument", from_object(config)), ("argument", from_object(values))]
    layers += [(source, value) for source, value in json.loads(os.environ.get(LAYERS, "[]"))]
    _check_one_place(layers)
    resolved = resolve(layers)
    if meant := [key for key in ("preset", "task") if getattr(resolved.config, key)]:
        raise UserError(
            f"{meant[0]} in a loop of your own",
            "no task that could have presets or options",
            f"leave {meant[0]} out; your script's own arguments are its options",
        )
    script = Path(sys.argv[0]).stem or "run"
    with context.start(World.from_env(), resolved.config) as runtime:
        builder = setup.open_run(resolved, runtime, script)
        own = OwnRun(builder)
        try:
            with explained(builder):
                try:
                    yield own
                except SystemExit as left:
                    if not left.code:
                        own.close()  # the script ends here, and well
                    raise
                own.close()
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code:
                failure.stamp(error)
                builder.fail(error)
            raise


def fit_shipped(path: str, layers: list[Layer]) -> None:
    """In a worker of `fit`: the task that its parent sent."""
    import cloudpickle

    with open(path, "rb") as file:
        task, options = cloudpickle.load(file)
    resolved = resolve_for(task.defaults, task.presets, layers)
    resolved = targets.settled(type(task), resolved) if options else resolved.without_options()
    _fit_here(task, resolved, type(task).__name__.lower())


def _without_options(task: Task, resolved: Resolved, layers: list[Layer]) -> Resolved:
    """An object has its options already. Those that somebody asks for here would not be used, and those of a default
    preset must not be recorded as if they were."""
    preset_asked = any(values.get("preset") for _, values in layers)
    for option, value in resolved.config.task.items():
        source = resolved.sources.get(f"task.{option}", "argument")
        if not source.startswith(("preset", "task default")) or (source.startswith("preset") and preset_asked):
            name = type(task).__name__
            raise UserError(
                f"task.{option} = {value} ({source})",
                f"a {name} object, whose options were given when it was made",
                f"pass the class, lockstep.fit({name}, ...), which makes an object with these options",
            )
    return resolved.without_options()


def _fit_here(task: Task, resolved: Any, name: str) -> RunResult:
    from lockstep.engine import loop, setup
    from lockstep.engine.diagnose import explained
    from lockstep.runtime import context

    with context.start(World.from_env(), resolved.config) as runtime:
        builder = setup.open_run(resolved, runtime, name, task.unit)
        try:
            with explained(builder):
                summary = loop.fit(task, builder)
        except BaseException as error:
            failure.stamp(error)
            builder.fail(error)
            raise
    return RunResult(builder.folder.path, summary, task)


@contextmanager
def _shipped(task: Task, options: dict[str, Any]) -> Iterator[str]:
    """The task, and the options it was made with here, in a private file. By value, so that classes of a script or
    notebook travel too."""
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="lockstep-task-") as folder:
        path = Path(folder) / "task"
        path.write_bytes(cloudpickle.dumps((task, options)))
        yield str(path)


def _launch(
    spec: dict[str, Any], run_dir: Path, nproc: Count, nnodes: Count = Count(1, 1), join: str | None = None
) -> Ending:
    prepare(run_dir)
    (run_dir / "resize").unlink(missing_ok=True)  # a wish of an earlier day
    held = lock(run_dir)  # or somebody trains there: a second launcher must not write into its record
    if held is not None:
        held.close()
    plain = json.loads(json.dumps({**spec, "path": sys.path}, default=str))
    ending = supervise(Job(plain, run_dir, nproc, nnodes, join))
    culprit = ending.failure
    if culprit is None:
        return ending
    # Rank 0 may only have seen that somebody else was gone: the record gets the cause.
    with JsonlSink(run_dir / "events.jsonl") as events:
        cause = f"rank {culprit.rank}: {culprit.message}"
        events.write({"time": culprit.time, "event": "error", "type": culprit.kind, "message": cause})
    with contextlib.suppress(OSError):  # a full disk: everything else has been said
        write_report(run_dir)
    return ending
