"""Find what a TARGET names: a recipe, `file.py:Class`, `module:Class`, or a script; and make the task."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Unpack, cast, get_args, get_origin, get_type_hints

import lockstep
from lockstep.errors import ConfigError, UserError, nearest_name, shell_word
from lockstep.user_classes import import_module

RECIPES = Path(__file__).parent / "recipes"

# What every task has, see task.py.
CONTRACT = ("model", "data", "loss", "optimizer", "defaults", "presets", "unit")


def recipes() -> dict[str, str]:
    """Return the name of every recipe with the first line of its description."""
    # The source is parsed: importing a recipe would import torch.
    packages = sorted(RECIPES.glob("*/__init__.py"))
    texts = {package.parent.name: ast.get_docstring(ast.parse(package.read_text())) or "" for package in packages}
    return {name: text.partition("\n")[0] for name, text in texts.items()}


def is_script(target: str) -> bool:
    """Return whether the target is a script, which calls `lockstep.start` or `lockstep.fit` itself."""
    return target.endswith(".py")


def name_of(target: str) -> str:
    """Return the name for the run folder: `char_lm`, or the class or file name in lower case."""
    return Path(target.rpartition(":")[2]).stem.lower()


def program_of(target: str) -> dict[str, str]:
    """Return what must be equal on all machines of a job: versions, and digests of the sources, without an import."""
    versions = {"python": platform.python_version(), "torch": _version_of("torch")}

    # Machines may have different checkouts of one version, so its sources count as well.
    package = Path(__file__).parent
    sources = sorted(package.rglob("*.py"))
    ours = _digest(*(str(path.relative_to(package)).encode() + path.read_bytes() for path in sources))

    program = {**versions, "lockstep": f"{lockstep.__version__} (sources {ours})"}

    # What the file imports is compared by the ranks, which know it (`engine/checks/settings.py`).
    file = Path(target if is_script(target) else target.rpartition(":")[0])
    return {**program, str(file): f"sources {_digest(file.read_bytes())}"} if file.is_file() else program


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


# ---- checks without an import ----


def check(target: str) -> None:
    """Raise for everything wrong with a target that can be known without importing it."""
    # The last colon counts: a path may hold others.
    path, colon, class_name = target.rpartition(":")

    if is_script(target):
        _check_file(target, Path(target))
        _check_script(target)
    elif colon and _is_module(path):
        _check_module(target, path)
    elif colon:
        _check_file(target, Path(path))
        if not class_name.isidentifier():
            raise UserError(
                f"the target {target} cannot be loaded: {class_name!r} is not a class name",
                "",
                f"use {_typed(path, 'MyTask')}",
            )

        _check_class(path, class_name)
    elif target not in recipes():
        raise _not_a_recipe(target)


def _not_a_recipe(target: str) -> UserError:
    problem = f"the target {target} is not a recipe"

    # The file is there, typed without its ending.
    file = f"{target}.py"
    if Path(file).is_file():
        tasks = _task_names(_parsed(file))
        return UserError(problem, f"there is a file {file}", f"use {_one_of(file, tasks) or _typed(file)}")

    near = nearest_name(target, recipes())
    return UserError(
        problem,
        f"the recipes are {', '.join(recipes())}",
        f"use {near}" if near else "use the name of a recipe, FILE.py:CLASS, or SCRIPT.py",
    )


def _typed(path: str, class_name: str = "") -> str:
    """Return a target as it is typed in a shell."""
    return shell_word(f"{path}:{class_name}" if class_name else path)


def _one_of(path: str, tasks: Sequence[str]) -> str:
    """Return the targets of a file with tasks: `foo.py:Foo or foo.py:Bar`."""
    return " or ".join(_typed(path, name) for name in tasks)


def _is_module(path: str) -> bool:
    """Return whether the part before the colon is the dotted name of a module, as in `lockstep.hf:CausalLM`."""
    return not path.endswith(".py") and all(part.isidentifier() for part in path.split("."))


def _check_module(target: str, name: str) -> None:
    # Only the package is looked for: finding a module inside it would import it, and perhaps torch.
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise UserError(
            f"the target {target} cannot be loaded: there is no module {name}",
            "",
            "use MODULE:CLASS with an installed module, or FILE.py:CLASS",
        )


def _check_file(target: str, file: Path) -> None:
    if not file.is_file():
        raise UserError(
            f"the target {target} cannot be loaded: there is no file {file}",
            "",
            "use FILE.py:CLASS, with a path that exists",
        )


def _parsed(path: str) -> ast.Module:
    """Return the syntax tree of a file, or raise an error that names the line that is no Python."""
    try:
        return ast.parse(Path(path).read_bytes())
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise UserError(
            f"the file {path} cannot be loaded: line {error.lineno}: {error.msg}", line, f"correct line {error.lineno}"
        ) from None
    except ValueError as error:
        raise UserError(f"the file {path} cannot be loaded: {error}", "", "save it as text") from None


def _use_a_task(path: str) -> str:
    """Return the beginning of an advice: the tasks of a file, if it has any."""
    tasks = _task_names(_parsed(path))
    return f"use {_one_of(path, tasks)}, or " if tasks else ""


def _check_script(target: str) -> None:
    """Refuse a script that would do nothing: most often a file with a task, typed without its class."""
    tree = _parsed(target)
    source = Path(target).read_text()
    # Crude, but it never refuses a script that trains, however it imported the two functions.
    if "start(" not in source and "fit(" not in source:
        tasks = _task_names(tree)
        raise UserError(
            f"the script {target} would train nothing: it never calls lockstep.start or lockstep.fit",
            "",
            f"use {_one_of(target, tasks)}" if tasks else "wrap its loop with lockstep.start: see docs/own_loop.md",
        )


def _check_class(path: str, class_name: str) -> None:
    """Refuse a class that the file cannot have. What the name stands for is known only when the file is imported."""
    tree = _parsed(path)

    # Crude, but it never refuses a class that the file has, however it got it: a name that is bound anywhere counts.
    bound = _bound_names(tree)
    if bound.isdisjoint({class_name, "*", "__getattr__"}):
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        tasks = _task_names(tree)

        near = nearest_name(class_name, tasks or classes)
        found = f"its tasks are {', '.join(tasks)}" if tasks else f"its classes are {', '.join(classes)}"
        raise UserError(
            f"the file {path} has no class {class_name}",
            found if classes else "it has no class",
            f"use {_typed(path, near or 'MyTask')}",
        )

    missing = [] if "*" in bound else _certainly_missing(tree, class_name)
    if missing:
        raise _lacks(path, class_name, missing, _task_names(tree))


def _bound_names(tree: ast.AST) -> set[str]:
    """Return the names that are bound anywhere in a tree; among them "*" if calls may bind others."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name)
            # What these functions bind is not known before the file runs.
            case ast.Call(func=ast.Name(id="globals" | "vars" | "setattr" | "exec")):
                bound.add("*")

    return bound


