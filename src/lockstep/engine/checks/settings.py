"""Settings that the user cannot mean, given the task, its data and the ranks.

What can be seen from the settings alone is refused earlier, in config/conflicts.py.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from lockstep.config import RunConfig, flatten
from lockstep.data.streams.strided import StridedStreamSource
from lockstep.engine.hooks.calls import Hook
from lockstep.errors import UserError, plural
from lockstep.parallel.driver import RankRole
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.task import BatchSource


def check_same_config(config: RunConfig, runtime: Runtime) -> None:
    """Check that all ranks have the same settings. Otherwise they would train different models, or deadlock."""
    # The default run_dir contains a time, which differs between ranks. Rank 0 chooses it for all of them.
    values = {key: repr(value) for key, value in flatten(config).items() if key != "run_dir"}
    sources = {} if runtime.world.alone else digests_of_sources()

    # One message for both, at the very start of a run.
    everyone = runtime.collectives.all_gather_json({"config": values, "sources": sources})
    _check_same_sources([local["sources"] for local in everyone])

    # Every rank is compared with rank 0. The first key that differs is named.
    first, *others = [local["config"] for local in everyone]
    for rank, theirs in enumerate(others, start=1):
        different = sorted(key for key in first.keys() | theirs.keys() if first.get(key) != theirs.get(key))

        if different:
            key = different[0]
            raise UserError(
                "the ranks have different configurations: "
                f"{key} is {first.get(key)} on rank 0 and {theirs.get(key)} on rank {rank}",
                f"{len(different)} keys differ" if len(different) > 1 else "",
                "pass every rank the same file and the same key=value arguments",
            )


def digests_of_sources() -> dict[str, str]:
    """Return a digest of the file of each imported module that is neither Python's nor installed: the user's own."""
    prefix = str(Path(__file__).parents[2])
    folders = tuple(f"{folder}{os.sep}" for folder in {*sysconfig.get_paths().values(), prefix})

    # The modules of an installed package, thousands with torch, are not looked at: a rank is often a fork, which would
    # copy the memory of every module that it touches.
    installed: dict[str, bool] = {}  # by top-level package: is it installed?
    digests = {}

    # A list: importing in another thread would change the dictionary meanwhile.
    for name in list(sys.modules):
        package = name.partition(".")[0]
        if package not in installed:
            installed[package] = _is_installed(_source(package), folders)

        file = None if installed[package] else _source(name)
        if file and not _is_installed(file, folders):
            with suppress(OSError):  # a file that was removed after the import
                digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]

    return digests


def _source(name: str) -> str | None:
    """Return the path of an imported module's source, None if it has none."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


def _is_installed(file: str | None, folders: tuple[str, ...]) -> bool:
    """Return whether a source is in one of `folders`, or where a package manager of another Python has put it."""
    if file is None:
        return False

    # Packages may be installed in folders that this Python does not count as its own, as in a container.
    path = os.path.abspath(file)
    return path.startswith(folders) or not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))


def _check_same_sources(everyone: list[dict[str, str]]) -> None:
    """Check that the ranks have imported the same sources: machines with copies of their own may have an old one."""
    for rank, theirs in enumerate(everyone[1:], start=1):
        # A rank may have imported more than another: only what both have is compared.
        common = sorted(everyone[0].keys() & theirs.keys())
        different = [name for name in common if everyone[0][name] != theirs[name]]
        if different:
            raise UserError(
                f"the ranks run different code: the file of module {different[0]} is not the same on rank 0 and rank "
                f"{rank}",
                f"{len(different)} modules differ: {', '.join(different[:8])}" if len(different) > 1 else "",
                "copy the same files to every machine",
            )


