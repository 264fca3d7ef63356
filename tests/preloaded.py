"""`lockstep` and `python` commands without the seconds of CPU time that importing torch takes in each of them.

    process = preloaded.start("train", "char_lm", env=..., cwd=..., stdout=file, ...)  # a `subprocess.Popen`, nearly
    done = preloaded.run("train", "char_lm", cwd=..., env=...)                        # a `subprocess.run`, nearly
    done = preloaded.run_python("script.py", "--fast", cwd=..., env=...)              # the same, of `python`

A server, one for all workers of a session of pytest, has imported torch, other packages, and the modules of Lockstep
that most commands use: importing them has no effect, and takes a third of a short run. Every command is forked from it,
as a session of its own, with the environment, the folder and the files that were asked for; it then runs a script, a
module or a text as `python` does. If its own path leads to other sources of Lockstep, it imports those. Processes that
it may start with Python itself (the launcher's zygote, the ranks of torchrun) are forked before that, as children of
the command, so that the tree of processes is the real one, too.

What this cannot show is that a fresh Python finds all it needs: tests/test_api.py, tests/unit/test_cli.py and
LOCKSTEP_FRESH=1 (every command a fresh process; in `make test-long`) do.
"""

from __future__ import annotations

import array
import faulthandler
import fcntl
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.nn",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "numpy.ctypeslib",
    "safetensors.torch",
    "cloudpickle",
    "psutil",
    "pydantic.main",
    "pydantic.functional_validators",
    "pydantic.types",
    "yaml",
    "pydantic.type_adapter",
    "lockstep.api",
    "lockstep.bench.command",
    "lockstep.clusters.command",
    "lockstep.clusters.hosts",
    "lockstep.clusters.kubernetes",
    "lockstep.clusters.nodes",
    "lockstep.clusters.ray",
    "lockstep.clusters.slurm",
    "lockstep.engine.loop",
    "lockstep.engine.own_loop",
    "lockstep.lab.command",
    "lockstep.launch.supervisor",
    "lockstep.parallel.pipeline.auto_split",
    "lockstep.parallel.pipeline.pipeline",
    "lockstep.recipes.char_lm.task",
    "lockstep.skeletons",
    "lockstep.verify.command",
)
COMMAND = ("-m", "lockstep.cli")
TORCHRUN = ("-m", "torch.distributed.run")
ZYGOTE = "lockstep.launch.ranks.zygote"
OPTIONS = ("-P", "-u")  # of Python, which `_work` knows
SPARES = 3  # processes that wait to become one that a command starts; a `lockstep` command rarely starts a second one
LARGE_PAGES = "glibc.malloc.hugetlb=1"  # of what malloc gives: a fork takes a quarter less time
SERVERS = 2  # more than one for tests/pool.py, whose ranks shall differ in what differs between processes
SHARED = "PRELOADED_TEST_SERVERS"  # an environment variable: the sockets of the servers that all workers share
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STACKS = signal.SIGRTMIN + 7  # makes a process write the stacks of its threads to its standard error
STACKS_S = 2.0  # within this time; a process that is suspended does not answer
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
        # Commands may be asked for at once: they wait until everything is imported.
        door = socket.socket(socket.AF_UNIX)
        door.bind(self.path)
        door.listen(64)
        # It ends when this process does, however that happens: the other end of its standard input is closed then.
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": LARGE_PAGES}
        command = [sys.executable, str(script), "serve", str(door.fileno())]
        with door:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[door.fileno()],
                start_new_session=True,
            )


_servers: dict[int, Server] = {}


def server(number: int = 0) -> str:
    """The socket of one of the session's servers; it starts with the first call, if the workers do not share it."""
    if SHARED in os.environ:
        return os.environ[SHARED].split(os.pathsep)[number]
    if number not in _servers:
        _servers[number] = Server()
    return _servers[number].path


