"""`lockstep launch ray`, and `lockstep.fit` in Ray Train, on a real Ray cluster of several nodes on this machine.

Starting the cluster takes longer than most tests, so `make test-ray` runs them. The decisions of the driver, without
Ray, are in tests/unit/clusters/test_ray_driver.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

from faults.torture import digests  # noqa: E402
from lockstep.launch import election  # noqa: E402
from saved import newest_step  # noqa: E402

# On a busy machine the undisturbed run alone takes minutes.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# Longer than this is a hang, however busy the machine is.
HANG_S = 600.0

# Long enough to be disturbed several times on an idle machine, too: a new node needs seconds to join.
STEPS = 1200
JOB = ("char_lm", "preset=tiny", "exact=true", f"steps={STEPS}", "evaluate.every=10000")
ACTOR = "lockstep.clusters.ray.actor"


class Cluster:
    """A Ray cluster on this machine: a head that runs no actors, and nodes with two CPUs each."""

    def __init__(self) -> None:
        self._ray = cluster_utils.Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.address: str = self._ray.address

    @property
    def logs(self) -> Path:
        """The folder of Ray's own logs."""
        return Path(self._ray.head_node.get_logs_dir_path())

    def nodes(self, count: int) -> list:
        """Have this many nodes, all of them idle."""
        while len(self._ray.worker_nodes) > count:
            self.remove(next(iter(self._ray.worker_nodes)))
        while len(self._ray.worker_nodes) < count:
            self.add()
        return list(self._ray.worker_nodes)

    def add(self):
        return self._ray.add_node(num_cpus=2, include_dashboard=False)

    def remove(self, node) -> None:
        """Kill a node, as a power cut does."""
        self._ray.remove_node(node, allow_graceful=False)

    def node_of(self, actor: psutil.Process):
        """Return the node on which an actor runs: its actor is a child of the node's raylet."""
        return self.node_with(actor.parent().ppid())

    def node_with(self, raylet: int):
        for node in self._ray.worker_nodes:
            if raylet in [info.process.pid for info in node.all_processes["raylet"]]:
                return node
        raise AssertionError(f"no node has the raylet {raylet}")

    def drain(self, node, seconds: float) -> None:
        """Announce that a node will be taken away, as a provider does before it takes back a spot machine."""
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = ray._raylet.GcsClient(address=self.address)
        accepted, why = client.drain_node(node.node_id, reason, "a test", int((time.time() + seconds) * 1000))
        assert accepted, why

    def idle(self) -> int:
        """Return how many nodes nobody has reserved."""
        code = (
            "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False);"
            "free = ray._private.state.state.available_resources_per_node().values();"
            "print(sum(node.get('CPU', 0) == 2 for node in free))"
        )
        words = [sys.executable, "-c", code, self.address]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])

    def close(self) -> None:
        self._ray.shutdown()


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, str]:
    """What the run ends with on one process, when nothing happens to it."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = subprocess.run([sys.executable, "-m", "lockstep", "train", *JOB, f"run_dir={run}"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return digests(run)


@pytest.fixture(autouse=True)
def no_driver_is_left():
    """A job of a test that has failed must not keep the nodes from the next one."""
    yield
    for driver in Job.drivers:
        driver.kill()
        driver.wait()
    Job.drivers.clear()


class Job:
    """A driver, as a process of its own, and what it prints."""

    drivers: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, cluster: Cluster, run: Path, *options: str, every: int = 10):
        self.run = run
        self.output = run.with_name(f"{run.name}.out")
        settings = [*JOB, f"checkpoint.every={every}", f"run_dir={run}"]
        words = ["launch", "ray", *settings, "--nproc", "1", "--cpus-per-node", "2", *options]
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *words, "--address", cluster.address, "--submit"],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        Job.drivers.append(self.process)

    @property
    def said(self) -> str:
        return self.output.read_text()

    def reaches(self, step: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.said
            return (newest_step(self.run / "checkpoints") or 0) >= step

        _until(there, self)

    def trains(self) -> bool:
        """Whether it has written the metrics of a step."""
        assert self.process.poll() is None, self.said
        metrics = self.run / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_size > 0

    def actors(self) -> list[psutil.Process]:
        """The launchers of this job."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if ACTOR in words and f"run_dir={self.run}" in words:
                found.append(process)
        return found

    def coordinating(self) -> psutil.Process | None:
        term = election.newest_term(self.run)
        port = int(term.address.rpartition(":")[2]) if term else -1
        for actor in self.actors():
            listening = [at.laddr.port for at in actor.net_connections() if at.status == psutil.CONN_LISTEN]
            if port in listening:
                return actor
        return None

    def processes(self) -> list[psutil.Process]:
        """All processes of the job but the driver."""
        return [process for actor in self.actors() for process in (actor, *actor.children(recursive=True))]

    def wait(self) -> int:
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the driver does not end:\n{self.said}")


