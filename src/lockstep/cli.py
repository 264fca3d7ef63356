"""The command `lockstep`: verb -> function. No logic here, and no torch until a verb needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import lockstep
from lockstep.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    unknown = [item for item in rest if item.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (settings are written key=value)")
    if rest and not hasattr(options, "overrides"):
        parser.error(f"{options.verb} takes no settings such as {rest[0]}")
    try:  # what follows an option, as in `train char_lm --nproc 2 steps=10`, is left to us by argparse
        return options.run(options, [*getattr(options, "overrides", []), *rest])
    except UserError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our words has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep", description="Train any PyTorch model on one process or many, and get the same model."
    )
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    train = verbs.add_parser("train", help="train a recipe, a task of yours, or a script with its own loop")
    _add_target(train)
    train.add_argument(
        "--nproc", metavar="N|auto|1..8", help="processes on this machine, watched over (default: this one alone)"
    )
    train.add_argument("--nnodes", metavar="M|1:4", help="machines; type the same command on each of them")
    train.add_argument("--join", metavar="HOST:PORT", help="where the machines meet: the address of one of them")
    train.add_argument("--resume", metavar="auto|PATH|never", help="go on from a checkpoint (default never)")
    train.set_defaults(run=_train)

    _add_verify(verbs.add_parser("verify", help="train a few steps in several layouts, and compare them"))

    resize = verbs.add_parser("resize", help="let a running job go on with another number of processes")
    resize.add_argument("run_dir", type=Path, metavar="RUN")
    resize.add_argument("count", type=int, metavar="N")
    resize.set_defaults(run=_resize)

    config = verbs.add_parser("config", help="show the resolved configuration and where each value came from")
    config.add_argument("action", choices=["show"])
    _add_target(config)
    config.set_defaults(run=_config)

    report = verbs.add_parser("report", help="write report.html for a run folder")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(run=_report)

    _add_ckpt(verbs.add_parser("ckpt", help="list, show, verify, export or prune the checkpoints of a run"))

    recipes = verbs.add_parser("recipes", help="list the recipes that come with Lockstep")
    recipes.set_defaults(run=_recipes)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a recipe's name, FILE.py:CLASS, or SCRIPT.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as steps=100 lr.peak=1e-3")
    parser.add_argument("--config", action="append", default=[], metavar="F.yaml", help="a file of settings")


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument("--worlds", metavar="1,2,3,4", help="numbers of processes (default 1,2,3,4)")
    parser.add_argument("--strategies", metavar="ddp,fsdp", help="ways to share the model (default: the task's own)")
    parser.add_argument("--splits", metavar="8,5", help="other micro-batches to try (default: the whole, a ragged one)")
    parser.add_argument("--steps", type=int, default=4, metavar="K", help="steps to train in each layout (default 4)")
    parser.add_argument("--exact", action="store_true", help="ask for identical bits (exact=true)")
    parser.add_argument("--json", metavar="F", help="write the result to a file, too")
    parser.set_defaults(run=_verify)


def _add_ckpt(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    made = {}
    for name, place, text in [
        ("ls", "RUN", "a line for each checkpoint"),
        ("show", "RUN|CKPT", "what is in the newest one, or in this one"),
        ("verify", "RUN|CKPT", "read every byte; the exit code is 1 if any is wrong"),
        ("export", "RUN|CKPT", "write the weights to one model.safetensors"),
        ("prune", "RUN", "delete all but the newest"),
    ]:
        made[name] = actions.add_parser(name, help=text)
        made[name].add_argument("place", type=Path, metavar=place)
    made["export"].add_argument("--out", type=Path, metavar="DIR", help="where to (default: beside the checkpoint)")
    made["export"].add_argument("--step", type=int, metavar="N", help="which one (default: the newest)")
    made["prune"].add_argument("--keep", type=int, default=3, metavar="K", help="how many stay (default 3)")
    made["prune"].add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.set_defaults(run=_ckpt)


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep import api
    from lockstep.config import read_layers

    layers = read_layers(options.config, overrides)
    if options.resume is not None:
        layers.append(("--resume", {"resume": options.resume}))
    asked = api.Processes(options.nproc, options.nnodes, options.join)
    again = api.typed_again(["lockstep"], options.arguments, ["--resume", "auto"])
    return api.train(options.target, layers, asked, again)


def _verify(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.config import read_layers
    from lockstep.verify import command
    from lockstep.verify.layouts import VerifyOptions

    layers = read_layers(options.config, overrides)
    wishes = VerifyOptions.typed(options.worlds, options.strategies, options.splits, options.steps, options.exact)
    return command.main(options.target, layers, wishes, options.json)


def _resize(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.launch.run_dir import ask_for_size

    ask_for_size(options.run_dir, options.count)
    print(f"asked for {options.count}: the launcher of {options.run_dir} says on its screen what it does about it")
    return 0


def _config(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep import targets
    from lockstep.config import describe, read_layers, resolve_for
    from lockstep.config.values import typed

    layers = read_layers(options.config, overrides)
    kind = targets.load_class(options.target)
    resolved = targets.settled(kind, resolve_for(kind.defaults, kind.presets, layers))
    targets.make_task(kind, resolved.config.task)  # what training would refuse is not shown as if it worked
    for key, value, source in describe(resolved.config, resolved.sources):
        print(f"{key:32} {typed(value):24} {source}")
    return 0


def _report(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.observe.report import write_report

    print(write_report(options.run_dir))
    return 0


def _ckpt(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep.checkpoint import inspect

    if options.action == "export":
        text, code = inspect.export(options.place, options.out, options.step)
    elif options.action == "prune":
        text, code = inspect.prune(options.place, options.keep, options.dry_run)
    else:
        text, code = {"ls": inspect.ls, "show": inspect.show, "verify": inspect.verify}[options.action](options.place)
    print(text)
    return code


def _recipes(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from lockstep import targets

    for name, text in targets.recipes().items():
        print(f"{name:16} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