def share() -> None:
    """Start the servers for the workers that this process is going to start."""
    if not fresh():
        os.environ[SHARED] = os.pathsep.join([server(number) for number in range(SERVERS)])


def fresh() -> bool:
    """Whether every command shall be a fresh process."""
    return bool(os.environ.get("LOCKSTEP_FRESH"))


class Command:
    """One forked `python` command; it has what tests use of a `subprocess.Popen`."""

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdout: Any = None,
        stderr: Any = None,
        path: str | None = None,
        pass_fds: Sequence[int] = (),
        number: int = 0,
        spares: int | None = None,
    ):
        self.args, self.returncode = list(words), None
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(path or server(number))
        out = 1 if stdout is None else stdout if isinstance(stdout, int) else stdout.fileno()
        err = 2 if stderr is None else stderr if isinstance(stderr, int) else stderr.fileno()
        with open(os.devnull) as nothing:
            files = [nothing.fileno() if path is None else 0, out, out if err == subprocess.STDOUT else err, *pass_fds]
            request = {"words": words, "env": dict(env), "cwd": os.path.abspath(cwd or os.getcwd()), "spares": spares}
            _send(self._line, request | {"files": [0, 1, 2, *pass_fds], "new_session": True}, files)
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
            with suppress(ProcessLookupError):  # it has ended, and the process that says so has yet to say it
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(*words: str, env: Mapping[str, str], cwd: str | Path, stdout: Any, stderr: Any) -> Any:
    """A `lockstep` command that leads a session of its own: a `Command`, or a fresh process."""
    return start_python(*COMMAND, *words, env=env, cwd=cwd, stdout=stdout, stderr=stderr)


def start_python(
    *words: str, env: Mapping[str, str], cwd: str | Path, stdout: Any, stderr: Any, spares: int | None = None
) -> Any:
    """The same with any words that follow `python`: a script, -m and a module, or -c and a text."""
    if fresh():
        command = [sys.executable, *words]
        return subprocess.Popen(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr, start_new_session=True)
    return Command(*words, env=env, cwd=cwd, stdout=stdout, stderr=stderr, spares=spares)


