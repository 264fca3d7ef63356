"""Several nodes on one machine: launchers on 127.0.0.1, 127.0.0.2, ... that meet at one address."""

import json
import os
import signal
import socket
import threading
from contextlib import suppress

import pytest
from launchers import HERE, MODULES, PATIENCE_S, alive, events, pid_of, until

import preloaded
from faults.conftest import SOON
from ports import free_port

PUPPET = HERE / "puppet.py"


def test_nodes_form_one_world(nodes, tmp_path):
    both = nodes(2, "print(os.environ['MASTER_ADDR']); me.note(os.environ['GROUP_RANK'] + os.environ['LOCAL_RANK'])")
    assert [node.wait() for node in both] == [0, 0]
    assert [(tmp_path / f"0-{rank}").read_text().split()[1] for rank in (0, 1)] == ["00", "10"]


def test_a_failure_on_one_node_is_shown_on_all_and_restarted(nodes, tmp_path):
    both = nodes(2, "me.note()\nif me.attempt == 0:\n if me.rank == 1: me.kill()\n time.sleep(600)")
    assert [node.wait() for node in both] == [0, 0]
    for node in both:
        assert "lockstep: rank 1 on 127.0.0.2 failed at step 0, phase start" in node.said
        assert "restarting 2 ranks from the beginning" in node.said


@pytest.mark.parametrize("one_log", [False, True])
def test_a_signal_at_any_node_reaches_all(nodes, tmp_path, monkeypatch, one_log):
    if one_log:
        monkeypatch.setenv("LOCKSTEP_ONE_LOG", "1")
    both = nodes(2)
    for rank in (0, 1):
        pid_of(tmp_path, 0, rank)
    both[1].signal(signal.SIGTERM)
    assert [node.wait() for node in both] == [75, 75]
    saved = ["saved at step 7; to resume: type it again" in node.said for node in both]
    assert saved == [True, not one_log]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_node_ends_a_job_that_needs_it(nodes, tmp_path, how):
    first, second = nodes(2, **SOON)
    ranks = [pid_of(tmp_path, 0, rank) for rank in (0, 1)]
    second.signal(how)
    assert first.wait() == 75
    assert "(127.0.0.2) is lost: " in first.said
    assert "not restarted: 1 node left, and 2 needed. To resume from the beginning: type it again" in first.said
    assert not alive(ranks[0])
    if how == signal.SIGSTOP:
        assert "no heartbeat for 5 s" in first.said
        second.signal(signal.SIGCONT)
        assert second.wait() == 75
        assert "the job has ended, and this node did not learn how" in second.said
    until(lambda: not alive(ranks[1]))


def test_a_job_may_continue_with_fewer_nodes_and_welcome_new_ones(nodes, tmp_path):
    code = "me.note(str(me.world)); me.train(0 if (me.run_dir / 'enough').exists() else 600)"
    first, second = nodes(2, code, (1, 2))
    attempt = int(until(lambda: sorted(tmp_path.glob("?-1")))[0].name[0])  # 1 if the second came late: a busy machine
    second.signal(signal.SIGKILL)
    pid_of(tmp_path, attempt + 1, 0)
    assert (tmp_path / f"{attempt + 1}-0").read_text().endswith(" 1")
    (tmp_path / "enough").touch()
    (third,) = nodes(1, code, (1, 2))
    assert [first.wait(), third.wait()] == [0, 0]
    assert (tmp_path / f"{attempt + 2}-1").read_text().endswith(" 2")
    assert "asking the ranks to save, to continue with the new node" in first.said
    assert [event["event"] for event in events(tmp_path)] == ["failure", "restart"]


def test_a_newcomer_that_cannot_import_leaves_and_the_job_goes_on(nodes, tmp_path, monkeypatch):
    code = "me.note(str(me.world)); me.train()"
    (first,) = nodes(1, code, (1, 2))
    pid_of(tmp_path, 0, 0)
    monkeypatch.setenv("PUPPET_CANNOT_IMPORT", "1")
    for _ in range(2):
        (newcomer,) = nodes(1, code, (1, 2), host="127.0.0.2")
        assert newcomer.wait() == 1
        assert "a library is missing on this machine" in newcomer.said

    # Its platform starts it once more. Now it may not join: the ranks would save for it again, for ever.
    (newcomer,) = nodes(1, code, (1, 2), host="127.0.0.2")
    assert newcomer.wait() == 2
    assert "nodes on 127.0.0.2 were dismissed" in newcomer.said

    # The job has saved for the newcomers, and trains alone again.
    def trains_alone() -> bool:
        ranks = [path.read_text().split() for path in tmp_path.glob("[1-9]-0")]
        return any(world == "1" and alive(int(pid)) for pid, world in filter(None, ranks))

    until(trains_alone)
    assert first.said.count("(127.0.0.2) is lost: the process") == 2
    first.signal(signal.SIGTERM)
    assert first.wait() == 75


