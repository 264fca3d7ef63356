"""`lockstep` commands without the seconds of CPU time that importing torch takes in each of them.

    process = preloaded.Command("train", "char_lm", env=..., cwd=..., stdout=file)    # a `subprocess.Popen`, nearly
    done = preloaded.run("train", "char_lm", cwd=..., env=...)                       # a `subprocess.run`, nearly

A server, one for each session of pytest, has imported torch and other packages, and nothing of Lockstep. Every command
is forked from it, as a session of its own, with the environment, the folder and the files that were asked for; it then
runs `lockstep.cli` as `python -m lockstep.cli` does, from the sources on its own PYTHONPATH. The launcher's zygote is
forked before that, as a child of the command, so that the tree of processes is the real one, too.

What this cannot show is that a fresh Python finds all it needs: tests/test_api.py, tests/unit/test_cli.py and
LOCKSTEP_FRESH=1 (every command a fresh process; in `make test-long`) do.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.nn",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "safetensors.torch",
    "cloudpickle",
    "psutil",
    "pydantic",
    "yaml",
)
ZYGOTE = "lockstep.launch.zygote"
START_S = 120.0  # for importing torch, on a busy machine
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<q")


def _send(line: socket.socket, message: dict[str, Any], files: list[int]) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(line, [_LENGTH.pack(len(data))], files)
    line.sendall(data)


def _receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """A message and the files that came with it; None at the end of the line."""
    head, files, _, _ = socket.recv_fds(line, _LENGTH.size, 8)
    if not head:
        return None
    data = _exactly(line, _LENGTH.unpack(head + _exactly(line, _LENGTH.size - len(head)))[0])
    return json.loads(data), list(array.array("i", files))


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other end is gone")
        data += part
    return data


# ---- in a test --------------------------------------------------------------------------------------------


class Server:
    """The process from which commands are forked, and the socket at which it is asked."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-preloaded-")
        self.path = os.path.join(self._folder.name, "socket")
        # By a path that stacks leave out, as they leave out the frames of a fresh Python: tests compare stacks.
        script = Path(self._folder.name) / "importlib" / "preloaded.py"
        script.parent.mkdir()
        script.symlink_to(__file__)
        # It ends when this process does, however that happens: the other end of its standard input is closed then.
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), "serve", self.path]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        assert ready, "the server of preloaded commands did not start"
        assert self._process.stdout.readline() == b"ready\n"


_server: Server | None = None


def server() -> Server:
    """The session's server; it starts with the first call."""
    global _server
    if _server is None:
        _server = Server()
    return _server


def fresh() -> bool:
    """Whether every command shall be a fresh process."""
    return bool(os.environ.get("LOCKSTEP_FRESH"))


