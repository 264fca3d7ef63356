"""A preloaded Python does what a fresh one does, and has torch already."""

import os
import signal
import subprocess
import sys

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