def run(
    *words: str, env: Mapping[str, str], cwd: str | Path, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """A `lockstep` command from its start to its end, with what it printed."""
    return run_python(*COMMAND, *words, env=env, cwd=cwd, timeout=timeout)


def run_python(
    *words: str, env: Mapping[str, str], cwd: str | Path, timeout: float = 240.0, spares: int | None = None
) -> subprocess.CompletedProcess[str]:
    """The same with any words that follow `python`."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:

        def said(file: Any) -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        process = start_python(*words, env=env, cwd=cwd, stdout=output, stderr=errors, spares=spares)
        code = wait(process, timeout, lambda: said(output) + said(errors))
        return subprocess.CompletedProcess(list(words), code, said(output), said(errors))


def wait(process: Any, seconds: float, said: Callable[[], str]) -> int:
    """The exit code of a command; if it does not end, what it has said and where each of its processes is."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        give_up(process, f"it did not end within {seconds:.0f} s", said())


def give_up(process: Any, why: str, said: str) -> NoReturn:
    """Kill a command that hangs, and all that it has started; say where each of its processes is."""
    tree = _tree(process.pid)
    places = [f"--- process {pid}, started by {parent}, {_place(pid)}" for pid, parent in tree.items()]
    _kill(process.pid)
    raise AssertionError("\n".join([why, said, *places])) from None


def _tree(pid: int) -> dict[int, int]:
    """A process and all that it has started, also in sessions of their own, as torchrun's ranks are: with parents."""
    import psutil

    tree: dict[int, int] = {}
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                tree[process.pid] = process.ppid()
    return tree


def _kill(leader: int) -> None:
    """Kill the group that a process leads, and what it has started outside of that."""
    started = _tree(leader)
    for kill, pid in ((os.killpg, leader), *((os.kill, pid) for pid in started)):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _place(pid: int) -> str:
    """What a process waits for, and the stacks of its threads if it was forked from the server and is no spare."""
    folder = Path(f"/proc/{pid}")
    try:
        (caught,) = [line.split()[1] for line in (folder / "status").read_text().splitlines() if "SigCgt" in line]
        waits_in = f"in the kernel's {(folder / 'wchan').read_text()}"
        errors = folder / "fd" / "2"
        if not int(caught, 16) >> (STACKS - 1) & 1 or not errors.is_file():
            return waits_in
        before, deadline = errors.stat().st_size, time.monotonic() + STACKS_S
        os.kill(pid, STACKS)
        size = before
        while time.monotonic() < deadline and (size == before or size != errors.stat().st_size):
            size = errors.stat().st_size
            time.sleep(0.1)
        return f"{waits_in}\n{errors.read_bytes()[before:].decode(errors='replace')}"
    except (FileNotFoundError, ProcessLookupError):
        return "has ended meanwhile"


@contextmanager
def zygotes() -> Iterator[None]:
    """Let launchers of this process, that of `lockstep.fit` for one, have zygotes that are forked from the server."""
    from lockstep.launch.ranks import zygote_client

    def popen(words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> Command:
        assert _known(list(words)), words
        return Command(*words[1:], env=env, pass_fds=pass_fds)

    if fresh():
        yield
        return
    real = zygote_client.subprocess
    names = {"Popen": popen, "DEVNULL": real.DEVNULL, "TimeoutExpired": real.TimeoutExpired}
    zygote_client.subprocess = SimpleNamespace(**names)  # pyrefly: ignore
    try:
        yield
    finally:
        zygote_client.subprocess = real  # pyrefly: ignore


SHIMS = {"lockstep": COMMAND, "torchrun": TORCHRUN, "python": ()}


def shims(path: str, folder: Path) -> None:
    """Write the commands `lockstep`, `torchrun` and `python`, in a folder for the PATH of a shell."""
    for name, words in SHIMS.items():
        start = f'"{sys.executable}" -S -E "{__file__}" command "{path}"'
        (folder / name).write_text(f'#!/bin/sh\nexec {start} {" ".join(words)} "$@"\n')
        (folder / name).chmod(0o755)


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


def serve(number: str) -> Callable[[], None]:
    """Fork commands until the session ends. Returns only in processes that have been forked: what they shall run.

    They are asked for at a socket that this process has by this number.
    """
    import gc
    import importlib
    import weakref

    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    warm_up()
    gc.collect()
    gc.freeze()
    gc.enable()
    use_large_pages()
    for finalizer in list(weakref.finalize._registry):  # pyrefly: ignore
        finalizer.atexit = False  # torch's operators need not be deleted one by one at the end of every command
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its children need not be waited for
    door = socket.socket(fileno=int(number))
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


def warm_up() -> None:
    """Let Python and torch remember what each forked process would find out again: it writes where they remember it,
    and the kernel copies a page of memory for each place."""
    import sysconfig
    from collections.abc import Mapping

    import torch
    from torch.utils.data import IterableDataset, TensorDataset

    from lockstep.config import resolve

    # Whether a class is a kind of another: Python asks all subclasses of that, and remembers the answer.
    for kind in (bool, bytes, dict, float, int, list, str, tuple, type(None), torch.Tensor, torch.nn.Parameter):
        issubclass(kind, Mapping)
    issubclass(TensorDataset, IterableDataset)
    resolve([])

    # What torch looks for when it first records something, and what it forgets when a process group is made.
    with torch.profiler.record_function("warm-up"):
        pass
    torch._dynamo.trace_rules.clear_lru_cache()
    sysconfig.get_paths()
    put_names_together()


def put_names_together() -> None:
    """Give the modules names that lie side by side in memory: a run of several ranks looks at all of them."""
    again = {bytes(name, "utf-8").decode(): module for name, module in sys.modules.items()}
    sys.modules.clear()  # nothing is imported before the next line is done
    sys.modules.update(again)


def use_large_pages() -> None:
    """Move the memory of this process to large pages: a fork copies the page table, in a quarter of the time then.

    A kernel older than Linux 6.1 refuses, and everything is as before.
    """
    import ctypes

    collapse, size = 25, 2 * 1024 * 1024  # MADV_COLLAPSE
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, _, *name = line.split()
        if mode != "rw-p" or name not in ([], ["[heap]"]):
            continue  # a file, or memory that is shared
        low, high = (int(address, 16) for address in span.split("-"))
        low, high = -(-low // size) * size, high // size * size
        if low < high:
            libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), collapse)


def _keep(line: socket.socket) -> Callable[[], None]:
    """Fork the command, report how it ended, and end it when nobody waits for it any more."""
    received = _receive(line)
    if received is None:
        os._exit(0)
    request, files = received
    pid = os.fork()
    if pid == 0:
        _answer(line, request)
        return _become(request, files)
    for file in files:
        os.close(file)
    os.close(1)
    ended = os.pidfd_open(pid)
    readable, _, _ = select.select([ended, line], [], [])
    if ended not in readable:
        _kill(pid)
    _, status = os.waitpid(pid, 0)
    try:
        line.sendall(_PID.pack(os.waitstatus_to_exitcode(status)))
    finally:
        os._exit(0)


# ---- in a command -----------------------------------------------------------------------------------------


def _answer(line: socket.socket, request: dict[str, Any]) -> None:
    """Say that this is the process that was asked for, now that signals reach it, and its session, as they should."""
    if request["new_session"]:
        os.setsid()
    line.sendall(_PID.pack(os.getpid()))
    line.close()


def _become(request: dict[str, Any], files: list[int]) -> Callable[[], None]:
    """The process that was asked for, with those that wait to become what it starts."""
    _take(files, request["files"])
    _move(request["env"], request["cwd"])
    words = request["words"]
    count = request.get("spares")
    if count is None:
        count = _spares_of(words)
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for line in (ours, *(line for _, line in spares)):
                line.close()
            return _spare(theirs)
        theirs.close()
        spares.append((pid, ours))
    faulthandler.register(STACKS, file=2, all_threads=True)
    subprocess.Popen = _popen(spares)  # pyrefly: ignore
    work = _work(words)
    _forget_other_sources()
    return work


def _spares_of(words: list[str]) -> int:
    """How many processes of Python this command starts at most, as far as its words tell."""
    if ZYGOTE in words:
        return 0
    one = tuple(words[: len(COMMAND)]) == COMMAND and "--nodes" not in words
    return 1 if one else SPARES


def _forget_other_sources() -> None:
    """Leave Lockstep to be imported again if a fresh Python with this path would find it in another folder."""
    from importlib.machinery import PathFinder

    found = PathFinder.find_spec("lockstep", sys.path)
    if found is None or found.origin != sys.modules["lockstep"].__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lockstep"]:
            del sys.modules[name]


def _move(env: Mapping[str, str], folder: str) -> None:
    """What a fresh Python reads from its environment."""
    before = {os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part}
    before.add(os.path.dirname(os.path.realpath(__file__)))
    if "LOCKSTEP_TEST_HOST" in env:
        _go_to(*env["LOCKSTEP_TEST_HOST"].split())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    asked = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*asked, *(part for part in sys.path if os.path.abspath(part) not in before)]
    if env.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # pyrefly: ignore
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or every command would draw the same


