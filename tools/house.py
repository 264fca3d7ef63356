"""Measure the shape of the source, with fixed definitions, so that two commits can be compared.

    python tools/house.py                     # src/lockstep of this checkout
    python tools/house.py OTHER/src/lockstep
    python tools/house.py --batch             # trains a few steps, and lists the files that a batch crosses

statements       AST statements, docstrings included, per 100 lines
comments         full-line comments, in per cent of all lines
comprehensions   and conditional expressions, per 1,000 lines
attributes       of a class: names assigned on `self` in it, and annotated fields
members          attributes, methods and class variables, its own and those of its base classes in the package
strategy names   comparisons with a strategy's name, outside `config/`
a batch crosses  the files whose functions the main thread enters from the moment that a step asks for its samples
                 up to `optimizer.step()`, in the middle of a run of char_lm on one process; the recipe's own files,
                 which stand for the user's, are not counted

The first row is the whole package, the second leaves recipes and `classic` out.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

STRATEGY_NAMES = {"ddp", "zero1", "fsdp", "fsdp-grads", "hsdp", "tp", "pp"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def main(root: Path) -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    core = {p: t for p, t in trees.items() if not {"recipes", "classic"} & set(p.relative_to(root).parts)}
    print_density("all", trees)
    print_density("core", core)

    # Tails of functions and classes, in the core.
    lengths = sorted(span(node) for node in nodes(core, ast.FunctionDef, ast.AsyncFunctionDef))
    print(f"functions        p95 {lengths[int(len(lengths) * 0.95)]}, longest {lengths[-1]}")
    folders = Counter(path.parent.relative_to(root).as_posix() for path in trees)
    print(f"widest folders   {', '.join(f'{name} {count}' for name, count in folders.most_common(5))}")
    classes = {f"{path.stem}.{node.name}": node for path, node in named_classes(core)}
    widest = sorted(classes, key=lambda name: -len(attributes(classes[name])))[:6]
    print(f"attributes       {', '.join(f'{name} {len(attributes(classes[name]))}' for name in widest)}")
    by_name = {node.name: node for _, node in named_classes(core)}
    for name in ("driver.Driver", "drivers.Driver", "step.Stepper"):
        if name in classes:
            found = [classes[name], *bases(classes[name], by_name)]
            all_members = set[str]().union(*map(members, found))
            public = sum(not member.startswith("_") for member in all_members)
            all_attributes = set[str]().union(*map(attributes, found))
            print(f"{name:16} {len(all_attributes)} attributes, {len(all_members)} members, {public} of them public")
    print(f"strategy names   {sum(map(len, comparisons(core, root).values()))} compared outside their table")
    for path, lines in comparisons(core, root).items():
        print(f"                 {path.relative_to(root)}: lines {', '.join(map(str, lines))}")


def print_density(name: str, trees: dict[Path, ast.Module]) -> None:
    texts = [path.read_text().splitlines() for path in trees]
    lines = sum(map(len, texts))
    comments = sum(line.strip().startswith("#") for text in texts for line in text)
    statements = sum(1 for _ in nodes(trees, ast.stmt))
    comprehensions = sum(1 for _ in nodes(trees, *COMPREHENSIONS))
    conditionals = sum(1 for _ in nodes(trees, ast.IfExp))
    print(
        f"{name:16} {lines} lines, {100 * statements / lines:.1f} statements per 100, {100 * comments / lines:.1f} % "
        f"comments; per 1,000: {1000 * comprehensions / lines:.0f} comprehensions, {1000 * conditionals / lines:.0f} "
        "conditional expressions"
    )


def nodes(trees: dict[Path, ast.Module], *kinds: type) -> list[ast.AST]:
    return [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, kinds)]


def named_classes(trees: dict[Path, ast.Module]) -> list[tuple[Path, ast.ClassDef]]:
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def span(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # pyrefly: ignore


def attributes(node: ast.ClassDef) -> set[str]:
    found = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and isinstance(item.value, ast.Name):
            found |= {item.attr} if item.value.id == "self" else set()
    return found


def members(node: ast.ClassDef) -> set[str]:
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    targets = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
    return attributes(node) | methods | {target.id for target in targets if isinstance(target, ast.Name)}


def bases(node: ast.ClassDef, by_name: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return the base classes of a class, and theirs, as far as the package has classes of these names."""
    own = [by_name[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in by_name]
    return [found for base in own for found in (base, *bases(base, by_name))]


def comparisons(trees: dict[Path, ast.Module], root: Path) -> dict[Path, list[int]]:
    """Return the lines that compare something with a strategy's name, or with a tuple that holds one."""
    found: dict[Path, list[int]] = {}
    for path, tree in trees.items():
        relative = path.relative_to(root).as_posix()
        if relative.startswith("config/"):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare) or "strategy" not in ast.unparse(node):
                continue
            names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            if names & STRATEGY_NAMES:
                found.setdefault(path, []).append(node.lineno)
    return found


def files_crossed(root: Path) -> list[str]:
    """Return the files of the package at `root` that one batch crosses, in order, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--trace", str(root.resolve())]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.splitlines()[-1].split()


def trace(root: Path) -> None:
    """Train the package at `root` for a few steps, and print the files that the batch of the last has crossed."""
    sys.path.insert(0, str(root.parent))
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    import lockstep
    from lockstep.recipes.char_lm.task import CharLM

    entered: list[tuple[str, str]] = []
    steps: list[list[tuple[str, str]]] = []

    def enter(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root):
            entered.append((path.relative_to(root).as_posix(), frame.f_code.co_name))

    register_optimizer_step_pre_hook(lambda *_: steps.append(entered.copy()))
    register_optimizer_step_post_hook(lambda *_: entered.clear())
    sys.setprofile(enter)
    lockstep.fit(CharLM, preset="tiny", steps=4, run_dir="run")
    sys.setprofile(None)

    begin = steps[-1].index(("data/map_source.py", "take"))
    names = dict.fromkeys(name for name, _ in steps[-1][begin:])
    print(*(name for name in names if not name.startswith("recipes/")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent / "src" / "lockstep")
    parser.add_argument("--batch", action="store_true", help="train, and list the files that a batch crosses")
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        trace(arguments.trace)
    elif arguments.batch:
        crossed = files_crossed(arguments.root)
        print(f"a batch crosses  {len(crossed)} files: {', '.join(crossed)}")
    else:
        main(arguments.root)
