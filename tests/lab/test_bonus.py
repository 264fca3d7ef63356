"""The bonus challenges of the lab: each script runs, checks itself, and its page shows what it prints."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import preloaded

ROOT = Path(__file__).parent.parent.parent
BONUS = ROOT / "lab" / "bonus"
PAGES = ROOT / "docs" / "lab"
SCRIPTS = sorted(path.name for path in BONUS.glob("*.py"))


def run(folder: Path, script: str, *options: str, **variables: str) -> str:
    """Run a script to its end, and return what it printed; it must succeed."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "LAB_FOLDER": str(folder / "pictures"),
        **variables,
    }
    done = preloaded.run_python(str(BONUS / script), *options, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    return done.stdout


def statements(text: str) -> list[str]:
    """Return the statements of checks that passed."""
    return re.findall(r"^  ok   (.+?): .*$", text, re.M)


def load(script: str) -> ModuleType:
    """Import a script without running it."""
    name = f"bonus_{script.removesuffix('.py')}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BONUS / script)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_checks_itself_and_its_page_shows_what_it_prints(script, tmp_path):
    printed = run(tmp_path, script)
    page = (PAGES / f"bonus_{script.removesuffix('.py')}.md").read_text()
    shown = statements(page)
    assert len(shown) >= 5
    assert [statement for statement in shown if statement not in statements(printed)] == []

    # The picture that the page shows is the one that the script draws.
    (drawn,) = (tmp_path / "pictures").glob("*.svg")
    assert f"](pictures/{drawn.name})" in page
    assert (PAGES / "pictures" / drawn.name).exists()


def test_elastic_with_lockstep(tmp_path):
    printed = run(tmp_path, "03_elastic.py", "--lockstep")
    assert "Lockstep: restarts: 3" in printed


@pytest.mark.long
def test_elastic_with_torchrun(tmp_path):
    printed = run(tmp_path, "03_elastic.py", "--torchrun")
    assert "exit codes of the agents: one was killed, the others finished: [-9, 0, 0]" in printed


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 7, 8])
def test_all_reduce_on_other_numbers_of_ranks(world, tmp_path):
    assert f"integers are exact for 2 to {world} ranks" in run(tmp_path, "05_all_reduce.py", LAB_NPROC=str(world))


@pytest.mark.long
@pytest.mark.parametrize(("script", "world"), [("01_zero.py", 3), ("04_pipeline.py", 2)])
def test_other_scripts_on_other_numbers_of_ranks(script, world, tmp_path):
    run(tmp_path, script, LAB_NPROC=str(world))


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["run", "launch"])
@pytest.mark.parametrize("script", ["01_zero.py", "02_powersgd.py", "04_pipeline.py", "05_all_reduce.py"])
def test_under_a_launcher_of_torch(script, launcher, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "LAB_FOLDER": str(tmp_path)}
    words = ["-m", f"torch.distributed.{launcher}", "--standalone", "--nproc-per-node=2", str(BONUS / script)]
    done = preloaded.run_python(*words, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout


# ---- a check that cannot fail proves nothing: break the code, and see that the script says so ---------------------

# Stage 3 does not free a layer after its backward.
NOT_FREED = "        if self.stage == 3:\n            self.free()\n\n    def _move", "\n    def _move"
# The gradients are added in an order that depends on the number of ranks.
RANK_ORDER = "[slot % world][slot // world]", "[slot * world // SLOTS][slot % (SLOTS // world)]"
BROKEN = [
    # (script, old text, new text, the statement that must fail)
    ("01_zero.py", "self.grads / self.world)", "self.grads)", "stage 1: largest difference from Adam"),
    ("01_zero.py", *NOT_FREED, "stage 3: layers that were gathered at the same time"),
    ("02_powersgd.py", "self.errors[index] = wanted - flat", "pass", "torch's hook: largest difference"),
    ("02_powersgd.py", "ps = [orthogonal(p) for p in ps]", "pass", "full rank: largest difference"),
    ("03_elastic.py", 'trained, first = state["trained"], ', "first = ", "how often the 1152 samples were trained"),
    ("03_elastic.py", *RANK_ORDER, "after 3 failures: the model has the same bits"),
    ("04_pipeline.py", "/ micro_batches\n", "\n", "GPipe: largest difference of gradients"),
    ("04_pipeline.py", "min(stages - rank - 1, micro", "min(stages, micro", "1F1B: micro-batches that rank r"),
    ("05_all_reduce.py", "return vector.float() if", "return vector.clone() if", "float16 is rounded once"),
    ("05_all_reduce.py", "for rank in range(1, wire.world):", "for rank in others:", "naive: "),
]


@pytest.mark.long
@pytest.mark.parametrize(("script", "old", "new", "statement"), BROKEN)
def test_a_mistake_is_noticed(script, old, new, statement, tmp_path):
    text = (BONUS / script).read_text()
    assert text.count(old) == 1, f"{text.count(old)} places"
    (tmp_path / script).write_text(text.replace(old, new))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "LAB_FOLDER": str(tmp_path)}
    done = preloaded.run_python(str(tmp_path / script), env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(rf"^  FAIL .*{re.escape(statement)}", done.stdout, re.M), done.stdout + done.stderr


# ---- single functions -----------------------------------------------------------------------------------------


def test_the_bytes_of_the_zero_paper():
    zero = load("01_zero.py")
    found = [7.5 * zero.bytes_per_parameter(stage, 64) for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)
    assert {zero.bytes_per_parameter(stage, 1) for stage in range(4)} == {16}


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_every_schedule_has_the_bubble_of_the_formula(stages, rounds):
    pipeline = load("04_pipeline.py")
    m = stages * rounds
    for schedule, chunks in ((pipeline.gpipe, 1), (pipeline.one_f_one_b, 1), (pipeline.interleaved, 2)):
        for rank in range(stages):
            actions = schedule(rank, stages, m)
            assert sorted(set(actions)) == sorted(actions)
            assert len(actions) == 2 * m * chunks
        expected = (stages - 1) / (chunks * m + stages - 1)
        assert pipeline.simulate(schedule, stages, m, chunks) == pytest.approx(expected)


def test_a_checkpoint_that_was_damaged_is_skipped(tmp_path):
    elastic = load("03_elastic.py")
    assert elastic.load_newest(tmp_path) == (None, [])
    for step in (4, 8):
        elastic.save(tmp_path, {"step": step})
    assert elastic.load_newest(tmp_path) == ({"step": 8}, [])
    elastic.damage_newest(tmp_path)
    assert elastic.load_newest(tmp_path) == ({"step": 4}, ["step-0008.ckpt"])
