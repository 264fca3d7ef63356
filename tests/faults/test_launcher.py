"""The launcher with real processes, but without torch: what it does when ranks, or it itself, are hurt."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest
from launchers import MODULES, Launcher, alive, children_of, events, parent_of, pid_of, pids_of, restarts_of, until

from lockstep.errors import ExitCode, UserError
from lockstep.launch.decisions import rank_exits
from lockstep.launch.job import Bounds, Job
from lockstep.launch.ranks import local_ranks
from lockstep.launch.supervisor import supervise
from lockstep.launch.wire.messages import JobEnd


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a job here and now."""
    monkeypatch.setenv("PYTHONPATH", MODULES)

    def run(code: str, nproc: int | Bounds = 2, entry: str = "puppet:play", preload: tuple[str, ...] = ()) -> JobEnd:
        count = Bounds(nproc, nproc) if isinstance(nproc, int) else nproc
        spec = {"code": code, "run_dir": str(tmp_path)}
        job = Job(spec, tmp_path, count, entry=entry, preload=preload, resume_command="type it again")
        return supervise(job).ending

    return run


@pytest.fixture
def launch(tmp_path):
    """Run jobs in processes of their own."""
    launchers = []

    def launch(code: str, nproc: tuple[int, ...] = (2, 2), **job) -> Launcher:
        launchers.append(Launcher(tmp_path, code, name=f"node-{len(launchers)}", nproc=nproc, **job))
        return launchers[-1]

    yield launch
    for launcher in launchers:
        launcher.end()


def test_every_rank_gets_its_environment_and_its_log(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
    code = f"print(' '.join(os.environ[k] for k in {names}))"
    assert run(f"{code}; me.note(str(os.path.exists(os.environ['LOCKSTEP_ATTEMPT_FOLDER'])))", 3) == JobEnd(0)
    logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in (1, 2)]
    assert logs == ["1 3 1 3 0 127.0.0.1 3\n", "2 3 2 3 0 127.0.0.1 3\n"]
    assert (tmp_path / "0-0").read_text().endswith(" True")


@pytest.mark.parametrize("end", ["pass", "os._exit(3)"])
def test_what_rank_0_prints_into_a_file_is_there_at_its_end(run, capfd, monkeypatch, end):
    """Its output is a file or a pipe as often as a terminal, and Python then writes it in blocks."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    run(f"print('rank', os.environ['RANK'], 'says this'); sys.stdout.write('and this'); {end}", 1)
    said = capfd.readouterr().out
    assert "rank 0 says this\n" in said
    assert ("and this" in said) == (end == "pass")


def test_rank_0_has_the_terminal(run, capfd):
    assert run("print('rank', me.rank)") == JobEnd(0)
    assert "rank 0\n" in (out := capfd.readouterr().out)
    assert "rank 1" not in out


def test_a_script_may_open_a_store_of_its_own(run):
    """Scripts that make the process group themselves find MASTER_PORT free."""
    code = """
    import socket
    if me.rank == 0:
        with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
            me.note()
    """
    assert run(dedent(code)) == JobEnd(0)


def test_the_first_failure_is_printed_and_the_others_are_stopped(run, tmp_path, capfd):
    ending = run("me.note(); me.meet()\nif me.rank == 1: raise ValueError('the real cause')\ntime.sleep(600)", 3)
    assert (ending.code, ending.failure.rank, restarts_of(tmp_path)) == (1, 1, 0)
    text = capfd.readouterr().err
    assert text.startswith("lockstep: rank 1 on ")
    assert "ValueError: the real cause" in text.splitlines()[0]
    assert "2 other ranks ended because of it. Log of rank " in text
    assert text.rstrip().endswith("the same error would most likely recur")
    assert not any(alive(pid_of(tmp_path, 0, rank)) for rank in range(3))
    assert [event["event"] for event in events(tmp_path)] == ["failure"]


def test_a_rank_ends_as_any_python_process_does(run, tmp_path):
    """Threads are waited for, those of executors end, and exit handlers run. torch's compiler has all three."""
    code = """
    import atexit, threading
    from concurrent.futures import ThreadPoolExecutor
    executor = ThreadPoolExecutor(1)  # never shut down
    executor.submit(int).result()
    threading.Thread(target=lambda: (time.sleep(0.2), me.note("a thread"))).start()
    atexit.register(lambda: me.note((me.run_dir / f"0-{me.rank}").read_text() + ", then the handlers"))
    """
    assert run(dedent(code)) == JobEnd(0)
    assert all((tmp_path / f"0-{rank}").read_text().endswith("a thread, then the handlers") for rank in (0, 1))