def _go_to(prefix: str, host: str) -> None:
    """Move to a host of tests/cluster, before any other process is forked from this one."""
    import runpy

    hosts = runpy.run_path(str(Path(__file__).resolve().parent / "cluster" / "hosts.py"))
    hosts["enter"](prefix, int(host))


def _spare(line: socket.socket) -> Callable[[], None]:
    """Wait until the command starts a process, and become it; or until it has ended without one."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # sent to the whole session before there is such a process
    try:
        received = _receive(line)
    except ConnectionResetError:
        received = None
    if received is None:
        os._exit(0)
    request, files = received
    for number in FORWARDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _answer(line, request)
    return _become(request, files)


def _take(files: list[int], numbers: list[int]) -> None:
    """Give files that came the numbers under which they are known."""
    # First out of the way: a number that is wanted may be that of another file.
    moved = []
    for file in files:
        moved.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1000))
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _popen(spares: list[tuple[int, socket.socket]]) -> Any:
    import inspect

    real: Any = subprocess.Popen
    parameters = inspect.signature(real._execute_child)

    class Popen(real):
        """A process of Python is one that waits to become it, while there are any; everything else starts as ever."""

        def _execute_child(self, args: Any, *rest: Any) -> None:
            words = [] if isinstance(args, str) else [str(word) for word in args]
            given = parameters.bind(self, args, *rest).arguments
            if not spares or not _known(words) or given["preexec_fn"] is not None:
                super()._execute_child(args, *rest)
                return
            self.pid, line = spares.pop(0)
            pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
            standard = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
            files = {number: number if file == -1 else file for number, file in standard.items()}
            files |= {number: number for number in given["pass_fds"]}
            request = {
                "words": words[1:],
                "env": dict(os.environ if given["env"] is None else given["env"]),
                "cwd": os.path.abspath(given["cwd"] or os.getcwd()),
                "files": list(files),
                "new_session": given["start_new_session"],
            }
            _send(line, request, list(files.values()))
            _exactly(line, _PID.size)  # it no longer ignores signals
            line.close()
            self._child_created = True
            self._close_pipe_fds(*pipes)

    return Popen


def _known(words: list[str]) -> bool:
    """Whether this is a command of Python that `_work` can be asked for."""
    first = next((word for word in words[1:] if word not in OPTIONS), "-")
    known = words[:1] == [sys.executable] and (first in ("-m", "-c") or not first.startswith("-"))
    assert known or ZYGOTE not in words, f"how a zygote starts has changed, and this file has not: {words}"
    return known


def _work(words: Sequence[str]) -> Callable[[], None]:
    """What `python` does with these words."""
    words, options = list(words), set()
    while words[0] in OPTIONS:
        options.add(words.pop(0))
    if "-u" in options:
        sys.stdout.reconfigure(write_through=True)  # pyrefly: ignore
    kind = words.pop(0)
    if kind == "-m":
        first, work = os.getcwd(), partial(_run_module, words[0], words[1:])
    elif kind == "-c":
        first, work = "", partial(_run_text, words[0], "<string>", ["-c", *words[1:]])
    else:
        assert not kind.startswith("-"), f"{kind} is not an option that a preloaded Python knows"
        first, work = os.path.dirname(os.path.realpath(kind)), partial(_run_text, None, kind, [kind, *words])
    if "-P" not in options:
        sys.path.insert(0, first)
    return work


def _run_module(name: str, words: list[str]) -> None:
    import runpy
    import warnings

    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_text(text: str | None, file: str, argv: list[str]) -> None:
    import types

    sys.argv = argv
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if text is None:
        main.__file__, text = os.path.abspath(file), Path(file).read_text()
    exec(compile(text, file, "exec"), main.__dict__)


def leave(code: Any) -> None:
    """End as Python does, but tear nothing down: what this process shares with the server would be copied for it."""
    import atexit
    import threading

    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # pyrefly: ignore
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    mode, place, *rest = sys.argv[1:]
    if mode == "command":
        be_a_command(place, rest)
    work = serve(place)
    try:
        work()  # here, where the stack holds nothing of the server's
    except SystemExit as ended:
        leave(ended.code)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        leave(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    leave(0)
