"""Kill -9 at any moment, and the order of the calls that reach the disk: there is always a valid checkpoint."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import load, same, state

import preloaded
from lockstep.checkpoint.storage.folder import CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.transitions import delete_leftovers
from lockstep.run_folder.checkpoint_names import file_name
from saved import newest_step

HERE = Path(__file__).parent

# The process that is killed. Each round is a fork, and saves until it dies.
VICTIM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from checkpoints import savers, shard, state
from lockstep.config.sections import CheckpointConfig
from lockstep.checkpoint.saving.outcome import Written
from lockstep.checkpoint.state.reshard import Rank0Contents, RankContents

root = Path(sys.argv[2])
for line in open(sys.argv[3]):
    step = int(line)
    pid = os.fork()
    if pid == 0:
        token = os.urandom(4).hex()  # as a real attempt: nothing that a killed one confirmed may count
        team = savers(root, 2, token, CheckpointConfig(keep=2))
        print(os.getpid(), flush=True)
        while True:
            step += 1
            for rank, saver in enumerate(team):
                values = Rank0Contents(values={"step": step})
                saver.copy_and_write(step, RankContents(shard(state(step), rank, 2), values))
            coordinator, other = (saver.take_ended()[0].outcome for saver in team)
            assert not coordinator.warnings
            assert isinstance(other, Written)
    _, status = os.waitpid(pid, 0)
    print("killed" if os.WIFSIGNALED(status) else "ended by itself", flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_of_the_newest_or_the_one_before(tmp_path):
    root, draw = tmp_path / "checkpoints", random.Random(0)
    newest, resumed, half = 0, 0, 0
    longest = 0.04  # seconds until the kill; more on a machine where nothing gets committed in that time
    rounds = tmp_path / "rounds"
    os.mkfifo(rounds)
    reading, writing = os.pipe()
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        words = ("-c", VICTIM, str(HERE), str(root), str(rounds))
        victim = preloaded.start_python(*words, env=os.environ, cwd=tmp_path, stdout=writing, stderr=stderr)
    os.close(writing)
    with rounds.open("w") as asked, open(reading) as said:
        deadline = time.monotonic() + 15  # on a busy machine, fewer rounds will do
        for _ in range(60):
            if resumed > 5 and half > 5 and time.monotonic() > deadline:
                break
            print(newest, file=asked, flush=True)
            pid = int(said.readline())
            time.sleep(draw.uniform(0, longest))
            with suppress(ProcessLookupError):  # it has ended by itself, and says so
                os.kill(pid, signal.SIGKILL)
            assert said.readline() == "killed\n", errors.read_text()
            half += any(".tmp-" in path.name for path in root.iterdir())
            known = list_checkpoints(CheckpointStorage(root))
            longest *= 0.9 if known and known[0].step > newest else 1.3
            if not known:
                continue
            found, loaded = load(root)
            assert found.skipped == []  # a kill damages nothing that was committed
            assert found.reader.manifest.step >= newest
            assert found.reader.manifest.values == {"step": found.reader.manifest.step}
            assert same(loaded, state(found.reader.manifest.step))
            resumed += found.reader.manifest.step > newest
            newest = found.reader.manifest.step
            delete_leftovers(CheckpointStorage(root), "none")
            assert not [path for path in root.iterdir() if ".tmp-" in path.name]
    assert victim.wait(60) == 0
    assert resumed > 5  # else nothing was tested
    assert half > 5


def count_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


@pytest.mark.slow
def test_a_kill_at_each_of_the_dangerous_moments(tmp_path):
    """The same as above, at the points where chance seldom hits."""
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from checkpoints import commit, savers, shard, state\n"
        "from lockstep import faults\n"
        "from lockstep.checkpoint.state.reshard import RankContents\n"
        "from lockstep.checkpoint.storage.folder import CheckpointStorage\n"
        "top = Path(sys.argv[2])\n"
        "for phase in ['write', 'rename', 'latest', 'committed']:\n"
        "    for root in (top / phase, CheckpointStorage(top / 'objects' / phase, f'file://{top}/bucket/{phase}')):\n"
        "        commit(root, 1)\n"
        "        if (pid := os.fork()) == 0:\n"
        "            faults.fire = lambda at, step: os._exit(9) if at == phase else None\n"
        "            savers(root, asynchronous=False)[0].copy_and_write(2, RankContents(shard(state(2), 0, 1)))\n"
        "            os._exit(0)\n"
        "        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9, phase\n"
    )
    done = preloaded.run_python("-c", script, str(HERE), str(tmp_path), env=os.environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for phase, step in [("write", 1), ("rename", 1), ("latest", 2), ("committed", 2)]:
        found, loaded = load(tmp_path / phase)
        assert (found.reader.manifest.step, found.skipped) == (step, [])
        assert same(loaded, state(step))

        # In an object store as well; and an object that was not committed is deleted with its folder.
        storage = CheckpointStorage(tmp_path / "objects" / phase)
        assert same(load(storage)[1], state(step))
        assert count_files(tmp_path / "bucket" / phase) == 2
        delete_leftovers(storage, "none")
        assert count_files(tmp_path / "bucket" / phase) == step
    assert (tmp_path / "latest" / "latest").read_text() == "step-00000001\n"
    assert newest_step(tmp_path / "latest") == 2  # the launcher lists the folder
    assert newest_step(tmp_path / "committed") == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_contents_reach_the_disk_before_names_do(tmp_path):
    root, trace = tmp_path / "checkpoints", tmp_path / "trace"
    script = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import checkpoints\n" + (
        "checkpoints.commit(Path(sys.argv[2]), 1, 2)"
    )
    calls = "trace=fsync,rename,renameat,renameat2,unlink,unlinkat"
    command = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "300", "-e", calls, "-o", str(trace)]
    ran = subprocess.run([*command, sys.executable, "-c", script, str(HERE), str(root)], capture_output=True, text=True)
    if ran.returncode and "ptrace" in ran.stderr:
        pytest.skip("strace may not trace here")
    assert ran.returncode == 0, ran.stderr
    order = [event for line in trace.read_text().splitlines() if (event := traced(line, root))]
    for rank in (0, 1):
        confirmed = f"rename rank-0000{rank}.json"
        assert order.index(f"fsync {file_name(rank)}") < order.index(confirmed) < order.index("fsync manifest.json")
    moments = [
        *("fsync manifest.json", "fsync UNCOMMITTED", "rename step-00000001"),
        *("fsync ROOT", "rename latest"),
    ]
    position = -1
    for moment in moments:  # each of them after the one before
        position = order.index(moment, position + 1)


def traced(line: str, root: Path) -> str | None:
    """ "fsync NAME" or "rename NEW NAME" of one line of the trace, for files below `root`."""
    if "resumed>" in line:  # the call's name and file were on the line where it began
        return None
    if match := re.search(rf"fsync\(\d+<{re.escape(str(root))}/?(.*?)>", line):
        inner = match.group(1)
        if not inner:
            return "fsync ROOT"
        name = inner.split("/")[-1]
        return "fsync UNCOMMITTED" if ".tmp-" in name else f"fsync {name}"
    if match := re.search(rf'rename\w*\(.*"{re.escape(str(root))}/([^"]*)"', line):
        return f"rename {match.group(1).split('/')[-1]}"
    return None