def _certainly_missing(tree: ast.Module, class_name: str) -> list[str]:
    """Return what a class lacks of a task, as far as its source proves it.

    It proves nothing if the class, or a class that it is derived from, comes from another file, is decorated, defined
    twice or changed from outside. Torch's classes, such as nn.Module, have nothing of a task.
    """
    imported = _imports(tree)
    nodes = list(ast.walk(tree))
    stored = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)]
    changed = {ast.unparse(node.value) if isinstance(node, ast.Attribute) else node.id for node in stored}

    found: set[str] = set()
    waiting = [class_name]

    while waiting:
        name = waiting.pop()
        first, _, rest = name.partition(".")

        # Neither `object` nor torch's classes have anything of a task.
        if name == "object" or f"{imported.get(first, '')}.{rest}".startswith("torch."):
            continue

        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
        plain = len(classes) == 1 and classes[0] in tree.body and not (classes[0].decorator_list or classes[0].keywords)
        if not plain or name in imported or name in changed:
            return []

        # A name that is bound anywhere inside counts.
        found |= _bound_names(classes[0])
        waiting += [ast.unparse(base) for base in classes[0].bases]

    return [name for name in CONTRACT if name not in found]


def _imports(tree: ast.Module) -> dict[str, str]:
    """Return the names that a file imports, with what they stand for: nn -> torch.nn."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                # `import torch.nn` binds torch, and `import torch.nn as nn` binds nn.
                bound = alias.asname or alias.name.partition(".")[0]
                names[bound] = alias.name if alias.asname else bound

    return names


def _task_names(tree: ast.Module) -> list[str]:
    """Return the names of the classes of a file that are derived from Task, without importing it."""
    # Derived from Task, with or without a module before it, or from a class above that is.
    tasks = ["Task"]

    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if not set(tasks).isdisjoint(bases):
                tasks.append(node.name)

    return tasks[1:]


# ---- the class ----


def load_class(target: str) -> type[Any]:
    check(target)
    if is_script(target):
        raise UserError(
            f"the configuration of the script {target} is known only when it runs",
            "",
            f"{_use_a_task(target)}look at config.yaml in the folder of one of its runs",
        )

    path, colon, class_name = target.rpartition(":")
    if not colon:
        return importlib.import_module(f"lockstep.recipes.{target}").TASK

    if _is_module(path):
        module = import_module(path, f"the target {target} cannot be loaded", "correct the name")
    else:
        module = _load_file(Path(path))

    kind = getattr(module, class_name, None)
    if _is_task(kind):
        return cast(type, kind)

    # Classes that the file only imports would be odd advice; a package collects those of its modules.
    inside = f"{module.__name__}."
    defined = [value for value in vars(module).values() if f"{getattr(value, '__module__', '')}.".startswith(inside)]
    raise _not_a_task(path, class_name, kind, [value.__name__ for value in defined if _is_task(value)])


def _is_task(value: Any) -> bool:
    """Return whether `value` is a class with everything that a task has, derived from Task or not."""
    return isinstance(value, type) and all(hasattr(value, name) for name in CONTRACT)


def check_is_task(value: Any) -> None:
    """Refuse anything but a task or its class, such as the name of a recipe, for `lockstep.fit`."""
    if not all(hasattr(value, name) for name in CONTRACT):
        raise UserError(
            "lockstep.fit takes a task or its class",
            f"{value!r:.80}, a {type(value).__name__}",
            "pass an object or a class derived from lockstep.Task; by name: lockstep train NAME",
        )


def _lacks(path: str, class_name: str, missing: Sequence[str], tasks: Sequence[str]) -> UserError:
    return UserError(
        f"the class {class_name} in {path} is not a task: it lacks {', '.join(missing)}",
        "",
        f"use {_typed(path, tasks[0])}" if tasks else f"write class {class_name}(lockstep.Task)",
    )


def _not_a_task(path: str, class_name: str, value: Any, tasks: Sequence[str]) -> UserError:
    if isinstance(value, type):
        return _lacks(path, class_name, [name for name in CONTRACT if not hasattr(value, name)], tasks)

    near = nearest_name(class_name, tasks)
    return UserError(
        f"the file {path} has no class {class_name}",
        f"its tasks are {', '.join(tasks)}" if tasks else "it has no task",
        f"use {_typed(path, near or 'MyTask')}",
    )


def _load_file(path: Path) -> Any:
    """Import a file by its path, so that it can import the modules next to it."""
    name = put_on_path(path)

    # Under its own name, not as `__main__`: what is guarded by `if __name__ == "__main__"` does not run.
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None

    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module


def put_on_path(path: Path) -> str:
    """Put the folder of a task or script first on the path, as Python does, and return a module name for the file.

    A file that is called like a standard module (html.py), like torch, or like a package that is in use must not take
    its place: libraries that import it later would get the user's file.
    """
    name = path.stem
    if name in sys.stdlib_module_names or name == "torch":
        importlib.import_module(name)  # while it can still be found

    folder = str(path.resolve().parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)

    in_use = name in sys.stdlib_module_names or hasattr(sys.modules.get(name), "__path__")
    return f"{name}_file" if in_use else name


# ---- the object ----


def make_task(kind: type[Any], options: Mapping[str, Any]) -> Any:
    """Construct the task with `task.*` as keyword arguments; raise the problems of all of them at once."""
    parameters = _named_parameters(kind)
    if parameters is None:
        return kind(**options)

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
            problems.append(UserError(f"task.{name} is not set, and it has no default", "", f"set task.{name}=..."))

    if problems:
        raise ConfigError(problems)

    return kind(**values)


def _named_parameters(kind: type[Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of the constructor, or None if its `**options` may have any name."""
    parameters = dict(_signature(kind).parameters)
    others = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    if others is None:
        return parameters

    if get_origin(others.annotation) is not Unpack:
        return None

    # `**options: Unpack[TypedDict]` lists the names and their types. None of them is required.
    del parameters[others.name]
    (options,) = get_args(others.annotation)
    for name, annotation in get_type_hints(options).items():
        parameters[name] = inspect.Parameter(name, others.KEYWORD_ONLY, default=None, annotation=annotation)

    return parameters


def _signature(kind: type[Any]) -> inspect.Signature:
    # With types in place of their names, where they can be found.
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
    near = nearest_name(key, names)
    known = ", ".join(f"task.{name}" for name in names) or "none"
    return UserError(
        f"task.{key} is not an option of {kind.__name__}",
        f"its options are {known}",
        f"set task.{near}=..." if near else f"leave task.{key} out",
    )


def _wrong_type(key: str, value: Any, wanted: Any) -> UserError:
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    problem = f"task.{key}={value!r} must be of type {name}, not {type(value).__name__}"

    # Perhaps a text was meant: YAML reads words such as none, off and yes, and numbers, as something else.
    takes_text = any(kind is str or isinstance(kind, str) for kind in (wanted, *get_args(wanted)))
    if takes_text and isinstance(value, (type(None), bool, int, float)):
        word = {"None": "none", "True": "on", "False": "off"}.get(repr(value), repr(value))
        return UserError(
            problem,
            "words like none, off, yes and numbers, which YAML does not read as text",
            f"give it a value of type {name}; if the word itself is meant, quote it: task.{key}='\"{word}\"'",
        )

    return UserError(problem, "", f"give it a value of type {name}")