def test_a_program_that_exits_with_the_code_of_a_preemption_has_failed(run, capfd):
    """A scheduler would run the job again, for ever."""
    ending = run("me.commit(40)\nif me.rank == 1: sys.exit(75)\ntime.sleep(600)")
    assert (ending.code, ending.failure.rank, ending.failure.kind) == (ExitCode.FAILED, 1, "SystemExit")
    assert "rank 1 on " in (text := capfd.readouterr().err)
    assert 'File "<string>", line 2' in text or "<string>:2" in text


def test_a_program_may_clean_up_after_a_preemption(launch, tmp_path):
    code = """
    from lockstep.errors import Preempted
    me.note()
    try:
        me.train()
    except Preempted as stop:
        sys.exit(stop.code)
    """
    launcher = launch(dedent(code))
    pids_of(tmp_path, 0, 2)
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 75


def test_an_error_after_a_preemption_is_shown(launch, tmp_path):
    """The rank counted as saved and ended as asked, and the traceback appeared nowhere."""
    code = """
    from lockstep.errors import Preempted
    me.note()
    try:
        me.train()
    except Preempted as stop:
        clean_up()
    """
    launcher = launch(dedent(code))
    pids_of(tmp_path, 0, 2)
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 75
    assert "NameError: name 'clean_up' is not defined" in launcher.said
    assert "saved at step 7" in launcher.said


def test_a_user_error_is_shown_without_a_traceback(run, capfd):
    assert run("raise UserError('asked', 'found', 'type this')").code == 2
    assert capfd.readouterr().err == "lockstep: asked\n  found: found\n  do:    type this\n"


def test_a_killed_rank_is_the_culprit_and_all_are_started_again(run, tmp_path, capfd):
    code = """
    me.note()
    me.heartbeat.beat("all-reduce", 41)
    if me.attempt == 0 and me.rank == 1:
        while not (me.run_dir / "0-0").exists():
            time.sleep(0.01)
        me.commit(40)
        print("my last words")
        me.kill()
    time.sleep(0.1 if me.attempt else 600)
    """
    ending = run(dedent(code))
    assert (ending.code, restarts_of(tmp_path)) == (0, 1)
    head, *rest = capfd.readouterr().err.splitlines()
    assert head.startswith("lockstep: rank 1 on ")
    assert " failed at step 41, phase all-reduce, " in head
    assert ": SIGKILL: killed" in head
    assert rest[0] == "  my last words"
    assert rest[-1] == "  restarting 2 ranks from the checkpoint of step 40 (restart 1 of 10 in an hour)"
    assert [event["event"] for event in events(tmp_path)] == ["failure", "restart"]
    assert {path.name for path in tmp_path.glob("?-?")} == {"0-0", "0-1", "1-0", "1-1"}


def test_a_rank_that_only_complains_is_not_the_culprit(run, capfd, monkeypatch, tmp_path):
    """The complaint is on record before the other one dies."""
    # A busy machine needs longer than a second.
    monkeypatch.setitem(rank_exits.ROOT_WAIT_S, "yes", 60.0)
    code = """
    if me.attempt == 0 and me.rank == 1:
        while not (me.folder / "rank-0.json").exists():
            time.sleep(0.01)
        me.kill()
    if me.attempt == 0:
        raise RuntimeError("[pair.cc:537] Read error: connection reset by peer")
    """
    run(dedent(code))
    assert restarts_of(tmp_path) == 1
    text = capfd.readouterr().err
    assert "rank 1" in text.splitlines()[0]
    assert "connection reset" not in text


def test_a_crash_shows_where_python_was(run, capfd, tmp_path):
    code = "import ctypes\ndef inner(): ctypes.string_at(0)\nif me.attempt == 0: inner()"
    run(code, 1)
    assert restarts_of(tmp_path) == 1
    text = capfd.readouterr().err
    assert "SIGSEGV: segmentation fault in native code" in text.splitlines()[0]
    assert "<string>:2 inner" in text


