"""What a TARGET names: a recipe, `file.py:Class`, or a script with a loop of its own."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from lockstep.config import Layer, Resolved, flatten
from lockstep.config.conflicts import PREPARED, by_a_run
from lockstep.errors import ConfigError, UserError

if TYPE_CHECKING:
    from lockstep.task import OnlyWith

RECIPES = Path(__file__).parent / "recipes"
CONTRACT = ("model", "data", "loss", "optimizer", "defaults", "presets", "unit")  # what every task has, see task.py


def recipes() -> dict[str, str]:
    """Name -> first line of its description, without importing anything."""
    found = {}
    for package in sorted(RECIPES.glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(package.read_text())) or ""
        found[package.parent.name] = text.partition("\n")[0]
    return found


def is_script(target: str) -> bool:
    return target.endswith(".py")


def name_of(target: str) -> str:
    """For the run folder: `char_lm`, or the class or file name in lower case."""
    return Path(target.rpartition(":")[2]).stem.lower()


def check(target: str) -> None:
    """Everything about a target that can be known without importing it."""
    path, colon, class_name = target.rpartition(":")
    if is_script(target) or colon:
        file = Path(target if is_script(target) else path)
        if not file.is_file():
            raise UserError(f"the target {target!r}", f"no file {file}", "type FILE.py:CLASS, with a path that exists")
        if is_script(target) and not any(call in file.read_text() for call in ("start(", "fit(")):
            tasks = [f"{target}:{name}" for name in _task_names(file.read_text())]
            raise UserError(
                f"the target {target!r}",
                "a script that never calls lockstep.start or lockstep.fit, so it would train nothing",
                f"type {' or '.join(tasks)}" if tasks else "wrap its loop with lockstep.start: see docs/own_loop.md",
            )
        if colon and not class_name.isidentifier():
            raise UserError(f"the target {target!r}", f"{class_name!r} is no class name", f"type {path}:MyTask")
        return
    names = recipes()
    if target not in names:
        near = difflib.get_close_matches(target, names, n=1)
        raise UserError(
            f"the target {target!r}",
            f"no recipe of that name; there are: {', '.join(names)}",
            f"type {near[0]}" if near else "type the name of a recipe, FILE.py:CLASS, or SCRIPT.py",
        )


def _task_names(source: str) -> list[str]:
    """The classes of a file that are derived from Task, without importing it."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return []
    known = ["Task"]
    for node in body:
        if isinstance(node, ast.ClassDef) and {ast.unparse(b).rpartition(".")[2] for b in node.bases} & {*known}:
            known.append(node.name)
    return known[1:]


def load_class(target: str) -> type[Any]:
    check(target)
    if is_script(target):
        raise UserError(
            f"the target {target!r}",
            "a script with a loop of its own, which says its configuration only when it runs",
            f"type {target}:CLASS, or look at config.yaml in its run folder",
        )
    path, colon, class_name = target.rpartition(":")
    if not colon:
        return importlib.import_module(f"lockstep.recipes.{target}").TASK
    module = _load_file(Path(path))
    found = getattr(module, class_name, None)
    if not _is_task(found):
        own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
        classes = [value.__name__ for value in own if _is_task(value)]
        if isinstance(found, type):
            lacks = ", ".join(name for name in CONTRACT if not hasattr(found, name))
            raise UserError(
                f"the class {class_name} in {path}",
                f"no task: it lacks {lacks}",
                f"type {path}:{classes[0]}" if classes else f"write class {class_name}(lockstep.Task)",
            )
        near = difflib.get_close_matches(class_name, classes, n=1)
        raise UserError(
            f"the class {class_name} in {path}",
            f"the tasks {', '.join(classes) or 'none'}",
            f"type {path}:{near[0] if near else 'MyTask'}",
        )
    return cast(type, found)


def _is_task(value: Any) -> bool:
    """Whether it was derived from Task, or has all that a task has."""
    return isinstance(value, type) and all(hasattr(value, name) for name in CONTRACT)


