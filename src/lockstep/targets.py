"""What a TARGET names: a recipe, `file.py:Class`, or a script with its own loop; and the task that it stands for."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from lockstep.errors import ConfigError, UserError

RECIPES = Path(__file__).parent / "recipes"

# What every task has, see task.py. A class need not be derived from Task.
CONTRACT = ("model", "data", "loss", "optimizer", "defaults", "presets", "unit")


def recipes() -> dict[str, str]:
    """Return name -> first line of the description of every recipe, without importing any."""
    # The source is parsed: importing a recipe would import torch.
    found = {}
    for package in sorted(RECIPES.glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(package.read_text())) or ""
        found[package.parent.name] = text.partition("\n")[0]
    return found


def is_script(target: str) -> bool:
    """Whether the target is a script, which calls `lockstep.start` or `lockstep.fit` itself."""
    return target.endswith(".py")


def name_of(target: str) -> str:
    """Return the name for the run folder: `char_lm`, or the class or file name in lower case."""
    return Path(target.rpartition(":")[2]).stem.lower()


# ---- checks without an import ---------------------------------------------------------------------------


def check(target: str) -> None:
    """Raise for everything wrong with a target that can be known without importing it."""
    # The last colon: a path may hold others.
    path, colon, class_name = target.rpartition(":")
    if is_script(target):
        _check_file(target, Path(target))
        _check_script(target)
    elif colon:
        _check_file(target, Path(path))
        if not class_name.isidentifier():
            raise UserError(
                f"the target {target} cannot be loaded: {class_name!r} is not a class name", "", f"type {path}:MyTask"
            )
    else:
        _check_recipe(target)


def _check_file(target: str, file: Path) -> None:
    if not file.is_file():
        raise UserError(
            f"the target {target} cannot be loaded: there is no file {file}",
            "",
            "type FILE.py:CLASS, with a path that exists",
        )


def _check_script(target: str) -> None:
    """Refuse a script that would do nothing: most often a file with a task, typed without its class."""
    source = Path(target).read_text()
    # Crude, but never wrong about a script that trains: the calls may be named in many ways.
    if "start(" in source or "fit(" in source:
        return

    tasks = [f"{target}:{name}" for name in _task_names(source)]
    raise UserError(
        f"the script {target} would train nothing: it never calls lockstep.start or lockstep.fit",
        "",
        f"type {' or '.join(tasks)}" if tasks else "wrap its loop with lockstep.start: see docs/own_loop.md",
    )


def _check_recipe(target: str) -> None:
    names = recipes()
    if target in names:
        return
    near = difflib.get_close_matches(target, names, n=1)
    raise UserError(
        f"the target {target} is not a recipe",
        f"the recipes are {', '.join(names)}",
        f"type {near[0]}" if near else "type the name of a recipe, FILE.py:CLASS, or SCRIPT.py",
    )


def _task_names(source: str) -> list[str]:
    """Return the names of the classes in `source` that are derived from Task, without importing it."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return []

    # A class counts if a base is called Task, with or without a module before it, or counts itself.
    known = ["Task"]
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & {*known}:
                known.append(node.name)
    return known[1:]


# ---- the class ------------------------------------------------------------------------------------------


def load_class(target: str) -> type[Any]:
    """Import the class of a task."""
    check(target)
    if is_script(target):
        raise UserError(
            f"the configuration of the script {target} is known only when it runs",
            "",
            f"type {target}:CLASS, or look at config.yaml in its run folder",
        )
    path, colon, class_name = target.rpartition(":")
    if not colon:
        return importlib.import_module(f"lockstep.recipes.{target}").TASK

    module = _load_file(Path(path))
    found = getattr(module, class_name, None)
    if _is_task(found):
        return cast(type, found)

    # Classes that the file only imports would be odd advice.
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    raise _not_a_task(path, class_name, found, [value.__name__ for value in own if _is_task(value)])


def _is_task(value: Any) -> bool:
    """Whether `value` is a class that is derived from Task, or has all that a task has."""
    return isinstance(value, type) and all(hasattr(value, name) for name in CONTRACT)


