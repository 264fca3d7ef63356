"""The shape of the project, kept true: which area may import which, and what docs/tour.md says is where."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import lockstep
from sampled import SAMPLED, out_of_range

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lockstep"

# From the bottom up. An area may import areas of lower rows, and itself; areas of one row do not import each other.
ROWS = [
    {"errors", "_version", "causes", "garbage"},
    {"user_classes", "files"},
    {"config", "faults"},
    {"runtime"},
    {"run_folder"},
    {"launch"},
    {"task", "precision", "testing"},
    {"losses", "plan", "data", "optim", "observe", "callbacks"},
    {"checkpoint"},
    {"parallel"},
    {"start_check"},
    {"engine"},
    {"targets"},
    {"api"},
    {"recipes", "hf", "skeletons"},
    {"classic"},
    {"verify", "evaluate", "clusters", "bench"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
# The same inside `launch/`, for its modules and folders.
LAUNCH_ROWS = [
    {"frames", "job", "lost_peer", "terminal", "times"},
    {"election", "failure", "restarts"},
    {"folder_watch", "hangs"},
    {"wire"},
    {"decisions", "ranks"},
    {"agent", "validation"},
    {"coordinator"},
    {"nodes"},
    {"supervisor"},
]
LEVEL = {area: level for level, row in enumerate(ROWS) for area in row}
# What `lockstep init` writes is a user's own file: it imports the public names alone.
OPEN_TO_SKELETONS = {*lockstep.__all__, "errors"}
# Recipes are users: they see the public names, the task contract and the errors, nothing of the engine.
OPEN_TO_RECIPES = {"task", "errors", "recipes"}


def area_of(path: Path) -> str:
    part = path.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


class Source(NamedTuple):
    imports: list[ast.Import | ast.ImportFrom]
    members: set[str]  # CLASS.MEMBER for each method and attribute of its classes


@functools.cache
def parsed(path: Path) -> Source:
    """Return what tests ask of a file. It is parsed once for all of them; its tree, which is large, is not kept."""
    source = Source([], set())
    for owner in ast.walk(ast.parse(path.read_text())):
        if isinstance(owner, ast.Import | ast.ImportFrom):
            source.imports.append(owner)
        elif isinstance(owner, ast.ClassDef):
            for node in ast.walk(owner):
                if isinstance(node, ast.FunctionDef):
                    source.members.add(f"{owner.name}.{node.name}")
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    source.members.add(f"{owner.name}.{node.target.id}")
    return source


def imported_areas(path: Path) -> set[str]:
    found = set()
    for node in parsed(path).imports:
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
    if area == "skeletons":
        assert imported_areas(path) <= OPEN_TO_SKELETONS
        return
    assert area in LEVEL, f"{area} has no place in ROWS"
    for other in imported_areas(path) - {area}:
        assert other in LEVEL, f"{area} imports {other}, which has no place in ROWS"
        assert LEVEL[other] < LEVEL[area], f"{area} must not import {other}"


def imported_in_launch(path: Path) -> set[str]:
    """Return the modules and folders of `launch/` that a file imports."""
    found = set()
    for node in parsed(path).imports:
        if isinstance(node, ast.ImportFrom) and node.module == "lockstep.launch":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lockstep.launch."):
            found.add(node.module.split(".")[2])
    return found


@pytest.mark.parametrize("path", sorted((PACKAGE / "launch").rglob("*.py")), ids=lambda path: path.stem)
def test_imports_inside_the_launcher_point_down(path):
    level = {part: level for level, row in enumerate(LAUNCH_ROWS) for part in row} | {"__init__": len(LAUNCH_ROWS)}
    own = path.relative_to(PACKAGE / "launch").parts[0].removesuffix(".py")
    for other in imported_in_launch(path) - {own}:
        assert level[other] < level[own], f"launch/{own} must not import launch/{other}"


def test_the_tour_has_the_order_of_the_launcher():
    order = " < ".join(", ".join(sorted(row)) for row in LAUNCH_ROWS)
    assert f"`{order}`" in " ".join(TOUR.split())


def test_nothing_is_named_after_nothing():
    forbidden = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    folders = ("src", "tests", "benchmarks", "tools", "examples")
    ours = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert not [path for path in ours if path.name in forbidden]


# ---- docs/tour.md -----------------------------------------------------------------------------------------


TOUR = (ROOT / "docs" / "tour.md").read_text()


def folders_in_the_tour() -> list[str]:
    """Return the paths of the annotated tree: a line holds a folder, two spaces, and what it is for."""
    block = re.search(r"```text\n(src/lockstep/.*?)```", TOUR, re.S)
    assert block, "docs/tour.md has no annotated tree"
    paths: list[str] = []
    parents: list[str] = []
    for line in block[1].splitlines():
        name = line.strip().split("  ")[0]
        assert name.endswith("/"), f"the tree lists folders only, not {name}"

        # Two spaces of indentation for each folder above it.
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], name.rstrip("/")]
        paths.append("/".join(parents))
    return paths


def test_the_tour_lists_what_is_there():
    assert [path for path in folders_in_the_tour() if not (ROOT / path).is_dir()] == []


def test_every_folder_is_in_the_tour():
    """Inside the package each folder has a line; elsewhere the topmost one speaks for all below it."""
    listed = set(folders_in_the_tour())
    inside = {str(path.parent.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    outside = set()
    for folder in ROOT.iterdir():
        ours = folder.is_dir() and not folder.name.startswith(".") and folder.name not in ("src", "runs", "dist")
        if ours and any(folder.rglob("*.py")):
            outside.add(folder.name)
    assert sorted((inside | outside) - listed) == []


def names_in_the_tour() -> list[tuple[str, str]]:
    """Return (file, name) for each `file.py`: `name`; a few names may follow one file."""
    text = " ".join(TOUR.split())
    return re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", text)


@pytest.mark.parametrize(("file", "name"), names_in_the_tour())
def test_the_tour_names_what_is_there(file, name):
    """A function or a class of the file, or a method of a class."""
    defined = set()
    for node in ast.parse((PACKAGE / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    assert name in defined


def test_the_methods_that_the_tour_names_without_a_file_are_there():
    """In the text, where their file was named before, and in the diagram of a failure."""
    diagram = re.search(r"```text\n(rank .*?)```", TOUR, re.S)
    assert diagram, "docs/tour.md has no diagram of a failure"
    named = set(re.findall(r"`([A-Z]\w*\.[a-z_]\w*)`", TOUR)) | set(re.findall(r"[A-Z]\w*\.\w+", diagram[1]))
    assert len(named) > 100
    assert sorted(named - set().union(*(parsed(path).members for path in MODULES))) == []


def test_the_tour_names_enough():
    """The pattern above must not quietly stop to match."""
    assert len(names_in_the_tour()) > 40


# ---- CONTRIBUTING.md --------------------------------------------------------------------------------------


CONTRIBUTING = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())


def where(path: str) -> Path:
    """Return a path of CONTRIBUTING, which is relative to the package unless it begins with `tests` or `docs`."""
    return (ROOT if path.startswith(("tests", "docs")) else PACKAGE) / path


def test_the_files_in_contributing_are_there():
    paths = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md))`", CONTRIBUTING))
    assert len(paths) > 60
    assert sorted(path for path in paths if not where(path).exists()) == []


def test_the_names_with_a_file_in_contributing_are_there():
    """`NAME` (`FILE`), `NAME` in `FILE`, `NAME` of `FILE`."""
    pairs = set(re.findall(r"`([A-Z_a-z]\w*)(?:\([^`]*\))?` (?:\(|in |of )`([\w/]+\.py)`", CONTRIBUTING))
    assert len(pairs) > 25
    assert sorted(pair for pair in pairs if not re.search(rf"\b{pair[0]}\b", where(pair[1]).read_text())) == []


def test_the_members_of_classes_in_contributing_are_there():
    named = set(re.findall(r"`([A-Z]\w*\.[a-z_]\w*)(?:\([^`]*\))?`", CONTRIBUTING))
    assert len(named) > 30
    assert sorted(named - set().union(*(parsed(path).members for path in MODULES))) == []


@pytest.mark.parametrize("test", SAMPLED)
def test_what_is_sampled_exists(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (Path(__file__).parent / path).read_text()


def test_a_sampled_case_that_is_not_there_is_noticed() -> None:
    """Otherwise every case of a test that has lost some would run, or none."""
    cases = {test: max(places, default=0) + 1 for test, places in SAMPLED.items()}
    assert out_of_range(cases) == []
    test = next(iter(SAMPLED))
    assert out_of_range(cases | {test: cases[test] - 1}) == [test]
