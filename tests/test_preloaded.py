"""A preloaded Python does what a fresh one does, and has torch already."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

import preloaded

CHILD = "import sys; print('torch' in sys.modules, sys.stdin.read(), file=sys.stderr); sys.exit(7)"
PARENT = f"""
import subprocess, sys
for stderr in (subprocess.PIPE, subprocess.STDOUT):
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    out, err = child.communicate("said")
    print(child.returncode, out, err)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('text')",
        "raise ZeroDivisionError('deliberate')",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'last'); print('first')",
        "import threading; threading.Timer(0.1, lambda: print('late')).start()",
        "import sys; print(sys.argv, __name__, sys.path[0])",
    ],
)
def test_it_ends_as_a_fresh_one_does(code, tmp_path):
    ours = preloaded.run_python("-c", code, "more", cwd=tmp_path, env=os.environ)
    fresh = subprocess.run([sys.executable, "-c", code, "more"], cwd=tmp_path, capture_output=True, text=True)
    assert (ours.returncode, ours.stdout) == (fresh.returncode, fresh.stdout)
    assert ours.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]
    assert fresh.returncode != 0 or not fresh.stderr
    assert "Interrupt" not in code or ours.returncode == -signal.SIGINT


def test_other_sources_of_lockstep_are_imported_from_where_they_are(tmp_path):
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep" / "__init__.py").write_text("where = 'another folder'")
    code = "import lockstep; print(lockstep.where)"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert preloaded.run_python("-c", code, cwd="/", env=env).stdout == "another folder\n"


def test_a_script_knows_its_file_and_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("here = __file__")
    (tmp_path / "script.py").write_text("import neighbour, sys\nprint(__file__, neighbour.here, sys.argv[1:])")
    said = preloaded.run_python(str(tmp_path / "script.py"), "a", cwd="/", env=os.environ).stdout
    assert said == f"{tmp_path}/script.py {tmp_path}/neighbour.py ['a']\n"


@pytest.mark.skipif(preloaded.fresh(), reason="every command is a fresh process")
def test_what_it_starts_has_torch_too(tmp_path):
    said = preloaded.run_python("-c", PARENT, cwd=tmp_path, env=os.environ).stdout
    assert said.split() == ["7", "True", "said", "7", "True", "said", "None"]


SIGNALLED = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
child.send_signal(getattr(signal, sys.argv[1]))
print(child.wait())
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_what_it_has_just_started_is_not_lost(name, tmp_path):
    ended = preloaded.run_python("-c", SIGNALLED, name, cwd=tmp_path, env=os.environ)
    assert ended.stdout == f"{-signal.Signals[name]}\n", ended.stderr


def test_a_command_leads_its_session_as_soon_as_its_number_is_known(tmp_path):
    with (tmp_path / "said").open("w") as said:
        words = ("-c", "import time; time.sleep(600)")
        process = preloaded.start_python(*words, cwd=tmp_path, env=os.environ, stdout=said, stderr=said)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


HANGING_CHILD = """
import threading
def wait_for_nothing():
    print("ready", flush=True)
    threading.Event().wait()
wait_for_nothing()
"""
HANGING = f"""
import subprocess, sys
def wait_for_a_child():
    subprocess.Popen([sys.executable, "-c", {HANGING_CHILD!r}], start_new_session=True).wait()
wait_for_a_child()
"""


@pytest.mark.skipif(preloaded.fresh(), reason="a fresh process does not answer")
def test_a_command_that_hangs_says_where_its_processes_are_and_leaves_none(tmp_path):
    said = tmp_path / "said"
    with said.open("w") as output:
        process = preloaded.start_python(
            "-c", HANGING, cwd=tmp_path, env=os.environ, stdout=output, stderr=output, spares=2
        )
    while said.read_text() != "ready\n":
        assert process.poll() is None
        time.sleep(0.02)
    tree = preloaded._tree(process.pid)
    with pytest.raises(AssertionError, match=r"^it did not end within 0 s\nready\n") as error:
        preloaded.wait(process, 0.0, said.read_text)
    first, *others = re.split("^--- ", str(error.value), flags=re.M)[1:]
    assert f"process {process.pid}, " in first
    assert "in wait_for_a_child" in first
    (child,) = [part for part in others if "File" in part]  # the others wait to become what these start
    assert f"started by {process.pid}, " in child
    assert "in wait_for_nothing" in child

    assert process.wait(60) == -signal.SIGKILL
    while any(preloaded._tree(pid) for pid in tree):
        time.sleep(0.02)
