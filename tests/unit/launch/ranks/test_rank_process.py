"""A rank exits without tearing Python down, because torch aborts otherwise; this file notices when torch does not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Two ranks of gloo. Rank 0 exits while a thread of gloo waits for the GIL in order to release the tensor of a
# collective that has just ended. In real runs this is a rare race. Here it happens always: rank 0 keeps the GIL until
# the collective has ended on rank 1 (which it sees in shared memory) and a second longer, and one object takes long to
# delete.
RANK = """
import mmap, os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from lockstep.launch.ranks.rank_process import exit_without_teardown

folder, rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with open(folder / "ended", "r+b") as file:
    ended = mmap.mmap(file.fileno(), 1)
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
dist.barrier()


class SlowToDelete:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)


def reduce():
    tensor = torch.ones(10)
    tensor.tag = "an attribute, so that a Python object belongs to it"
    return dist.all_reduce(tensor, async_op=True)


if rank == 1:
    time.sleep(0.5)
    reduce().wait()
    ended[0] = 1
    time.sleep(1.0)
    os._exit(0)

slow = SlowToDelete()
reduce()
sys.setswitchinterval(1000.0)
while not ended[0]:
    pass
deadline = time.monotonic() + 1.0
while time.monotonic() < deadline:
    pass
if how == "without teardown":
    exit_without_teardown(0)
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("ordinary", -signal.SIGABRT), ("without teardown", 0)])
def test_torch_aborts_an_ordinary_exit(tmp_path: Path, how: str, code: int) -> None:
    """If the ordinary exit ends with 0, torch has fixed pytorch/pytorch#179291: delete `exit_without_teardown`, and the
    pause of `Collectives`."""
    (tmp_path / "ended").write_bytes(b"\0")
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank), how], stderr=subprocess.PIPE) for rank in (0, 1)]
    errors = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, 0], errors


FILES = """
import gc, sys
from lockstep.launch.ranks.rank_process import exit_without_teardown, open_files
mode, path, frozen = sys.argv[1:]
file = open(path, mode)
files = []
if frozen:
    files = open_files()
    gc.freeze()
file.write(b"left open" if "b" in mode else "left open")
exit_without_teardown(0, files)
"""


@pytest.mark.parametrize("frozen", ["", "frozen"])
@pytest.mark.parametrize("mode", ["w", "wb", "w+b"])
def test_files_that_were_left_open_are_flushed(tmp_path: Path, mode: str, frozen: str) -> None:
    subprocess.run([sys.executable, "-c", FILES, mode, str(tmp_path / "text"), frozen], check=True)
    assert (tmp_path / "text").read_text() == "left open"


ABANDONED = """
import os, sys
from lockstep.launch.ranks import rank_process

os.environ[rank_process.TERM_FILE] = sys.argv[1]
rank_process._die_when_abandoned(os.pipe()[0])
"""


@pytest.mark.parametrize("stderr", ["full", "closed"])
def test_rank_0_of_a_lost_coordinator_dies_whatever_its_terminal_does(tmp_path: Path, stderr: str) -> None:
    """A terminal stopped with Ctrl-S blocked it for ever, and a pipe that was closed ended its thread."""
    reader, writer = os.pipe()
    if stderr == "closed":
        os.close(reader)
    else:
        os.set_blocking(writer, False)
        while True:
            try:
                os.write(writer, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(writer, True)

    command = [sys.executable, "-c", ABANDONED, str(tmp_path / ".coordinator-1")]
    rank = subprocess.Popen(command, stderr=writer, start_new_session=True)
    try:
        assert rank.wait(timeout=30) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()
        os.close(writer)
        if stderr == "full":
            os.close(reader)
