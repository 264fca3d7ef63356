"""The YAML that we read and write. Both follow the same rules, so that what we write is read back unchanged.

YAML 1.1 reads 1e-4 as text, 010 as eight, 16:9 as 969 and 2024-01-01 as a date. Here the first is a number, and the
others are text.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import yaml
from yaml.composer import Composer

from lockstep.config.schema import RunConfig
from lockstep.config.settings import flatten, nested
from lockstep.errors import UserError

# Numbers as in JSON and Python, with hexadecimal and binary integers. No octals, no base 60.
_EXPONENT = r"[eE][-+]?[0-9]+"
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+)$",
    "tag:yaml.org,2002:float": rf"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)({_EXPONENT})?$"
    rf"|[-+]?[0-9][0-9_]*{_EXPONENT}$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
}

# PyYAML's other rules that we keep. The rule for dates is not among them.
_KEPT = {f"tag:yaml.org,2002:{name}" for name in ("bool", "null", "merge")}


def _scalar_rules() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return first character -> (tag, pattern) of plain words that are not text, in PyYAML's own form."""
    rules = {
        first: [rule for rule in old if rule[0] in _KEPT]
        for first, old in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in _NUMBERS.items():
        for first in "+-.0123456789":
            rules.setdefault(first, []).append((tag, re.compile(pattern)))

    return rules


class _Composer(Composer):
    """Reads our dialect and refuses a key that is set twice (PyYAML would keep the last value)."""

    yaml_implicit_resolvers = _scalar_rules()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # The only place where a key and its line are still known.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)

            seen.add(key.value)

        return node


class _Loader(_Composer, yaml.SafeLoader):
    """Reads files that people write. PyYAML's own parser explains mistakes better than libyaml's."""


class _ComposerWithoutAliases(_Composer):
    """Refuses aliases, which a short text needs to stand for a huge value. Our own files have none."""

    check_event: Any  # of the parser
    peek_event: Any

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias (*name)", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


# For our own files: libyaml, which most builds of PyYAML have, takes a tenth of the time.
if yaml.__with_libyaml__:

    class _OwnLoader(_ComposerWithoutAliases, yaml.CSafeLoader):
        def __init__(self, text: str):
            Composer.__init__(self)
            yaml.CSafeLoader.__init__(self, text)

    _SafeDumper: Any = yaml.CSafeDumper

else:

    class _OwnLoader(_ComposerWithoutAliases, yaml.SafeLoader):
        pass

    _SafeDumper = yaml.SafeDumper


class _Dumper(_SafeDumper):
    yaml_implicit_resolvers = _scalar_rules()

    def ignore_aliases(self, data: Any) -> bool:
        return True  # a list that two keys share is written twice, not as &id001


# A path is written as text, which is how it was typed.
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def load(text: str, aliases: bool = True) -> Any:
    return yaml.load(text, Loader=_Loader if aliases else _OwnLoader)


def word(text: str) -> Any:
    """Return the scalar that a plain word stands for: `8` is a number, `off` is false, `a: b` is text."""
    # "<<" is YAML's merge key, which has no meaning here.
    tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))
    return text if text == "<<" else _Loader("").construct_object(yaml.ScalarNode(tag, text))


def to_yaml(config: RunConfig) -> str:
    """Return all values, in a form that `read_file` reads back."""
    # A Python caller may have put any object under task.*.
    try:
        return yaml.dump(nested(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        key = next((key for key, leaf in flatten(config).items() if leaf is value), "task")
        raise UserError(
            f"the configuration cannot be saved: YAML cannot hold {key}, a {type(value).__name__} object",
            "",
            "give it plain numbers, texts or lists",
        ) from None