def test_the_budget_of_restarts_ends(run, capfd, tmp_path):
    code = """
    import json
    (me.folder / "s.tmp").write_text(json.dumps({"restart": {"per_hour": 2, "grace": 9}}))
    (me.folder / "s.tmp").rename(me.folder / "settings.json")
    me.kill()
    """
    ending = run(dedent(code), 1)
    assert (ending.code, restarts_of(tmp_path)) == (1, 2)
    assert "not restarted: 2 restarts within the last hour" in capfd.readouterr().err


def test_an_exception_after_progress_is_worth_another_try(run, tmp_path):
    code = "me.commit(10 + me.attempt if me.attempt < 2 else 11)\nif me.attempt < 3: raise ValueError('now and then')"
    ending = run(code, 1)
    assert (ending.code, restarts_of(tmp_path)) == (1, 2)  # the third one made no progress


def test_an_exit_code_is_a_failure(run, capfd):
    assert run("os._exit(3)", 1).code == 1
    assert "ended with code 3" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_on_a_stop_request_every_rank_saves_first(launch, tmp_path, number, code):
    launcher = launch("me.note(); me.train()")
    ranks = pids_of(tmp_path, 0, 2)
    launcher.signal(number)
    assert launcher.wait() == code
    assert launcher.said.rstrip().endswith("lockstep: saved at step 7; to resume: type it again")
    assert events(tmp_path)[-1]["event"] == "preempted"
    assert not any(alive(pid) for pid in ranks)


def test_ranks_that_are_signalled_one_by_one_stop_too(run, tmp_path):
    def signal_each() -> None:
        for pid in pids_of(tmp_path, 0, 2):  # both are there before one of them stops
            with suppress(ProcessLookupError):  # this thread was late, and the launcher has stopped it
                os.kill(pid, signal.SIGTERM)

    in_the_meantime(signal_each)
    assert run("me.note(); me.train()").code == 75


def test_loader_processes_live_until_their_rank_has_stopped_and_no_longer(launch, tmp_path):
    code = """
    import subprocess
    loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    me.note(str(loader.pid))
    try:
        me.train()
    finally:
        (me.run_dir / f"loader-{me.rank}").write_text(str(loader.poll()))
    """
    launcher = launch(dedent(code))
    pids_of(tmp_path, 0, 2)
    loaders = [int((tmp_path / f"0-{rank}").read_text().split()[1]) for rank in (0, 1)]
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 75
    assert [(tmp_path / f"loader-{rank}").read_text() for rank in (0, 1)] == ["None", "None"]
    until(lambda: not any(alive(pid) for pid in loaders))


def test_a_second_interrupt_does_not_wait(launch, tmp_path):
    launcher = launch("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); me.note(); time.sleep(600)")
    pids_of(tmp_path, 0, 2)  # one that does not ignore SIGTERM yet would end, and the job with it
    launcher.signal(signal.SIGINT)
    until(lambda: "asking 2 ranks to save" in launcher.said)
    assert launcher.process.poll() is None
    launcher.signal(signal.SIGINT)
    assert launcher.wait() == 130


def test_a_stop_request_before_anything_has_begun(launch, tmp_path):
    launcher = launch("me.train()")
    until(lambda: (tmp_path / "logs").exists())
    launcher.signal(signal.SIGTERM)
    assert launcher.wait() == 75


def test_a_second_kill_during_recovery(run, tmp_path):
    def kill_each() -> None:
        for attempt in range(3):
            os.kill(pid_of(tmp_path, attempt, attempt % 2), signal.SIGKILL)  # as soon as one is there

    in_the_meantime(kill_each)
    ending = run("me.note()\nif me.attempt < 3: time.sleep(600)")
    assert (ending.code, restarts_of(tmp_path)) == (0, 3)
    assert [event["event"] for event in events(tmp_path)].count("restart") == 3


@pytest.mark.parametrize("stopped", [False, True])
def test_no_rank_outlives_its_launcher(launch, tmp_path, stopped):
    launcher = launch("me.note(str(me.folder)); time.sleep(600)")
    pids = [*pids_of(tmp_path, 0, 2), launcher.zygote()]
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[2], signal.SIGKILL)  # and no process is left that could stop it
    launcher.signal(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in pids))
    if not stopped:  # the zygote was left to clean up
        until(lambda: not Path((tmp_path / "0-0").read_text().split()[1]).exists())


