"""Runs the code blocks of one page, in order, for tests/test_docs.py.

python    Runs, in order; the blocks of a page share their names. After `print(x)  # text` the text must be printed.
          A block that begins with `# file: NAME` is written to that file instead.
console   Each line `$ command` runs and must succeed. The lines below it are parts of what it prints, in order;
          `...` stands for anything. `make` commands only have to be targets of the Makefile.
yaml      Must be a valid configuration; one that begins with `# file: NAME` is written to that file too.
text      Is not run. Any other kind of block fails.

A page has a process and a temporary folder of its own, with a copy of examples/ and lab/ in it. This process and the
commands `lockstep`, `python` and `torchrun` are forked from one that has imported torch (preloaded.py); in
`make test-long` each is a fresh process.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preloaded
from ports import free_port

ROOT = Path(__file__).parent.parent
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
COMMAND_S = 240  # most seconds for one command; on an idle machine none takes ten
ENDED = "ended"  # a file beside the page's folder: what went wrong, or nothing


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
    bin_dir, output = folder.parent / "bin", folder.parent / "output"
    for name in ("examples", "lab"):
        shutil.copytree(ROOT / name, folder / name)
    bin_dir.mkdir()
    if server:
        preloaded.shims(server, bin_dir)
    elif not (Path(sys.executable).parent / "lockstep").exists():  # not installed: a checkout on PYTHONPATH
        (bin_dir / "lockstep").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lockstep.cli "$@"\n')
        (bin_dir / "lockstep").chmod(0o755)
    path = [str(bin_dir), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    python_path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(filter(None, python_path))}
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    os.environ["SLURM_CONF"] = "/dev/null"  # no page depends on a cluster that this machine may belong to
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
    from lockstep.config import read_file, resolve

    path = Path("checked.yaml")
    path.write_text(block.code)
    resolve([("this block", read_file(path))])


def main(page: str, place: str, server: str) -> None:
    folder = Path(place)
    try:
        run_page(Path(page).read_text(), folder, server or None)
    except AssertionError as error:
        (folder.parent / ENDED).write_text(str(error) or "an assertion without a word")
    else:
        (folder.parent / ENDED).touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