class Command:
    """One forked `lockstep` command; it has what tests use of a `subprocess.Popen`."""

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdout: Any = None,
        stderr: Any = None,
        path: str | None = None,
    ):
        self.args, self.returncode = list(words), None
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(path or server().path)
        out = 1 if stdout is None else stdout if isinstance(stdout, int) else stdout.fileno()
        err = 2 if stderr is None else stderr if isinstance(stderr, int) else stderr.fileno()
        with open(os.devnull) as nothing:
            files = [nothing.fileno() if path is None else 0, out, out if err == subprocess.STDOUT else err]
            request = {"words": words, "env": dict(env), "cwd": os.path.abspath(cwd or os.getcwd())}
            _send(self._line, request, files)
        (self.pid,) = _PID.unpack(_exactly(self._line, _PID.size))

    def poll(self) -> int | None:
        return self._await(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._await(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _await(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            self.returncode = _PID.unpack(_exactly(self._line, _PID.size))[0]
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start(*words: str, env: Mapping[str, str], cwd: str | Path, stdout: Any, stderr: Any) -> Any:
    """A `lockstep` command that leads a session of its own: a `Command`, or a fresh process."""
    if fresh():
        command = [sys.executable, "-m", "lockstep.cli", *words]
        return subprocess.Popen(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr, start_new_session=True)
    return Command(*words, env=env, cwd=cwd, stdout=stdout, stderr=stderr)


def run(
    *words: str, env: Mapping[str, str], cwd: str | Path, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """A `lockstep` command from its start to its end, with what it printed."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(*words, env=env, cwd=cwd, stdout=output, stderr=errors)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(words), code, output.read().decode(), errors.read().decode())


def shim(path: str, file: Path) -> None:
    """Write the command `lockstep`, for a folder on the PATH of a shell."""
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{__file__}" command "{path}" "$@"\n')
    file.chmod(0o755)


def be_a_command(path: str, words: list[str]) -> None:
    """Stand in for a command: hand on signals, and end as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    command = Command(*words, env=os.environ, path=path)
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: command.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = command.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# ---- in the server ----------------------------------------------------------------------------------------


def serve(path: str) -> Callable[[], None]:
    """Fork commands until the session ends. Returns only in processes that have been forked: what they shall run."""
    import gc
    import importlib

    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    assert not any(name.partition(".")[0] == "lockstep" for name in sys.modules), "Lockstep itself comes fresh"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its children need not be waited for
    door = socket.socket(socket.AF_UNIX)
    door.bind(path)
    door.listen(64)
    os.write(1, b"ready\n")
    while True:
        readable, _, _ = select.select([door, 0], [], [])
        if 0 in readable:
            os._exit(0)
        line, _ = door.accept()
        if os.fork() == 0:
            door.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _keep(line)
        line.close()


def _keep(line: socket.socket) -> Callable[[], None]:
    """Fork the command, report how it ended, and end it when nobody waits for it any more."""
    received = _receive(line)
    if received is None:
        os._exit(0)
    request, files = received
    pid = os.fork()
    if pid == 0:
        line.close()
        return _settle_in(request, files)
    for file in files:
        os.close(file)
    os.close(1)
    line.sendall(_PID.pack(pid))
    ended = os.pidfd_open(pid)
    readable, _, _ = select.select([ended, line], [], [])
    if ended not in readable:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    try:
        line.sendall(_PID.pack(os.waitstatus_to_exitcode(status)))
    finally:
        os._exit(0)


# ---- in a command -----------------------------------------------------------------------------------------


def _settle_in(request: dict[str, Any], files: list[int]) -> Callable[[], None]:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _move(request["env"], request["cwd"])
    ours, theirs = socket.socketpair()
    zygote = os.fork()
    if zygote == 0:
        ours.close()
        return _zygote(theirs)
    theirs.close()
    subprocess.Popen = _popen(ours, zygote)  # pyrefly: ignore
    return lambda: _run_module("lockstep.cli", request["words"])


def _move(env: Mapping[str, str], folder: str) -> None:
    """What a fresh Python reads from its environment."""
    before = {os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part}
    before.add(os.path.dirname(os.path.realpath(__file__)))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    asked = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [folder, *asked, *(part for part in sys.path if os.path.abspath(part) not in before)]
    if env.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # pyrefly: ignore
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or every command would draw the same


def _zygote(line: socket.socket) -> Callable[[], None]:
    """Wait until the launcher starts its zygote, and become it; or until it has ended without one."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # sent to the whole session before there is a zygote
    try:
        received = _receive(line)
    except ConnectionResetError:
        received = None
    if received is None:
        os._exit(0)
    request, files = received
    for number in FORWARDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    line.close()
    os.setsid()
    for file, number in zip(files, request["files"], strict=True):
        if file != number:
            os.dup2(file, number)
            os.close(file)
        os.set_inheritable(number, True)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    _move(request["env"], request["cwd"])
    return lambda: _run_module(ZYGOTE, request["words"])


def _popen(line: socket.socket, zygote: int) -> Any:
    import inspect

    real: Any = subprocess.Popen
    parameters = inspect.signature(real._execute_child)

    class Popen(real):
        """The first zygote is the process that waits to become one; everything else starts as it always does."""

        def _execute_child(self, args: Any, *rest: Any) -> None:
            words = [] if isinstance(args, str) else list(args)
            if words[1:3] != ["-m", ZYGOTE] or line.fileno() < 0:
                super()._execute_child(args, *rest)
                return
            given = parameters.bind(self, args, *rest).arguments
            env = os.environ if given["env"] is None else given["env"]
            files = list(given["pass_fds"])
            _send(line, {"words": words[3:], "env": dict(env), "cwd": os.getcwd(), "files": files}, files)
            line.close()
            self.pid, self._child_created = zygote, True

    return Popen


def _run_module(name: str, words: list[str]) -> None:
    import runpy
    import warnings

    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    if mode == "command":
        be_a_command(place, rest)
    work = serve(place)
    work()  # here, where the stack holds nothing of the server's