def test_a_node_with_another_command_is_refused(nodes, tmp_path):
    (first,) = nodes(1)
    (other,) = nodes(1, "me.note('another')")
    assert other.wait() == 2
    assert "code: \"me.note('another')\" here" in other.said
    assert "do:    run the same command on every node" in other.said
    (elsewhere,) = nodes(1, "me.note('another')", join=f"127.0.0.9:{free_port()}")  # another meeting, the same folder
    assert elsewhere.wait() == 2
    assert "the commands of two nodes differ" in elsewhere.said
    (second,) = nodes(1)
    pid_of(tmp_path, 0, 1)
    (surplus,) = nodes(1)
    assert surplus.wait() == 2
    assert "the job has its 2 nodes already" in surplus.said
    assert first.process.poll() is second.process.poll() is None


def test_a_node_with_another_program_is_refused(nodes):
    (first,) = nodes(1, program={"torch": "2.13.0", "task.py": "sources 1f"})
    (other,) = nodes(1, program={"torch": "2.12.1", "task.py": "sources 1f"})
    assert other.wait() == 2
    assert "two nodes would run different programs" in other.said
    assert "found: torch: '2.12.1' here, '2.13.0' on the coordinating node\n" in other.said
    assert first.process.poll() is None


def test_a_port_that_another_program_has_is_named(nodes):
    """That program hangs up on whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=hang_up, args=[other], daemon=True).start()
        port = other.getsockname()[1]
        (node,) = nodes(1, join=f"127.0.0.1:{port}", no_answer_s=1.0)
        assert node.wait() == 75  # it may be a node of an earlier job, which ends
    assert f"another program on this machine listens at 127.0.0.1:{port}" in node.said
    assert "found: no launcher of this job answered there within 1 s" in node.said


def hang_up(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_an_interface_that_is_not_there_is_named_before_anything_starts(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    (node,) = nodes(1, join=f"127.0.0.1:{free_port()}")
    assert node.wait() == 2
    assert "GLOO_SOCKET_IFNAME=eth99 names no network interface of " in node.said
    assert not (tmp_path / ".secret").exists()


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.long)])
def test_jobs_that_start_at_once_do_not_collide(tmp_path, count):
    """Each has a store and a folder of its own, and all of them end."""
    code = "me.note(os.environ['LOCKSTEP_STORE_FILE'] + ' ' + os.environ['LOCKSTEP_ATTEMPT_FOLDER'])"
    jobs = []
    for number in range(count):
        run = tmp_path / f"job-{number}"
        run.mkdir()
        described = json.dumps({"code": code, "run_dir": str(run), "nproc": (1, 1)})
        with (run / "said").open("wb") as said:
            env = os.environ | {"PYTHONPATH": MODULES}
            jobs.append(preloaded.start_python(str(PUPPET), described, env=env, cwd=run, stdout=said, stderr=said))

    codes = [job.wait(PATIENCE_S) for job in jobs]
    assert codes == [0] * count, [path.read_text() for path in tmp_path.glob("job-*/said")]
    notes = [(tmp_path / f"job-{number}" / "0-0").read_text().split()[1:] for number in range(count)]
    assert len({store for store, _ in notes}) == len({folder for _, folder in notes}) == count


def test_noise_at_the_meeting_point_does_no_harm(nodes, tmp_path):
    (first,) = nodes(1)
    port = int(first.process.args[-1].partition("127.0.0.1:")[2].partition('"')[0])
    for noise in (
        b"GET / HTTP/1.0\r\n\r\n",
        b"[]\n",
        b'{"kind": "RankExited"}\n',
        b"\xff" * 9000 + b"\n",
        b'{"kind": "RanksGone", "attempt": 0}\n',
    ):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(noise)
    os.stat(f"/proc/{first.process.pid}")
    nodes(1)
    pid_of(tmp_path, 0, 1)
    assert first.process.poll() is None
