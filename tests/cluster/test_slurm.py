"""Jobs of `lockstep launch slurm` on a real Slurm cluster of two nodes: `make test-slurm` starts it and takes it down.

Each run is compared with one that trained here, in one process: exact=true makes their weights equal to the bit, if
every sample was trained on once, in its place.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from lockstep.observe.sinks import read_jsonl

LAB = os.environ.get("LOCKSTEP_SLURM_LAB", "")
pytestmark = [
    pytest.mark.skipif(not LAB, reason="needs a Slurm cluster on this machine: make test-slurm"),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parent.parent.parent
SYSTEM = ROOT / "systems" / "latent_wire"
STEPS, BATCH = 24, 8
TRAINING = ["char_lm", "preset=tiny", f"steps={STEPS}", "exact=true", "checkpoint.every=4", "log.every=2"]
TRAINING += ["log.samples=true", "evaluate.at_end=false"]

# Slow enough that a job can be disturbed in the middle.
SLOW = json.dumps([{"how": "slow", "seconds": 0.25, "phase": "compute", "times": 10**6}])

T = TypeVar("T")


# ---- the cluster ----


def run(*words: str, cwd: Path | None = None, **env: str) -> str:
    """Run a command, which must succeed. Returns its output."""
    python_path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": python_path} | env
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def lockstep(*words: str, cwd: Path | None = None, **env: str) -> str:
    return run(sys.executable, "-m", "lockstep", *words, cwd=cwd, **env)


def until(what: Callable[[], T], seconds: float = 240.0) -> T:
    """Return what a function returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s\n{run('squeue')}{run('sinfo', '-N', '-l')}"
        time.sleep(0.3)
    return found


