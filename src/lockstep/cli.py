"""The command `lockstep`: each verb calls one function. It imports torch only when a verb needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import lockstep
from lockstep import skeletons, targets
from lockstep.bench import command as bench
from lockstep.clusters import command as clusters
from lockstep.clusters import nodes
from lockstep.errors import FINAL_CODES, DeviceLostError, ExitCode, UserError, code_for_srun, nearest_name, printable
from lockstep.lab import command as lab
from lockstep.launch.terminal import point_at_null

if TYPE_CHECKING:
    from lockstep.api import ResumeCommand
    from lockstep.config import Layer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: see `errors.ExitCode`."""
    # Commands that a rank or a script starts are not tasks of srun.
    final = os.environ.pop(FINAL_CODES, "")
    if not final:
        return _run(arguments)

    try:
        return code_for_srun(_run(arguments), final)
    except SystemExit as ending:
        raise SystemExit(code_for_srun(ending.code, final)) from None
    except Exception as error:
        from lockstep.launch import lost_peer

        # A rank that has only lost another one does not know why the job has ended.
        if lost_peer.reported_by(error):
            raise

        sys.excepthook(type(error), error, error.__traceback__)
        return code_for_srun(ExitCode.FAILED, final)


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)

    # What follows -- belongs to the script that is trained.
    end = words.index("--") if "--" in words else len(words)
    options, rest = parser.parse_known_args(words[:end])
    options.script_arguments = words[end + 1 :]
    runs_target = options.verb in ("train", "launch", "verify")
    if options.script_arguments and not (runs_target and targets.is_script(options.target)):
        options.parser.error(
            "only a script (lockstep train or verify SCRIPT.py) takes arguments after --: " + " ".join(words[end:])
        )

    # Kept for the command that resumes a run.
    options.arguments = words

    # argparse takes no positional arguments after an option, so we judge what it left over.
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        options.parser.refuse(unknown)
    if rest and not hasattr(options, "overrides"):
        takes = "one run, and not also" if options.verb == "report" else "no settings such as"
        options.parser.error(f"{options.verb} takes {takes} {rest[0]}")

    # Settings that follow an option, as in `train char_lm --nproc 2 steps=10`, are in `rest`.
    overrides = [*getattr(options, "overrides", []), *rest]

    try:
        return VERBS[options.verb](options, overrides) or 0
    except UserError as error:
        print(printable(f"lockstep: {error}"), file=sys.stderr)
        if isinstance(error, DeviceLostError):
            _end_at_once(error.exit_code)
        return error.exit_code
    except OSError as error:
        # The reader of a pipe closed it (`lockstep ckpt ls | head`). Python's flush at exit must not fail either.
        if isinstance(error, BrokenPipeError) and options.verb in ONLY_PRINT:
            point_at_null(sys.stdout)
            return 0

        # Elsewhere it may come from the user's code, and needs its traceback.
        if options.verb not in ("ckpt", "report", "rm", "runs"):
            raise

        print(printable(f"lockstep: {_about_files(options.verb, error)}"), file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _about_files(verb: str, error: OSError) -> UserError:
    """Return the error of a verb that only reads and writes the files of runs."""
    found = ": ".join(str(part) for part in (error.strerror, error.filename) if part) or str(error)
    return UserError(f"lockstep {verb} could not read or write a file", found, "let this user do that, and try again")


def _end_at_once(code: int) -> NoReturn:
    """End the process without freeing anything."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Parser(argparse.ArgumentParser):
    """A parser that is named in the options it returns, so that an error shows the usage of its verb."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.set_defaults(parser=self)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a word that must be one of a few, such as a verb, and suggest the one that was meant."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = _meant(str(value), [str(choice) for choice in action.choices or ()])
            error.message += f" (did you mean {near}?)" if near else ""
            raise

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End the command because of options that it does not have."""
        from lockstep.config.schema import KEYS

        hints = []
        for word in unknown:
            option = word.partition("=")[0]
            key = option.lstrip("-").replace("-", "_")
            near = nearest_name(option, self._option_string_actions)
            if key in KEYS:
                hints.append(f"{key} is a setting, without dashes: {key}=VALUE")
            elif near:
                hints.append(f"did you mean {near}?")

        hint = " ".join(hints) or "settings are written key=value"
        self.error(f"unrecognized arguments: {' '.join(unknown)} ({hint})")


def _meant(typed: str, words: Sequence[str]) -> str | None:
    """Return the word that was mistyped or shortened, such as evaluate for eval."""
    longer = next((word for word in words if len(typed) >= 3 and word.startswith(typed)), None)
    # Less alike are words with another meaning: plan and launch, resume and resize.
    return longer or nearest_name(typed, words, cutoff=0.7)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lockstep", description="Train any PyTorch model on one process or many, and get the same model."
    )
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    # In the order in which a user meets them.
    _add_init(verbs.add_parser("init", help="write a file to start from: a task or a script that trains at once"))
    _add_train(verbs.add_parser("train", help="train a recipe, your own task, or a script with its own loop"))
    _add_evaluate(verbs.add_parser("evaluate", help="evaluate a task with the weights of a run or a file"))
    _add_verify(
        verbs.add_parser("verify", help="train a few steps on different numbers of processes, and compare the results")
    )

    clusters.add_options(verbs.add_parser("launch", help="write the files of a job for a cluster, and submit it"))

    bench.add_options(
        verbs.add_parser("bench", help="measure scaling, communication, memory, steps, data and checkpoints")
    )

    resize = verbs.add_parser("resize", help="change the number of processes of a running job")
    resize.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    resize.add_argument("count", type=int, metavar="N", help="number of processes, within the range of --nproc")

    config = verbs.add_parser("config", help="show every setting of a target and where its value comes from")
    config.add_argument("action", choices=["show"], help="print the settings")
    _add_target(config, scripts=False)
    config.add_argument("--changed", action="store_true", help="only the settings that differ from their defaults")

    _add_runs(verbs)

    report = verbs.add_parser("report", help="write the report of a run, report.html, into its folder")
    report.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")

    _add_ckpt(verbs.add_parser("ckpt", help="list, show, verify, export or prune the checkpoints of a run"))

    verbs.add_parser("recipes", help="list the recipes that come with Lockstep")
    lab.add_options(verbs.add_parser("lab", help="learn distributed training: check your solutions of the exercises"))
    return parser


def _add_init(parser: argparse.ArgumentParser) -> None:
    about = "; ".join(f"{name}: {skeleton.about}" for name, skeleton in skeletons.SKELETONS.items())
    parser.add_argument(
        "kind", metavar="KIND", nargs="?", default="classifier", choices=skeletons.SKELETONS, help=about
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the file to write, NAME.py (default: the kind)")


def _add_runs(verbs: Any) -> None:
    runs = verbs.add_parser("runs", help="list the runs in a folder: state, step, best evaluation, size")
    runs.add_argument("folder", type=Path, metavar="DIR", nargs="?", default=Path("runs"), help="(default: runs)")
    runs.add_argument("--json", action="store_true", help="print JSON")

    rm = verbs.add_parser("rm", help="delete runs, or only their checkpoints")
    rm.add_argument("runs", type=Path, metavar="RUN", nargs="+", help="folder of a run")
    rm.add_argument("--checkpoints", action="store_true", help="delete the checkpoints, and keep records and weights")
    rm.add_argument("--yes", action="store_true", help="do not ask")
    rm.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    _add_store(rm)


def _add_target(parser: argparse.ArgumentParser, scripts: bool = True) -> None:
    kinds = "FILE.py:CLASS, MODULE:CLASS, or SCRIPT.py" if scripts else "FILE.py:CLASS, or MODULE:CLASS"
    parser.add_argument("target", metavar="TARGET", help=f"a recipe's name, {kinds}")
    # Without a default, argparse would call the settings required.
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings, such as steps=100 lr.peak=1e-3"
    )
    parser.add_argument("--config", action="append", default=[], metavar="F.yaml", help="a file of settings")


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument(
        "--nproc",
        metavar="N|auto|1..8",
        help="processes to start on this machine, and to restart after failures (default: train in this process; "
        "with --nnodes: one process on each machine)",
    )
    parser.add_argument("--nnodes", metavar="M|1:4", help="number of machines; run the same command on each of them")
    parser.add_argument(
        "--join",
        metavar="HOST:PORT,...",
        help="with --nnodes: where the machines meet, an address of one of them, or addresses of several",
    )
    parser.add_argument(
        "--nodes",
        metavar="HOST,...",
        help="start the job on these hosts over ssh and stay until it has ended; the first one coordinates",
    )
    nodes.add_host_options(parser)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="trace 5 steps, or profile.count: where their time goes, and a timeline of all ranks, in RUN/profile",
    )
    parser.add_argument(
        "--resume",
        metavar="auto|PATH|never",
        help="continue from a checkpoint; auto: if the run has one; PATH: a run or a checkpoint (default: never)",
    )


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN|FILE", help="a run, a checkpoint, or a file of weights")
    _add_target(parser, scripts=False)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, metavar="N", help="step of the run's checkpoint (default: the newest)")
    chosen.add_argument("--best", action="store_true", help="the run's best checkpoint, by checkpoint.best")
    parser.add_argument("--nproc", metavar="N|auto", help="processes to start (default: this process)")
    parser.add_argument("--json", type=Path, metavar="F", help="also write the result to this file, as JSON")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument("--worlds", metavar="1,2,3,4", help="numbers of processes to compare (default 1,2,3,4)")
    parser.add_argument("--strategies", metavar="ddp,fsdp", help="strategies to compare (default: the task's)")
    parser.add_argument(
        "--splits",
        metavar="8,5",
        help="further micro-batch sizes to compare (default: the whole batch, and an uneven part)",
    )
    parser.add_argument("--steps", type=int, default=4, metavar="K", help="steps to train in each layout (default 4)")
    parser.add_argument("--exact", action="store_true", help="require identical bits (exact=true)")
    parser.add_argument("--json", metavar="F", help="also write the result to this file, as JSON")


def _add_ckpt(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    # Every action takes one path: a checkpoint, or a run, which stands for its newest checkpoint.
    def add(name: str, metavar: str, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text)
        about = "folder of a run" if metavar == "RUN" else "folder of a checkpoint, or of a run: its newest checkpoint"
        action.add_argument("path", type=Path, metavar=metavar, help=about)
        _add_store(action)
        return action

    add("ls", "RUN", "list the checkpoints of a run")
    _add_choice(add("show", "RUN|CKPT", "show what is in the newest checkpoint, or in this one"), "show")
    add("verify", "RUN|CKPT", "read every byte; exit code 1 if any differs from what was written")

    export = add("export", "RUN|CKPT", "write the weights to model.safetensors, or as a Hugging Face folder")
    _add_choice(export, "export")
    _add_export(export)

    prune = add("prune", "RUN", "delete all checkpoints but the newest, and those that the run keeps anyway")
    prune.add_argument("--keep", type=int, default=3, metavar="K", help="how many checkpoints to keep (default 3)")
    aside = "also delete those that were set aside (step-N.rewound, step-N.damaged)"
    prune.add_argument("--set-aside", action="store_true", help=aside)
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def _add_store(parser: argparse.ArgumentParser) -> None:
    about = "your class, if the tensors are in a store of yours (checkpoint.store=MODULE:CLASS://FOLDER)"
    parser.add_argument("--store", metavar="MODULE:CLASS", help=about)


def _add_choice(action: argparse.ArgumentParser, verb: str) -> None:
    """Add the options that choose one of the checkpoints of a run."""
    chosen = action.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, metavar="N", help=f"step of the checkpoint to {verb} (default: the newest)")
    chosen.add_argument("--best", action="store_true", help=f"{verb} the best checkpoint by checkpoint.best")


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: RUN/export/step-N)")
    export.add_argument("--ema", action="store_true", help="write the averages of the weights (ema.decay)")
    export.add_argument("--overwrite", action="store_true", help="replace the file, or the folder, if it exists")
    export.add_argument(
        "--format",
        choices=["safetensors", "hf"],
        default="safetensors",
        help="safetensors: one file; hf: a folder that from_pretrained opens (default: safetensors)",
    )
    hugging_face = export.add_argument_group("with --format hf")
    hugging_face.add_argument(
        "--assets", type=Path, metavar="DIR", help="folder with config.json and the tokenizer (default: RUN/assets)"
    )
    hugging_face.add_argument("--max-shard-size", metavar="5GB", help="largest file of weights (default 5GB)")
    hugging_face.add_argument("--merge", action="store_true", help="merge adapters into their base model")
    hugging_face.add_argument("--base", type=Path, metavar="DIR", help="folder of the base model, if it has moved")


# ---- verbs ----
#
# Each imports what it needs: `lockstep --help` must wait neither for torch nor for pydantic.


def _init(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    print(skeletons.init(options.kind, options.name))


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep import api
    from lockstep.config import read_layers

    on_hosts = options.nodes is not None or options.hostfile is not None
    if not on_hosts:
        nodes.refuse_host_options(options)

    # As a setting, which reaches every host. What was typed for it wins.
    if options.profile and not any(word.startswith("profile.count=") for word in overrides):
        overrides = [*overrides, "profile.count=5"]

    layers = read_layers(options.config, overrides)

    # The strongest layer, shown under its own name.
    if options.resume is not None:
        layers.append(("--resume", {"resume": options.resume}))

    typed = nodes.without_values(options.arguments)
    resume_command = api.make_resume_command(["lockstep"], typed, ["--resume", "auto"])
    arguments = options.script_arguments
    if on_hosts:
        return _train_on_hosts(options, overrides, layers, resume_command)

    return api.train(options.target, layers, resume_command, options.nproc, options.nnodes, options.join, arguments)


def _train_on_hosts(
    options: argparse.Namespace, overrides: Sequence[str], layers: list[Layer], resume_command: ResumeCommand
) -> int:
    from lockstep.config import strongest_value
    from lockstep.run_folder.run_dir import choose_run_dir

    # All hosts need the same folder, so it is chosen here.
    asked, resume = strongest_value(layers, "run_dir"), strongest_value(layers, "resume") or "never"
    run_dir = choose_run_dir(asked, resume, targets.name_of(options.target))
    rest = [word for word in overrides if not word.startswith("run_dir=")]

    try:
        return nodes.train(options, [*rest, f"run_dir={run_dir}"], resume_command(run_dir))
    finally:
        # It is empty if nothing has started.
        if not asked:
            with suppress(OSError):
                run_dir.rmdir()


def _launch(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    return clusters.main(options, overrides)


def _verify(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.config import read_layers
    from lockstep.verify import command
    from lockstep.verify.trials import VerifyOptions

    layers = read_layers(options.config, overrides)
    asked = VerifyOptions.parse(options.worlds, options.strategies, options.splits, options.steps, options.exact)
    return command.main(options.target, layers, asked, options.json, options.script_arguments)


def _evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.config import read_layers
    from lockstep.evaluate import command

    request = command.EvaluateRequest(
        options.target, options.path, options.step, options.best, options.nproc, options.json
    )
    return command.main(request, read_layers(options.config, overrides))


def _resize(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from lockstep import api

    api.resize(options.run_dir, options.count)
    print(f"requested {options.count} processes; the launcher of {options.run_dir} prints whether and when it changes")


def _config(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from lockstep.config import KEYS, flatten, read_layers, resolve_for
    from lockstep.config.settings import typed
    from lockstep.engine.checks.names import check_names

    layers = read_layers(options.config, overrides)
    kind = targets.load_class(options.target)
    resolved = resolve_for(kind.defaults, kind.presets, layers)

    # Raise what training would refuse.
    check_names([("task default", kind.defaults), *layers])
    targets.make_task(kind, resolved.config.task)

    for key, value in flatten(resolved.config).items():
        # An option of the task is listed only if it was set: its default is in the task's constructor.
        if options.changed and key in KEYS and value == KEYS[key].default:
            continue

        print(f"{key:32} {typed(value):24} {resolved.sources.get(key, 'default')}")


def _runs(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from lockstep.observe.run_list import runs

    print(runs(options.folder, options.json))


def _rm(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.checkpoint.command import delete_objects
    from lockstep.observe.run_removal import rm

    def confirm(text: str) -> bool:
        return options.yes or _ask(text)

    _allow_store(options)
    lines, code = rm(options.runs, options.checkpoints, options.dry_run, confirm, delete_objects)
    print(printable("\n".join(lines)))
    return code


def _ask(question: str) -> bool:
    """Ask a person, and return whether the answer is yes."""
    if not (sys.stdin and sys.stdin.isatty()):
        raise UserError(
            "lockstep rm asks before it deletes, and there is no terminal to answer on",
            "the input is not a terminal",
            "add --yes",
        )

    return input(printable(f"{question} [y/N] ")).strip().lower() in ("y", "yes")


def _report(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from lockstep.observe.report import write_report
    from lockstep.run_folder.paths import check_is_run, read_path

    # The folder of its checkpoints means the run.
    meant = read_path(options.run_dir)
    run = options.run_dir if meant.run is None or meant.name is not None else meant.run
    check_is_run(run)
    print(write_report(run))


def _ckpt(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.checkpoint import command
    from lockstep.checkpoint.choose import choose

    _allow_store(options)
    match options.action:
        case "export" if options.format == "hf":
            text, code = _export_hf(options), 0
        case "export":
            _refuse_hf_options(options)
            checkpoint = choose(options.path, options.step, options.best)
            text, code = command.export(options.path, checkpoint, options.out, options.ema, options.overwrite)
        case "prune":
            text, code = command.prune(options.path, options.keep, options.dry_run, options.set_aside)
        case "ls":
            text, code = command.ls(options.path)
        case "show":
            text, code = command.show(choose(options.path, options.step, options.best))
        case _:
            text, code = command.verify(options.path)

    print(printable(text))
    return code


def _allow_store(options: argparse.Namespace) -> None:
    """Allow the store of --store, whose module may be in the working folder."""
    from lockstep.checkpoint.storage.stores import allow_store

    if options.store:
        sys.path.append(os.getcwd())
        allow_store(options.store)


def _export_hf(options: argparse.Namespace) -> str:
    from lockstep.checkpoint.choose import choose
    from lockstep.hf.export import ExportOptions, export

    checkpoint = choose(options.path, options.step, options.best)
    asked = {name: getattr(options, name) for name in HF_OPTIONS if getattr(options, name)}
    given = ExportOptions(out=options.out, ema=options.ema, overwrite=options.overwrite, **asked)
    return export(options.path, checkpoint, given)


HF_OPTIONS = ("assets", "max_shard_size", "merge", "base")


def _refuse_hf_options(options: argparse.Namespace) -> None:
    for name in HF_OPTIONS:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{option} has no effect without --format hf", "", f"add --format hf, or leave {option} out"
            )


def _recipes(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    for name, text in targets.recipes().items():
        print(f"{name:16} {text}")


# Each function returns an exit code, or None for success.
VERBS: dict[str, Callable[[argparse.Namespace, Sequence[str]], int | None]] = {
    "init": _init,
    "train": _train,
    "launch": _launch,
    "evaluate": _evaluate,
    "verify": _verify,
    "resize": _resize,
    "config": _config,
    "runs": _runs,
    "rm": _rm,
    "report": _report,
    "ckpt": _ckpt,
    "recipes": _recipes,
    "bench": bench.main,
    "lab": lambda options, overrides: lab.run(options),
}

# Verbs that train nothing: a broken pipe is that of their output.
ONLY_PRINT = ("init", "resize", "config", "runs", "rm", "report", "ckpt", "recipes")


if __name__ == "__main__":
    sys.exit(main())
