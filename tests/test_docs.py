"""Every code block of every page runs, so that no page can go stale.

python    Runs, in order; the blocks of a page share their names. After `print(x)  # text` the text must be printed.
          A block that begins with `# file: NAME` is written to that file instead.
console   Each line `$ command` runs and must succeed. The lines below it are parts of what it prints, in order;
          `...` stands for anything. `make` commands only have to be targets of the Makefile.
yaml      Must be a valid configuration; one that begins with `# file: NAME` is written to that file too.
text      Is not run. Any other kind of block fails.

A page has a fresh process and a temporary folder of its own, with a copy of examples/ in it. The command `lockstep` is
forked from a process that has imported torch (preloaded.py); in `make test-long` every command is a fresh process.
"""

from __future__ import annotations

import html
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
import types
import typing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import preloaded
from lockstep.config import KEYS, read_file, resolve
from lockstep.config.schema import SECTIONS, typed
from lockstep.registries import REGISTRIES
from ports import free_port

ROOT = Path(__file__).parent.parent
# The log holds what was measured once, on machines that are not here: it is a record, not a page to follow.
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != "LOG.md"
]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
COMMAND_S = 240  # most seconds for one command; on an idle machine none takes ten


# ---- reading a page -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    kind: str
    line: int  # of the page, where the code begins
    code: str

    @property
    def file(self) -> str | None:
        named = re.match(r"# file: (\S+)\n", self.code)
        return named and named[1]


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    kind, first, code = "", 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        if not first and (opened := re.fullmatch(r"```(python|console|yaml|text)", line)):
            kind, first, code = opened[1], number + 1, []
        elif first and line == "```":
            found.append(Block(kind, first, "".join(f"{part}\n" for part in code)))
            first = 0
        else:
            assert "```" not in line, f"line {number}: {line!r} opens no python, console, yaml or text block"
            assert "~~~" not in line, f"line {number}: {line!r} may open a block that nobody runs"
            code.append(line)
    assert not first, f"line {first}: this block has no end"
    return found