def test_a_newborn_rank_that_is_stopped_does_not_outlive_its_launcher(launch, monkeypatch):
    """It leads no process group yet, and has not told the kernel that it is to die with its parent."""
    monkeypatch.setenv("PUPPET_STOPS_AT_BIRTH", "1")
    launcher = launch("me.note()", (1, 1))
    (zygote,) = until(lambda: children_of(launcher.process.pid))
    (newborn,) = until(lambda: children_of(zygote))
    launcher.signal(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in (newborn, zygote)))


def test_a_suspended_zygote_does_not_outlive_its_launcher(launch, tmp_path):
    """It could not notice that the launcher is gone, nor end its suspended ranks."""
    launcher = launch("me.note(); me.kill(19)")
    ranks = pids_of(tmp_path, 0, 2)
    zygote = launcher.zygote()
    os.kill(zygote, signal.SIGSTOP)
    launcher.signal(signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in (*ranks, zygote)))


def test_files_in_the_working_folder_do_not_take_the_place_of_modules(run, tmp_path, monkeypatch):
    """The process that forks the ranks imports everything, from wherever it was started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "html.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "beside.py").touch()
    assert run("import html, beside; me.note(html.__file__)", 1, preload=("html",)) == JobEnd(0)
    assert str(tmp_path) not in (tmp_path / "0-0").read_text()


def test_a_run_folder_that_is_removed_is_noticed(launch, tmp_path):
    launcher = launch("me.note(); me.train()")
    pids_of(tmp_path, 0, 2)
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    until(lambda: f"run_dir={tmp_path} was removed or replaced" in (moved / "node-0.txt").read_text())
    moved.rename(tmp_path)
    assert launcher.said.count("was removed or replaced") == 1


def test_the_process_that_starts_ranks_is_replaced(run, tmp_path, capfd):
    first = []

    def kill_zygote() -> None:
        first.extend(pids_of(tmp_path, 0, 2))
        os.kill(parent_of(first[0]), signal.SIGKILL)

    in_the_meantime(kill_zygote)
    assert run("me.note()\nif me.attempt == 0: time.sleep(600)").code == 0
    assert "that starts the ranks on " in capfd.readouterr().err
    assert len(first) == 2
    assert not any(alive(pid) for pid in first)
    pid_of(tmp_path, 1, 1)


@pytest.fixture
def impatient(monkeypatch, tmp_path):
    """Suspect halted ranks soon, until the function is called that this returns.

    A rank that has ended looks halted until it is reaped, and on a busy machine that takes longer than a moment.
    """
    monkeypatch.setattr("lockstep.launch.hangs.suspicion.HALTED_S", 0.3)
    # A rank that can answer does so sooner.
    monkeypatch.setattr(local_ranks, "RANKS_ANSWER_S", 60.0)

    def be_patient() -> None:
        monkeypatch.setattr("lockstep.launch.hangs.suspicion.HALTED_S", 120.0)
        (tmp_path / "patient").touch()

    return be_patient


# Later attempts end when the launcher is patient again.
UNTIL_PATIENT = "while not (me.run_dir / 'patient').exists(): time.sleep(0.01)"


def in_the_meantime(act) -> None:
    threading.Thread(target=act, daemon=True).start()


def test_a_stopped_process_that_starts_ranks_is_replaced(run, tmp_path, capfd, monkeypatch, impatient):
    # The dead rank would not answer in any time, and the stopped process would not say that its ranks have ended.
    monkeypatch.setattr(local_ranks, "RANKS_ANSWER_S", 0.3)
    monkeypatch.setattr("lockstep.launch.agent.RANKS_KILL_S", 0.3)

    def hurt() -> None:
        rank = pids_of(tmp_path, 0, 2)[1]
        zygote = parent_of(rank)
        os.kill(zygote, signal.SIGSTOP)
        os.kill(rank, signal.SIGKILL)
        until(lambda: not alive(zygote))
        impatient()

    in_the_meantime(hurt)
    ending = run(f"me.note()\nif me.attempt == 0: me.train()\n{UNTIL_PATIENT}")
    assert (ending.code, restarts_of(tmp_path)) == (0, 1)  # seen as a rank that is dead, but not reaped
    assert "rank 1 on " in capfd.readouterr().err


def test_a_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UserError, match="run_dir="):
        run("me.note()")


def test_what_cannot_be_imported_is_not_tried_again(run, capfd, tmp_path):
    ending = run("", entry="no_such_module:work")
    assert (ending.code, restarts_of(tmp_path)) == (1, 0)
    assert "No module named 'no_such_module'" in (text := capfd.readouterr().err)
    assert "it would end the same way" in text


def test_resize(run, tmp_path, capfd):
    def ask() -> None:
        pids_of(tmp_path, 0, 2)
        for asked in ("many", "3"):
            (tmp_path / "resize").write_text(asked)
            until(lambda: not (tmp_path / "resize").exists())
        pids_of(tmp_path, 1, 3)
        (tmp_path / "resize").write_text("1")

    in_the_meantime(ask)
    code = "me.note(str(me.world) + os.environ['OMP_NUM_THREADS']); me.train(600 if me.attempt < 2 else 0)"
    assert run(code, Bounds(1, 3, 2)).code == 0
    said = capfd.readouterr().err
    assert "must hold a number; it held 'many'" in said
    assert [(e["from"], e["to"]) for e in events(tmp_path) if e["event"] == "resize"] == [(2, 3), (3, 1)]
    assert [len(list(tmp_path.glob(f"{attempt}-*"))) for attempt in range(3)] == [2, 3, 1]
    assert "restarting" not in said


def test_a_rank_that_keeps_dying_before_anything_is_saved_ends_the_job(run, capfd, tmp_path):
    ending = run("if me.rank == 1: me.kill()\ntime.sleep(600)", Bounds(1, 2))
    assert (ending.code, restarts_of(tmp_path)) == (1, 5)
    assert "not restarted: 5 restarts in a row without a new checkpoint" in capfd.readouterr().err


def test_a_stopped_rank_is_named(run, tmp_path, capfd, impatient):
    def stop() -> None:
        rank = pids_of(tmp_path, 0, 2)[1]
        os.kill(rank, signal.SIGSTOP)
        until(lambda: not alive(rank))
        impatient()

    in_the_meantime(stop)
    run(f"me.note()\nif me.attempt == 0: me.train()\n{UNTIL_PATIENT}")
    assert restarts_of(tmp_path) == 1
    head, *detail = capfd.readouterr().err.splitlines()
    assert "rank 1 on " in head
    assert "suspended by a signal" in head
    assert any("puppet.py" in line for line in detail)  # where the other one was
    assert not alive(pid_of(tmp_path, 0, 1))


def test_a_program_that_goes_on_after_its_run_does_not_hang(run):
    """Rank 0 exports the model, while rank 1 has ended; `hang.first` would be over."""
    code = """
    me.heartbeat.beat("after run", 41)
    me.note()
    if me.rank == 0:
        me.meet()
        (me.folder / "settings.json").write_text('{"hang": {"first": 1.0}}')
        time.sleep(6)
    """
    assert run(dedent(code)) == JobEnd(0)


def test_a_run_that_never_closes_hangs(run, capfd, tmp_path):
    # No restart: the ranks of another attempt might not begin within such a limit.
    code = """
    me.heartbeat.beat("end" if me.rank == 0 else "collective", 41)
    me.note()
    if me.rank == 0:
        me.meet()
        settings = '{"hang": {"first": 1.0, "least": 0.5}, "restart": {"per_hour": 0}}'
        (me.folder / "settings.json").write_text(settings)
    time.sleep(600)
    """
    ending = run(dedent(code))
    assert (ending.code, ending.failure.rank, restarts_of(tmp_path)) == (1, 0, 0)
    assert "rank 0 on " in (head := capfd.readouterr().err.splitlines()[0])
    assert "phase end" in head
    assert "hang" in head


def test_a_machine_without_a_folder_for_its_ranks_says_so(run, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as removed:
        removed.setattr("tempfile.tempdir", str(tmp_path / "removed"))
        assert run("me.note()").code == ExitCode.FAILED

    said = capfd.readouterr().err
    assert "cannot set up its ranks: [Errno 2] No such file or directory" in said
    assert "not restarted: no checkpoint has been saved since the last start" in said


def test_folders_are_removed(run, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    code = """
    import multiprocessing.util
    multiprocessing.util.get_temp_dir()  # worker processes have one for their sockets
    me.note(oct(me.folder.stat().st_mode & 0o777))
    if me.attempt == 0: me.kill()
    """
    code = dedent(code)
    run(code, 1)
    assert restarts_of(tmp_path) == 1
    assert (tmp_path / "1-0").read_text().endswith("0o700")
    assert not list((tmp_path / "scratch").iterdir())
