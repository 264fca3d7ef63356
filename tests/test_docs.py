"""Every code block of every page runs, so that no page can go stale: tests/pages.py does that, in a process of its own
for each page."""

from __future__ import annotations

import html
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import pytest

import preloaded
from lockstep.config import KEYS
from lockstep.config.schema import RENAMED, SECTIONS
from lockstep.config.settings import typed
from lockstep.engine.checks.names import REGISTRIES, USER_CLASSES
from pages import ENDED, ROOT

# The log holds what was measured once, on machines that are not here: it is a record, not a page to follow.
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (*sorted(ROOT.glob("*.md")), ROOT / "lab" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != "LOG.md"
]
# Pages that train, verify or measure whole models, or train with another library, for `make test-long`. What they show
# has faster tests of its own.
LONG_PAGES = {
    "docs/bench.md",
    "docs/ports.md",
    "docs/projects.md",
    "docs/huggingface.md",
    "docs/howto/from_trainer.md",
    "docs/howto/from_accelerate.md",
    "docs/howto/from_lightning.md",
    "docs/howto/gan.md",
    "docs/howto/lora.md",
}
PAGE_S = 880  # most seconds for one page, which runs up to a dozen commands, each with its own limit
FITS = 8  # most calls of lockstep.fit in the Python blocks of one page: each starts a process that needs torch


# ---- the pages ------------------------------------------------------------------------------------------


Start = Callable[[str], Future[str]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a page in a process of its own, two at a time, for what went wrong in it: nothing, if all is well."""
    server = "" if preloaded.fresh() else preloaded.server()
    tmp_path_factory.getbasetemp()  # made here, since two threads that make it at the same time fail
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))}

    def run(text: str) -> str:
        place = tmp_path_factory.mktemp("page")
        (place / "checkout").mkdir()
        (place / "page.md").write_text(text)
        words = (str(ROOT / "tests" / "pages.py"), str(place / "page.md"), str(place / "checkout"), server)
        fits = FITS if re.search(r"\bnproc\b[\"']? ?[=:,)]", text) else 0  # each one is forked, needed or not
        done = preloaded.run_python(*words, cwd=place, env=env, timeout=PAGE_S, spares=fits)
        ended = place / ENDED
        return ended.read_text() if ended.exists() else f"the page ended its process\n{done}"

    with ThreadPoolExecutor(2) as pool:
        yield lambda text: pool.submit(run, text)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, start: Start) -> dict[str, Future[str]]:
    """All pages that were asked for, started together."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = {item.callspec.params["page"] for item in items if item.originalname == "test_every_block_runs"}
    return {page: start((ROOT / page).read_text()) for page in PAGES if page in chosen}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.long] * (page in LONG_PAGES)) for page in PAGES]
)
def test_every_block_runs(page, runs):
    assert runs[page].result() == ""


WRONG = {
    "no kind": "```\nx = 1\n```",
    "unknown kind": "```bash\ntrue\n```",
    "indented": "- like this:\n\n  ```python\n  x = 1\n  ```",
    "other fence": "~~~python\nx = 1\n~~~",
    "no end": "```python\nx = 1",
    "raises": "```python\nx = 1 / 0\n```",
    "exits": "```python\nraise SystemExit\n```",
    "ends": "```python\nimport os\nos._exit(0)\n```",
    "prints something else": "```python\nprint(1 + 1)  # 3\n```",
    "fails": "```console\n$ false\n```",
    "shows something else": "```console\n$ echo one two\none ... three\n```",
    "wrong order": "```console\n$ printf 'one\\ntwo\\n'\ntwo\none\n```",
    "no command": "```console\nhello\n```",
    "no target": "```console\n$ make tea\n```",
    "unknown key": "```yaml\nstepz: 3\n```",
    "wrong file": "```yaml\n# file: a.yaml\nsteps: many\n```",
}
RIGHT = """
```python
# file: one.py
x = 1
```
```python
from one import x
y = x + 1
print("x is", x)  # x is 1
```
```console
$ cat one.py; ls examples; false || echo "exit code $?"
x = ...
train_torch.py
exit code 1
$ make test
```
```yaml
steps: 3
```
```python
print(y)  # 2
```
"""


def test_a_wrong_page_fails_and_a_right_one_does_not(start):
    """A check that cannot fail would be worth nothing."""
    wrong = {name: start(text) for name, text in WRONG.items()}
    right = start(RIGHT)
    assert [name for name, job in wrong.items() if not job.result()] == []
    assert right.result() == ""


# ---- what pages say about code --------------------------------------------------------------------------


def takes(kind: Any) -> str:
    """The values of a key, as one types them."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is typing.Annotated:
        return takes(inner[0])
    if origin in (typing.Union, types.UnionType):
        return ", ".join(takes(part) for part in inner if part is not type(None))
    if origin is list:
        return f"list of {takes(inner[0])}"
    if origin is dict and inner[1] is Any:
        return "mapping"
    if origin is dict:
        return f"{takes(inner[0])} by {takes(inner[1])}"
    return {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}[kind]


def takes_of(key: str) -> str:
    """A setting that names an entry of a registry takes the names that are in it."""
    if key not in REGISTRIES:
        return takes(KEYS[key].annotation)
    names = takes(Literal[*REGISTRIES[key]]) + (", MODULE:CLASS" if key in USER_CLASSES else "")
    return f"list of {names}" if typing.get_origin(KEYS[key].annotation) is list else names


def test_the_table_of_keys_is_the_schema():
    rows = [line for line in (ROOT / "docs" / "configuration.md").read_text().splitlines() if line.startswith("| `")]
    assert rows == table_of_keys()


def table_of_keys() -> list[str]:
    """After a change of the schema: print these, and paste them."""
    return [
        f"| `{key}` | `{typed(field.default)}` | {takes_of(key)} | {html.escape(field.description or '')} |"
        for key, field in KEYS.items()
    ]


def inline_code(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", text)


def test_messages_that_the_page_on_machines_explains_are_printed():
    """Each part of a message between two ellipses is in the sources, word for word."""
    text = (ROOT / "docs" / "multi_node.md").read_text().partition("## When something goes wrong")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.M)
    assert len(messages) >= 10
    sources = "\n".join(path.read_text() for path in (ROOT / "src" / "lockstep").rglob("*.py"))
    # A message may be continued on the next line of the source.
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    parts = [part for message in messages for part in re.split(r"\.\.\.", message)]
    assert [part for part in parts if part.strip() and part not in sources] == []


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_files_that_a_page_names_exist(page):
    sections = "|".join(SECTIONS - {"task"})
    keys = {*KEYS, *RENAMED} if page == "CHANGELOG.md" else KEYS
    for code in inline_code(page):
        if key := re.fullmatch(rf"((?:{sections})\.(?!safetensors)\w+)(=\S*)?", code):
            assert key[1] in keys, f"{page} names {code}"
        if re.fullmatch(r"[\w/]+\.py", code) and "/" in code:
            assert (ROOT / code).exists() or (ROOT / "src/lockstep" / code).exists(), f"{page} names {code}"


def test_the_changelog_has_the_new_name_of_every_old_key():
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert RENAMED.items() <= dict(rows).items()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
    assert [link for link in links if not link.startswith("https:") and not (folder / link).exists()] == []