def make_task(kind: type[Any], options: Mapping[str, Any]) -> Any:
    """The task, with `task.*` as its constructor's keyword arguments; all wrong ones are named at once."""
    parameters = _signature(kind).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return kind(**options)
    problems, values = [], {}
    for key, value in options.items():
        if key not in parameters:
            problems.append(_unknown_option(kind, key, list(parameters)))
            continue
        try:
            values[key] = _converted(value, parameters[key].annotation)
        except ValueError:  # pydantic's ValidationError is one
            problems.append(_wrong_type(key, value, parameters[key].annotation))
    for name, p in parameters.items():
        if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and name not in options:
            problems.append(UserError(f"task.{name}", "no value", f"type task.{name}=..."))
    if problems:
        raise ConfigError(problems)
    return kind(**values)


def settled(kind: type[Any], resolved: Resolved) -> Resolved:
    """Without options that do not count beside what was asked for, where nobody has typed them for it: those of a
    preset or of the task itself, of a configuration that a run has written, and of a weaker source than what switches
    them off. The others are refused."""
    from lockstep.task import option_defaults, refusals

    rules, task = getattr(kind, "option_rules", ()), dict(resolved.config.task)
    if not rules or not task:
        return resolved
    defaults = option_defaults(kind)
    layer = {name: _layer(resolved.layers, name) for name in task}
    pairs = [(rule, name) for rule in rules for name in rule.options]

    def unread(rule: OnlyWith, name: str) -> bool:
        return name in task and name in rule.idle(defaults | task) and _untyped(rule, name, layer, resolved.layers)

    while found := next((pair for pair in pairs if unread(*pair)), None):
        rule, name = found
        del task[name]
        layer[name] = layer.get(rule.of, -1)  # it is as that wants it
    if problems := refusals(kind, rules, task):
        raise ConfigError(list(problems.values()))
    gone = tuple(f"task.{name}." for name in resolved.config.task.keys() - task.keys())
    sources = {key: source for key, source in resolved.sources.items() if not f"{key}.".startswith(gone)}
    return replace(resolved, config=resolved.config.model_copy(update={"task": task}), sources=sources)


def _untyped(rule: OnlyWith, name: str, layer: Mapping[str, int], layers: Sequence[Layer]) -> bool:
    """Whether nobody has asked for an option beside what switches it off. `layer`: which one has set it."""
    source, values = layers[layer[name]]
    weaker = layer[name] < layer.get(rule.of, -1)
    return source.startswith(PREPARED) or (rule.refused and (weaker or by_a_run(values)))


def _layer(layers: Sequence[Layer], name: str) -> int:
    """The strongest one that sets an option."""
    sets = [any(f"{key}.".startswith(f"task.{name}.") for key in flatten(values)) for _, values in layers]
    return max(place for place, here in enumerate(sets) if here)


def _signature(kind: type[Any]) -> inspect.Signature:
    try:
        return inspect.signature(kind, eval_str=True)
    except NameError:  # annotations whose names only a type checker imports
        return inspect.signature(kind)


def _converted(value: Any, wanted: Any) -> Any:
    """`value` as the annotation wants it: a list may become a tuple, a text a Path, but "8" never becomes 8."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter

    if wanted is inspect.Parameter.empty or isinstance(wanted, str):
        return value
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
        f"task.{key}",
        f"{kind.__name__} takes no such argument; it takes {known}",
        f"type task.{near[0]}=..." if near else f"leave task.{key} out",
    )


def _wrong_type(key: str, value: Any, wanted: Any) -> UserError:
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    takes_text = any(one is str or isinstance(one, str) for one in (wanted, *get_args(wanted)))
    if takes_text and isinstance(value, (type(None), bool, int, float)):
        word = {"None": "none", "True": "on", "False": "off"}.get(repr(value), repr(value))
        return UserError(
            f"task.{key}={value!r}",
            f"a value of type {type(value).__name__}: YAML reads words like none, off, yes and numbers as no text",
            f"give it one of type {name}; if the word itself is meant, quote it: task.{key}='\"{word}\"'",
        )
    return UserError(f"task.{key}={value!r}", f"a value of type {type(value).__name__}", f"give it one of type {name}")


def _load_file(path: Path) -> Any:
    """Import a file by its path, so that its own folder's modules can be imported too."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module