def commands_of(code: str) -> list[tuple[str, list[str]]]:
    """(command, what it should print) of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"{line!r} comes before any command"
            found[-1][1].append(line)
    return found


def assert_printed(output: str, expected: list[str]) -> None:
    """Every expected line is part of a printed one, in order; the width of gaps does not matter."""
    printed = "\n".join(" ".join(line.split()) for line in output.splitlines())
    at = 0
    for line in expected:
        pattern = re.escape(" ".join(line.split())).replace(re.escape("..."), ".*")
        match = re.compile(pattern).search(printed, at)
        assert match, f"not printed: {line!r}\n---- printed was\n{output}"
        at = match.end()


# ---- running a page, in a process of its own ------------------------------------------------------------


def run_page(text: str, folder: Path, server: str | None) -> None:
    """`server` is the socket of preloaded commands; without one every command is a fresh process."""
    _settle_in(folder, server)
    names: dict[str, Any] = {"__name__": "__main__"}
    runners = {"python": _run_python, "console": _run_console, "yaml": _check_yaml}
    for block in blocks_of(text):
        if block.file:
            Path(block.file).write_text(block.code)
        if block.kind == "text" or (block.kind == "python" and block.file):
            continue
        try:
            runners[block.kind](block, names)
        except BaseException:  # whatever a page does, the process that tests it must tell
            raise AssertionError(f"the {block.kind} block at line {block.line}\n{traceback.format_exc()}") from None


def _settle_in(folder: Path, server: str | None) -> None:
    """The folder, the command on the PATH, and one kind of machine: a CPU with one thread."""
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the page's own processes start as they usually do
    bin_dir, output = folder.parent / "bin", folder.parent / "output"
    shutil.copytree(ROOT / "examples", folder / "examples")
    bin_dir.mkdir()
    if server:
        preloaded.shim(server, bin_dir / "lockstep")
    elif not (Path(sys.executable).parent / "lockstep").exists():  # not installed: a checkout on PYTHONPATH
        (bin_dir / "lockstep").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lockstep.cli "$@"\n')
        (bin_dir / "lockstep").chmod(0o755)
    path = [str(bin_dir), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    python_path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(filter(None, python_path))}
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    os.environ["PET_MASTER_PORT"] = str(free_port())  # torchrun's own choice is always the same one
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with output.open("wb") as file:  # worker processes write there too
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _run_python(block: Block, names: dict[str, Any]) -> None:
    output = Path.cwd().parent / "output"
    before = output.stat().st_size
    padded = "\n" * (block.line - 1) + block.code  # so that a traceback gives the page's own line
    exec(compile(padded, "<page>", "exec"), names)
    sys.stdout.flush()
    expected = re.findall(r"^ *print\(.*\)  # (.+)$", block.code, re.M)
    assert_printed(output.read_bytes()[before:].decode(), expected)


def _run_console(block: Block, names: dict[str, Any]) -> None:
    for command, expected in commands_of(block.code):
        if command.startswith("make "):
            unknown = set(command.split()[1:]) - set(TARGETS)
            assert not unknown, f"{command}: the Makefile has no target {unknown}"
            continue
        here = re.sub(r"(?<=127\.0\.0\.1:)\d+", str(free_port()), command)  # the page's own port may be taken
        code, output = _run_command(here)
        assert code == 0, f"{command}: exit code {code}\n{output}"
        assert_printed(output, expected)


def _run_command(command: str) -> tuple[int, str]:
    """Its exit code and what it printed; past its limit nothing of it stays behind, also not in the background."""
    output = Path.cwd().parent / "command"
    with output.open("wb") as file:
        process = subprocess.Popen(["bash", "-c", command], stdout=file, stderr=file, start_new_session=True)
    try:
        code = process.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{command}: no end after {COMMAND_S} s\n{output.read_text()}") from None
    return code, output.read_text()


def _check_yaml(block: Block, names: dict[str, Any]) -> None:
    path = Path("checked.yaml")
    path.write_text(block.code)
    resolve([("this block", read_file(path))])


# ---- the pages ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts a page in a process of its own; two at a time. Torch is imported once, before the processes fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "safetensors.torch", "cloudpickle", "lockstep.api", "lockstep.engine.setup"]
    )
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:

        def start(text: str) -> Future[None]:
            folder = tmp_path_factory.mktemp("page") / "checkout"
            folder.mkdir()
            server = None if preloaded.fresh() else preloaded.server().path
            return pool.submit(run_page, text, folder, server)

        yield start


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, jobs: Any) -> dict[str, Future[None]]:
    """All pages that were asked for, started together."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    chosen = {item.callspec.params["page"] for item in items if item.originalname == "test_every_block_runs"}
    return {page: jobs((ROOT / page).read_text()) for page in PAGES if page in chosen}


@pytest.mark.timeout(900)  # a page runs up to a dozen commands, each with its own limit
@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page, runs):
    runs[page].result()


WRONG = {
    "no kind": "```\nx = 1\n```",
    "unknown kind": "```bash\ntrue\n```",
    "indented": "- like this:\n\n  ```python\n  x = 1\n  ```",
    "other fence": "~~~python\nx = 1\n~~~",
    "no end": "```python\nx = 1",
    "raises": "```python\nx = 1 / 0\n```",
    "exits": "```python\nraise SystemExit\n```",
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


def test_a_wrong_page_fails_and_a_right_one_does_not(jobs):
    """A check that cannot fail would be worth nothing."""
    wrong = {name: jobs(text) for name, text in WRONG.items()}
    right = jobs(RIGHT)
    assert [name for name, job in wrong.items() if not isinstance(job.exception(), AssertionError)] == []
    right.result()


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
    return {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}[kind]


def takes_of(key: str) -> str:
    """A setting that names an entry of a registry takes the names that are in it."""
    if key not in REGISTRIES:
        return takes(KEYS[key].annotation)
    names = takes(Literal[*REGISTRIES[key]])
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


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_files_that_a_page_names_exist(page):
    sections = "|".join(SECTIONS - {"task"})
    for code in inline_code(page):
        if key := re.fullmatch(rf"((?:{sections})\.\w+)(=\S*)?", code):
            assert key[1] in KEYS, f"{page} names {code}"
        if re.fullmatch(r"[\w/]+\.py", code) and "/" in code:
            assert (ROOT / code).exists() or (ROOT / "src/lockstep" / code).exists(), f"{page} names {code}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
    assert [link for link in links if not (folder / link).exists()] == []