class Job:
    """A job in the queue."""

    def __init__(self, number: str, log: Path):
        self.number = number
        self.log = log
        self.restarts = 0  # those that this test knows of

    @classmethod
    def launched(cls, folder: Path, *words: str, training: list[str] = TRAINING, **env: str) -> Job:
        """Submit a job by `lockstep launch slurm --submit`."""
        said = lockstep("launch", "slurm", *training, f"run_dir={folder}", *words, "--submit", **env)
        number = re.search(r"submitted job (\d+)", said)
        assert number, said
        log = re.search(r"tail -F (\S+)", said)
        assert log, said
        assert f"squeue --jobs {number[1]}" in said
        assert f"scancel {number[1]}" in said
        return cls(number[1], Path(log[1]))

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def fields(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", run("scontrol", "show", "job", self.number)))

    def wait(self, *states: str) -> dict[str, str]:
        found = until(lambda: (now := self.fields())["JobState"] in states and now)
        assert found, self.said
        return found

    def until_step(self, step: int) -> None:
        until(lambda: re.search(rf"^step +{step}/", self.said, re.M))

    def restart_now(self) -> None:
        """A requeued job waits two minutes, unless its start is moved."""
        self.restarts += 1
        until(lambda: (now := self.fields())["JobState"] == "PENDING" and now["Restarts"] == str(self.restarts))

        # Slurm's wait is for what is left of the last start. Without it, the end of that is taken for the new one's.
        time.sleep(4.0)
        run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def finish(self) -> dict[str, str]:
        """Wait for the end, without the pauses before restarts."""

        def ended() -> dict[str, str]:
            now = self.fields()
            if now["JobState"] == "PENDING" and int(now["Restarts"]) > self.restarts:
                self.restart_now()
            return now if now["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT") else {}

        last = until(ended)
        assert last["JobState"] == "COMPLETED", self.said
        return last


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    lockstep("train", *TRAINING, f"run_dir={folder}")
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def healthy_nodes():
    """Both nodes are ready before each test, and no job is left after it."""
    until(lambda: run("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D").strip() == "2")
    yield
    run("scancel", "--user=root", "--quiet")
    until(lambda: not run("squeue", "--noheader"))


def assert_same(folder: Path, expected: bytes) -> None:
    """The run has the weights of an undisturbed one, and every sample was trained on once."""
    assert (folder / "model.safetensors").read_bytes() == expected

    # A step that a loss of nodes undid was trained again: its latest records count.
    records = [record for path in folder.glob("samples/rank-*.jsonl") for record in read_jsonl(path)]
    records.sort(key=lambda record: -record["time"])
    samples: dict[int, list[tuple[int, int]]] = {step: [] for step in range(1, STEPS + 1)}
    for record in records:
        if len(samples[record["step"]]) < BATCH:
            samples[record["step"]] += [(epoch, number) for epoch, number in record["epoch_and_ids"]]
    trained = [sample for step in samples.values() for sample in step]
    assert len(set(trained)) == len(trained) == BATCH * STEPS


# ---- jobs ----


def test_two_nodes_end_with_the_bits_of_one_process(tmp_path: Path, expected: bytes) -> None:
    job = Job.launched(tmp_path / "run", "--nproc", "2", "--nnodes", "2", "--time", "1:00:00")
    assert job.finish()["NumNodes"] == "2"
    assert_same(tmp_path / "run", expected)
    assert "char_lm  4 ranks" in job.said
    assert job.said.count("joined; 2 nodes") == 1
    assert (tmp_path / "run" / ".secret").stat().st_mode & 0o777 == 0o600


def test_a_job_that_is_told_to_save_is_requeued_and_loses_no_step(tmp_path: Path, expected: bytes) -> None:
    words = ["--nproc", "1", "--nnodes", "2", "--time", "1:00:00"]
    job = Job.launched(tmp_path / "run", *words, LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    run("scancel", "--signal=USR1", job.number)
    job.restart_now()
    assert job.finish()["Restarts"] == "1"
    assert_same(tmp_path / "run", expected)
    saved = re.search(r"lockstep: saved at step (\d+)", job.said)
    assert saved, job.said
    assert f"resumed        at step {saved[1]} " in job.said


def test_a_job_that_may_not_be_requeued_is_submitted_again(tmp_path: Path, expected: bytes) -> None:
    words = ["--nproc", "1", "--nnodes", "2", "--sbatch", "no-requeue"]
    job = Job.launched(tmp_path / "run", *words, LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    run("scancel", "--signal=USR1", job.number)
    again = re.compile(r"^Submitted batch job (\d+)$", re.M)
    until(lambda: again.search(job.said))
    (number,) = again.findall(job.said)
    assert number != job.number
    second = Job(number, tmp_path / "run" / f"slurm-{number}.log")
    second.finish()
    assert "resumed        at step" in second.said
    assert_same(tmp_path / "run", expected)


def test_a_job_at_its_time_limit_is_requeued(tmp_path: Path, expected: bytes) -> None:
    """Slurm itself sends the signal, within the minute before it is due."""
    words = ["--nproc", "1", "--nnodes", "2", "--time", "2", "--signal-before", "45"]
    job = Job.launched(tmp_path / "run", *words, LOCKSTEP_FAULTS=SLOW.replace("0.25", "0.75"))
    job.restart_now()
    assert "SIGUSR1: asking 2 ranks to save and exit" in job.said
    assert int(job.finish()["Restarts"]) >= 1  # on a busy machine it may reach its limit again
    assert "resumed        at step" in job.said
    assert_same(tmp_path / "run", expected)


def test_a_failure_is_named_and_not_requeued(tmp_path: Path) -> None:
    fault = json.dumps([{"how": "raise", "rank": 1, "step": 3}])
    job = Job.launched(tmp_path / "run", "--nproc", "1", "--nnodes", "2", LOCKSTEP_FAULTS=fault)
    ended = job.wait("FAILED", "COMPLETED", "CANCELLED")
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "1:0")
    (failure,) = re.findall(r"^lockstep: rank 1 on node2 failed at step 3, .*$", job.said, re.M)
    assert "RuntimeError" in failure
    assert re.search(r"faults\.py\", line \d+", job.said), job.said


# What happens on each node, in the first start of a job, in place of the launcher.
ENDS_EARLY = """
import os
if "SLURM_STEP_NODELIST" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    {first}
    if os.environ["SLURM_NODEID"] == "1":
        {second}
"""
REFUSED = "os.environ['LOCKSTEP_SECRET'] = 'short'"


@pytest.mark.parametrize("code", [75, 137])
def test_a_node_that_is_refused_ends_the_job_whatever_the_other_one_says(tmp_path: Path, code: int) -> None:
    """The first node stands for a launcher that has waited for the second one, which takes five minutes."""
    first = f"os.environ['SLURM_NODEID'] == '1' or os._exit({code})"
    (tmp_path / "sitecustomize.py").write_text(ENDS_EARLY.format(first=first, second=REFUSED))
    path = f"{tmp_path}{os.pathsep}{ROOT / 'src'}"
    job = Job.launched(tmp_path / "run", "--nproc", "1", "--nnodes", "2", PYTHONPATH=path)
    ended = job.wait("FAILED", "COMPLETED", "CANCELLED")
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "2:0"), job.said
    assert "LOCKSTEP_SECRET" in job.said


def test_a_job_whose_launcher_is_killed_is_requeued(tmp_path: Path, expected: bytes) -> None:
    """The other launcher ends with 75, and srun with the higher code of the one that was killed."""
    first = "os.environ['SLURM_NODEID'] == '1' or os._exit(75)"
    (tmp_path / "sitecustomize.py").write_text(ENDS_EARLY.format(first=first, second="os.kill(os.getpid(), 9)"))
    path = f"{tmp_path}{os.pathsep}{ROOT / 'src'}"
    job = Job.launched(tmp_path / "run", "--nproc", "1", "--nnodes", "2", PYTHONPATH=path)
    job.restart_now()
    assert job.finish()["Restarts"] == "1"
    assert_same(tmp_path / "run", expected)


def test_a_job_that_is_preempted_gives_way_and_finishes_later(tmp_path: Path, expected: bytes) -> None:
    words = ["--nproc", "1", "--nnodes", "2", "--sbatch", "exclusive"]
    job = Job.launched(tmp_path / "run", *words, LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"]
    other = Job(run("sbatch", "--parsable", *urgent).strip(), tmp_path / "none")
    other.finish()
    job.restart_now()
    assert job.finish()["Restarts"] == "1"
    assert "SIGTERM: asking 2 ranks to save and exit" in job.said
    assert_same(tmp_path / "run", expected)


def test_a_cancelled_job_saves_and_is_not_requeued(tmp_path: Path) -> None:
    job = Job.launched(tmp_path / "run", "--nproc", "1", "--nnodes", "2", LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    run("scancel", job.number)
    assert job.wait("CANCELLED")["Restarts"] == "0"
    until(lambda: not run("squeue", "--noheader"))
    assert job.fields()["JobState"] == "CANCELLED"
    assert "preempted" in [event["event"] for event in read_jsonl(tmp_path / "run" / "events.jsonl")]


@pytest.fixture
def second_node_fails():
    yield lambda: run(LAB, "node-fail", "2")
    run(LAB, "node-heal", "2")


def test_the_other_node_goes_on_when_one_is_lost(tmp_path: Path, expected: bytes, second_node_fails) -> None:
    job = Job.launched(tmp_path / "run", "--nproc", "1", "--nnodes", "1:2", LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    second_node_fails()
    assert job.finish()["Restarts"] == "0"
    assert "(node2) is lost: " in job.said
    assert_same(tmp_path / "run", expected)


def test_a_job_that_needs_both_nodes_is_requeued_when_one_is_lost(
    tmp_path: Path, expected: bytes, second_node_fails
) -> None:
    job = Job.launched(tmp_path / "run", "--nproc", "1", "--nnodes", "2", LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    second_node_fails()
    until(lambda: job.fields()["JobState"] == "PENDING")
    assert "1 node left, and 2 needed" in job.said
    run(LAB, "node-heal", "2")
    job.restart_now()
    assert job.finish()["Restarts"] == "1"
    assert_same(tmp_path / "run", expected)


def test_an_array_trains_one_run_for_each_setting(tmp_path: Path, expected: bytes) -> None:
    training = [*TRAINING, "--vary", "seed=0,1"]
    job = Job.launched(tmp_path / "run", "--nproc", "1", training=training)
    until(lambda: not run("squeue", "--noheader"))
    weights = [(tmp_path / "run" / f"task-{index}" / "model.safetensors").read_bytes() for index in (0, 1)]
    assert weights[0] == expected
    assert weights[1] != expected
    assert sorted(path.name for path in (tmp_path / "run").glob("slurm-*.log")) == [
        f"slurm-{job.number}_{index}.log" for index in (0, 1)
    ]


def test_a_task_of_an_array_is_requeued_alone(tmp_path: Path, expected: bytes) -> None:
    """The last task of an array has the number of the whole array."""
    training = [*TRAINING, "--vary", "seed=1,0"]
    job = Job.launched(tmp_path / "run", "--nproc", "1", training=training, LOCKSTEP_FAULTS=SLOW)
    first, last = (
        Job(f"{job.number}_{index}", tmp_path / "run" / f"slurm-{job.number}_{index}.log") for index in (0, 1)
    )
    first.until_step(6)
    last.until_step(6)
    run("scancel", "--signal=USR1", last.number)
    last.restart_now()
    assert last.finish()["Restarts"] == "1"
    assert_same(tmp_path / "run" / "task-1", expected)
    assert "resumed" not in first.said


def test_nodes_that_differ_run_different_numbers_of_ranks(tmp_path: Path, expected: bytes) -> None:
    words = ["--nproc", "1", "--nnodes", "1", "--component", "nproc=2 nnodes=1 gpus_per_node=2"]
    job = Job.launched(tmp_path / "run", *words, LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    assert "char_lm  3 ranks" in job.said
    run("scancel", "--signal=USR1", job.number)
    job.restart_now()
    run("scontrol", "update", f"JobId={job.number}+1", "StartTime=now")
    job.finish()
    assert_same(tmp_path / "run", expected)


def test_tasks_as_ranks_are_requeued_too(tmp_path: Path, expected: bytes) -> None:
    words = ["--mode", "srun", "--nproc", "2", "--nnodes", "2"]
    job = Job.launched(tmp_path / "run", *words, LOCKSTEP_FAULTS=SLOW)
    job.until_step(6)
    run("scancel", "--signal=USR1", job.number)
    job.restart_now()
    job.finish()
    assert "resumed        at step" in job.said
    assert_same(tmp_path / "run", expected)


SCRIPT = """
import lockstep
from lockstep.recipes.char_lm import TASK

if __name__ == "__main__":
    done = lockstep.fit(TASK, preset="tiny", steps=4, exact=True, run_dir="run")
    print("world", done.summary["world"])
"""


def test_a_script_under_srun(tmp_path: Path) -> None:
    """`srun python script.py`, without any launcher of ours."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", sys.executable, "script.py"]
    assert "world 4" in run("srun", *words, cwd=tmp_path)


def test_what_the_cluster_cannot_give_is_refused_before_it_is_submitted(tmp_path: Path) -> None:
    refused = {
        ("--nnodes", "3"): "use --nnodes 2",
        ("--gpus-per-node", "8"): "use --gpus-per-node 4 --nproc 4, and --nnodes 2",
        ("--cpus-per-task", "99"): "use --cpus-per-task 8 at most",
        ("--mem", "64G"): "use --mem 4000M at most",
        ("--partition", "mian"): "set --partition=main",
        ("--sbatch", "nodelist=node9"): "Slurm does not accept the job",
    }
    for words, fix in refused.items():
        command = ["launch", "slurm", *TRAINING, f"run_dir={tmp_path / 'run'}", *words, "--submit"]
        done = subprocess.run([sys.executable, "-m", "lockstep", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, words
        assert fix in done.stderr, (words, done.stderr)
    assert run("squeue", "--noheader") == ""


def test_the_script_of_latent_wire(tmp_path: Path) -> None:
    """Submitted as its document says; saved and requeued; and not requeued when it is cancelled."""
    for name in ("latentwire", "telepathy"):
        (tmp_path / name).symlink_to(SYSTEM / name)
    (tmp_path / "runs").mkdir()
    words = ["--parsable", "--cpus-per-task=2", "telepathy/submit_ddp_training.slurm", "preset=tiny", "steps=500"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    number = run("sbatch", *words, "log.every=2", cwd=tmp_path, PATH=path, LOCKSTEP_FAULTS=SLOW).strip()
    job = Job(number, tmp_path / "runs" / f"ddp_training_{number}.log")
    job.until_step(4)
    run("scancel", "--signal=USR1", number)
    job.restart_now()
    until(lambda: "resumed        at step" in job.said)
    until(lambda: len(re.findall(r"^step ", job.said.split("resumed  ")[-1], re.M)) > 1)
    run("scancel", number)
    assert job.wait("CANCELLED", "PENDING")["JobState"] == "CANCELLED"
    until(lambda: not run("squeue", "--noheader"))