def check_is_task(value: Any) -> None:
    """Refuse anything but a task or its class, such as the name of a recipe, for `lockstep.fit`."""
    kind = value if isinstance(value, type) else type(value)
    if not _is_task(kind):
        raise UserError(
            "lockstep.fit takes a task or its class",
            f"{value!r:.80}, a {type(value).__name__}",
            "pass an object or a class derived from lockstep.Task; by name: lockstep train NAME",
        )


def _not_a_task(path: str, class_name: str, found: Any, tasks: Sequence[str]) -> UserError:
    if isinstance(found, type):
        missing = ", ".join(name for name in CONTRACT if not hasattr(found, name))
        return UserError(
            f"the class {class_name} in {path} is not a task: it lacks {missing}",
            "",
            f"type {path}:{tasks[0]}" if tasks else f"write class {class_name}(lockstep.Task)",
        )
    near = difflib.get_close_matches(class_name, tasks, n=1)
    return UserError(
        f"the file {path} has no class {class_name}",
        f"its tasks are {', '.join(tasks)}" if tasks else "it has no task",
        f"type {path}:{near[0] if near else 'MyTask'}",
    )


def _load_file(path: Path) -> Any:
    """Import a file by its path, so that it can import the modules next to it."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)

    # Under its own name, not as `__main__`: what is guarded by `if __name__ == "__main__"` does not run.
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


# ---- the object -----------------------------------------------------------------------------------------


def make_task(kind: type[Any], options: Mapping[str, Any]) -> Any:
    """Construct the task with `task.*` as keyword arguments; raise all wrong ones at once."""
    parameters = _signature(kind).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kind(**options)  # only the constructor knows what it takes

    # Names and types are checked against the signature, so that all problems come at once.
    problems = []
    values = {}
    for key, value in options.items():
        if key not in parameters:
            problems.append(_unknown_option(kind, key, list(parameters)))
            continue
        try:
            values[key] = _converted(value, parameters[key].annotation)
        except ValueError:  # pydantic's ValidationError is one
            problems.append(_wrong_type(key, value, parameters[key].annotation))

    # Options without a default.
    for name, p in parameters.items():
        required = p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        if required and name not in options:
            problems.append(UserError(f"task.{name} is not set, and it has no default", "", f"type task.{name}=..."))

    if problems:
        raise ConfigError(problems)
    return kind(**values)


def _signature(kind: type[Any]) -> inspect.Signature:
    """Return the signature of the constructor, with types in place of their names where they can be found."""
    try:
        return inspect.signature(kind, eval_str=True)
    except NameError:  # annotations whose names only a type checker imports
        return inspect.signature(kind)


def _converted(value: Any, wanted: Any) -> Any:
    """Return `value` as the annotation wants it: a list may become a tuple, a text a Path, but "8" never 8."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter

    if wanted is inspect.Parameter.empty or isinstance(wanted, str):
        return value

    # Strict for scalars: pydantic would turn "8" into 8 and true into 1.
    scalar = wanted in (int, float, bool, str) or isinstance(value, bool)
    try:
        adapter = TypeAdapter(wanted, config=ConfigDict(strict=scalar))
    except PydanticUserError:  # not a type that can be checked
        return value
    return adapter.validate_python(value)


def _unknown_option(kind: type[Any], key: str, names: list[str]) -> UserError:
    near = difflib.get_close_matches(key, names, n=1)
    known = ", ".join(f"task.{name}" for name in names) or "none"
    return UserError(
        f"task.{key} is not an option of {kind.__name__}",
        f"its options are {known}",
        f"type task.{near[0]}=..." if near else f"leave task.{key} out",
    )


def _wrong_type(key: str, value: Any, wanted: Any) -> UserError:
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    problem = f"task.{key}={value!r} must be of type {name}, not {type(value).__name__}"

    # Words such as none, off, yes and numbers were meant as text, perhaps, but YAML reads them as something else.
    takes_text = any(one is str or isinstance(one, str) for one in (wanted, *get_args(wanted)))
    if takes_text and isinstance(value, (type(None), bool, int, float)):
        word = {"None": "none", "True": "on", "False": "off"}.get(repr(value), repr(value))
        return UserError(
            problem,
            "words like none, off, yes and numbers, which YAML does not read as text",
            f"give it a value of type {name}; if the word itself is meant, quote it: task.{key}='\"{word}\"'",
        )
    return UserError(problem, "", f"give it a value of type {name}")