def _until(condition, job: Job) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain:\n{job.said}"
        time.sleep(0.1)


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_nodes_are_lost_and_replaced_and_the_bits_are_those_of_a_calm_run(cluster, undisturbed, tmp_path):
    cluster.nodes(3)
    job = Job(cluster, tmp_path / "run", "--nnodes", "1:3")
    job.reaches(20)
    _until(lambda: len(job.actors()) == 3, job)

    # A node that only follows, then a new one, then the one that coordinates.
    coordinating = job.coordinating()
    assert coordinating is not None
    follower = next(actor for actor in job.actors() if actor.pid != coordinating.pid)
    cluster.remove(cluster.node_of(follower))
    _until(lambda: ") is lost: " in job.said and len(job.actors()) == 2, job)
    cluster.add()
    _until(lambda: len(job.actors()) == 3, job)
    _until(lambda: "asking the ranks to save, to continue with the new node" in job.said, job)
    step = newest_step(job.run / "checkpoints") or 0
    job.reaches(step + 10)

    coordinating = job.coordinating()
    assert coordinating is not None
    cluster.remove(cluster.node_of(coordinating))
    _until(lambda: "takes over from" in job.said, job)

    assert job.wait() == 0, job.said
    assert digests(job.run) == undisturbed
    assert gone(job.processes())


def test_a_job_with_a_fixed_number_of_nodes_waits_for_another_one(cluster, undisturbed, tmp_path):
    cluster.nodes(2)
    job = Job(cluster, tmp_path / "run", "--nnodes", "2")
    job.reaches(20)
    coordinating = job.coordinating()
    assert coordinating is not None
    cluster.remove(cluster.node_of(next(actor for actor in job.actors() if actor.pid != coordinating.pid)))
    _until(lambda: "too few nodes were left" in job.said, job)
    _until(lambda: "1 node is ready of 2 that are needed" in job.said, job)
    cluster.add()
    assert job.wait() == 0, job.said
    assert digests(job.run) == undisturbed


def test_a_job_grows_to_a_new_node_and_leaves_one_that_ray_takes_away_after_a_save(cluster, undisturbed, tmp_path):
    cluster.nodes(2)
    job = Job(cluster, tmp_path / "run", "--nnodes", "1:3")
    job.reaches(20)
    cluster.add()
    _until(lambda: len(job.actors()) == 3 and "continue with the new node" in job.said, job)
    job.reaches((newest_step(job.run / "checkpoints") or 0) + 10)
    coordinating = job.coordinating()
    assert coordinating is not None
    node = cluster.node_of(coordinating)
    cluster.drain(node, 60)
    _until(lambda: "saving, to go on without it" in job.said and "to resume" in job.said, job)
    _until(lambda: gone([coordinating]) and len(job.actors()) == 2, job)

    # It takes one of two new nodes, and leaves the other to others, also when the drained one is gone.
    for _ in range(2):
        cluster.add()
    _until(lambda: len(job.actors()) == 3, job)
    cluster.remove(node)
    job.reaches((newest_step(job.run / "checkpoints") or 0) + 20)
    assert cluster.idle() == 1
    assert job.wait() == 0, job.said
    assert "failed" not in job.said
    assert digests(job.run) == undisturbed


