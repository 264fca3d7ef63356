"""The shape of the project, kept true: which area may import which, and what the README says is where."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lockstep"

# From the bottom up. An area may import areas of lower rows, and itself; areas of one row do not import each other.
ROWS = [
    {"errors", "_version"},
    {"config", "faults"},
    {"runtime"},
    {"launch"},
    {"task", "precision", "testing"},
    {"losses", "plan", "data", "optim", "observe"},
    {"checkpoint"},
    {"parallel"},
    {"engine"},
    {"targets", "registries"},
    {"api"},
    {"classic"},
    {"verify"},
    {"cli"},
    {"__main__"},
]
LEVEL = {area: level for level, row in enumerate(ROWS) for area in row}
# Recipes are users: they see the public names, the task contract and the errors, nothing of the engine.
OPEN_TO_RECIPES = {"task", "errors", "recipes"}


def area_of(path: Path) -> str:
    part = path.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imported_areas(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "lockstep":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lockstep."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lockstep.")}
    return found


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    area = area_of(path)
    if area == "recipes":
        assert imported_areas(path) <= OPEN_TO_RECIPES
        return
    assert area in LEVEL, f"{area} has no place in ROWS"
    for other in imported_areas(path) - {area}:
        assert other in LEVEL, f"{area} imports {other}, which has no place in ROWS"
        assert LEVEL[other] < LEVEL[area], f"{area} must not import {other}"


def test_nothing_is_named_after_nothing():
    forbidden = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    ours = (path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
    assert not [path for path in ours if path.name in forbidden]


def tree_in_readme() -> list[str]:
    """The paths of the annotated tree: a line holds a name, two spaces, and what it is for."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```text\n(lockstep/\n.*?)```", text, re.S)
    assert block, "the README has no annotated tree"
    paths, folders = [], []
    for line in block.group(1).splitlines()[1:]:
        name = line.strip().split("  ")[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[: depth - 1], name.rstrip("/")]
        paths.append("/".join(folders))
    return paths


def test_the_readme_tree_names_what_is_there():
    missing = [path for path in tree_in_readme() if not (ROOT / path).exists()]
    assert not missing


def test_every_module_is_in_the_readme_tree():
    listed = set(tree_in_readme())
    for path in MODULES:
        relative = path.relative_to(ROOT)
        parents = {str(parent) for parent in relative.parents}
        assert str(relative) in listed or parents & listed - {"src", "src/lockstep"}, f"{relative} is not in the tree"