def check_evaluations(config: RunConfig, evaluates: bool, during_run: bool, moves_rate: bool) -> None:
    """Check that there are evaluations during the run, if something waits for them that would never happen otherwise.

    `evaluates`: there is evaluation data; `during_run`: some setting makes evaluations due before the end;
    `moves_rate`: the learning rate follows the loss of evaluations.
    """
    if evaluates and during_run:
        return

    # The first setting that would wait forever is named.
    if config.checkpoint.best:
        problem = (
            f"checkpoint.best={config.checkpoint.best} compares evaluations, and there is no evaluation during the run"
        )
    elif config.stop.patience:
        problem = f"stop.patience={config.stop.patience} counts evaluations, and there is no evaluation during the run"
    elif moves_rate:
        problem = "ReduceLROnPlateau follows the loss of evaluations, and there is no evaluation before the end"
    else:
        return

    raise UserError(
        problem,
        "" if evaluates else "eval_data() returns None",
        "set evaluate.every=100" + ("" if evaluates else ", and return a dataset from eval_data()"),
    )


def check_sample_log(config: RunConfig, source: BatchSource) -> None:
    """If log.samples is set, check that the samples have ids."""
    if config.log.samples and isinstance(source, StridedStreamSource):
        raise UserError(
            "log.samples=true needs sample ids, and the samples of a stream have none",
            "",
            "return a dataset with __getitem__ and __len__ from data(), or leave log.samples out",
        )


def check_before_batch(config: RunConfig, role: RankRole, alone: bool, hook: Hook) -> None:
    """Check that each rank gets the same places in every global batch, because a before_batch() may depend on them."""
    if not role.runs_whole_model:
        raise UserError(
            f"{hook.name}() cannot be used in a pipeline (mesh.pp)",
            "all micro-batches of a step are in flight together, so none directly precedes its loss",
            "set strategy=ddp, without mesh.pp",
        )

    # A callback may say that it treats all places alike.
    if not getattr(hook.owner, "follows_places", True):
        return

    if config.data.balance != "none":
        raise UserError(
            f"{hook.name}() cannot be used with data.balance={config.data.balance}",
            "samples change their places in the global batch, but the state that it may keep for places does not",
            "leave data.balance out",
        )

    if config.load_balance == "auto" and not alone:
        raise UserError(
            f"{hook.name}() cannot be used with load_balance=auto",
            "micro-batches move to other ranks once the speeds are measured, but the state that it may keep for them "
            "does not",
            "leave load_balance out, or give one number for each rank, such as [1, 2]",
        )


def check_steps_left(steps: int, done: int) -> None:
    """Check that a resumed run has not passed `steps` already: its last records would be overwritten."""
    if done > steps:
        raise UserError(
            f"steps={steps} leaves nothing to train: the checkpoint is from step {done}",
            "",
            f"set steps={2 * done}, with the run's other settings (they do not come from the checkpoint)",
        )


def check_epochs_countable(config: RunConfig, before: int, now: int) -> None:
    """Check that steps have the same size as before the resume, if epochs are counted and the data does not count them.

    `before` and `now` are the samples of a step. With local_batch they change with the number of ranks.
    """
    counted = {"epochs": config.epochs, "evaluate.epochs": config.evaluate.epochs}
    for key, value in counted.items():
        if value is not None and before != now:
            by_ranks = f" (local_batch={config.local_batch}, on another number of ranks)" if config.local_batch else ""
            raise UserError(
                f"{key}={value:g} cannot be counted, because the global batch has changed: {before} -> {now}{by_ranks}",
                "the data is a stream, which does not say how much of its epoch is done",
                f"set {'steps=1000' if key == 'epochs' else 'evaluate.every=100'} in place of {key}; or resume with "
                f"global_batch={before}",
            )


def check_enough_micro_batches(plan: Plan) -> None:
    """Check that a pipeline has at least two micro-batches per step: with one, all stages but one would be idle."""
    if plan.global_num_micro_batches // plan.data_size >= 2:
        return

    # Two micro-batches for each pipeline, if the batch has that many samples.
    smaller = plan.global_batch // (2 * plan.data_size)
    fix = f"set micro_batch={smaller} or less" if smaller else "set a larger batch"
    raise UserError(
        f"a step has {plural(plan.global_num_micro_batches, 'micro-batch', 'micro-batches')} of {plan.micro_batch} "
        f"samples for {plural(plan.data_size, 'pipeline')}; each (mesh.pp) needs at least two",
        "",
        f"{fix}: at least one for each stage is best",
    )