def test_a_stopped_driver_saves_and_a_killed_one_leaves_no_process(cluster, undisturbed, tmp_path):
    cluster.nodes(2)
    job = Job(cluster, tmp_path / "run", "--nnodes", "1:2")
    job.reaches(20)
    secret = Path(f"/proc/{job.actors()[0].pid}/environ").read_text().partition("LOCKSTEP_SECRET=")[2][:64]
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.said
    assert "to resume: lockstep launch ray char_lm" in job.said
    assert gone(job.processes())

    # The secret is nowhere but in the memory of the actors.
    assert len(secret) == 64
    assert secret not in job.said
    logs = [path for path in cluster.logs.rglob("*") if path.is_file()]
    assert any("NodeActor" in path.read_text(errors="replace") for path in logs)
    assert not [path for path in logs if secret in path.read_text(errors="replace")]

    job = Job(cluster, tmp_path / "run", "--nnodes", "1:2")
    job.reaches((newest_step(job.run / "checkpoints") or 0) + 10)
    processes = job.processes()
    assert len(processes) >= 4
    job.process.kill()
    began = time.monotonic()
    _until(lambda: gone(processes), job)
    print(f"{len(processes)} processes were gone {time.monotonic() - began:.1f} s after the SIGKILL of the driver")

    last = Job(cluster, tmp_path / "run", "--nnodes", "1:2")
    assert last.wait() == 0, last.said
    assert digests(last.run) == undisturbed


def test_a_ctrl_c_at_the_driver_saves_and_the_same_command_resumes(cluster, undisturbed, tmp_path):
    """The checkpoint of the Ctrl-C is the only one: from each node it would be several, and end the job at once."""
    cluster.nodes(3)
    job = Job(cluster, tmp_path / "run", "--nnodes", "3", every=100_000)
    _until(job.trains, job)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.said
    assert "second Ctrl-C: killing the ranks" not in job.said
    step = newest_step(job.run / "checkpoints")
    assert step is not None, job.said
    assert f"saved at step {step}; to resume: lockstep launch ray char_lm" in job.said
    assert gone(job.processes())

    last = Job(cluster, tmp_path / "run", "--nnodes", "3", every=100_000)
    assert last.wait() == 0, last.said
    assert '"resumed"' in (last.run / "events.jsonl").read_text()
    assert digests(last.run) == undisturbed


def test_a_job_that_is_too_large_says_what_is_missing(cluster, tmp_path):
    cluster.nodes(2)
    job = Job(cluster, tmp_path / "run", "--nnodes", "3", "--gpus-per-node", "8")
    assert job.wait() == 2
    assert "too small for this job: 3 nodes with 2 CPU and 8 GPU each" in job.said
    assert "0 GPU (8 missing)" in job.said


TRAINER = """
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lockstep
from lockstep.recipes.char_lm import TASK

address, run, storage, steps, every = sys.argv[1:]
ray.init(address=address)
settings = dict(preset="tiny", exact=True, steps=int(steps))
settings |= dict(checkpoint={"every": int(every)}, evaluate={"every": 10000})
TorchTrainer(
    lambda: lockstep.fit(TASK, settings, run_dir=run, resume="auto") and None,
    scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD", resources_per_worker={"CPU": 2}),
    run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
).fit()
"""


class Trainer(Job):
    """A program that trains with Ray Train."""

    def __init__(self, cluster: Cluster, folder: Path, every: int):
        self.run = folder / "run"
        self.output = folder / "trainer.out"
        script = folder / "trainer.py"
        script.write_text(TRAINER)
        words = [str(script), cluster.address, str(self.run), str(folder / "storage"), str(STEPS), str(every)]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=subprocess.STDOUT)

    def workers(self) -> list[psutil.Process]:
        processes = psutil.process_iter(["cmdline"])
        return [process for process in processes if "RayTrainWorker" in " ".join(process.info["cmdline"] or [])]


def test_ray_train_calls_fit_as_it_is_and_a_restarted_worker_group_resumes(cluster, undisturbed, tmp_path):
    cluster.nodes(2)
    trainer = Trainer(cluster, tmp_path, every=10)
    trainer.reaches(20)
    trainer.workers()[0].kill()
    assert trainer.wait() == 0, trainer.said
    assert '"resumed"' in (trainer.run / "events.jsonl").read_text()
    assert digests(trainer.run) == undisturbed


def test_a_notice_of_ray_train_saves_before_the_node_is_gone(cluster, undisturbed, tmp_path):
    """There is no other checkpoint from which the restarted workers could resume."""
    cluster.nodes(3)
    trainer = Trainer(cluster, tmp_path, every=100_000)
    _until(trainer.trains, trainer)
    raylet = trainer.workers()[0].ppid()
    node = cluster.node_with(raylet)
    cluster.drain(node, 20)
    trainer.reaches(1)
    cluster.remove(node)
    assert trainer.wait() == 0, trainer.said
    assert '"resumed"' in (trainer.run / "events.jsonl").read_text()
    assert digests(trainer.run) == undisturbed
