"""Labs 7 to 9: their scripts show what they say, their graders pass the solutions and explain each mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import preloaded
from lockstep.lab.patient.faults import CAUSES, SILENT, TASK, plan, silent_mistake
from ports import free_port

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {"7": "07_failure.py", "8": "08_resume.py", "9": "09_determinism.py"}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, *words: str):
    return preloaded.run_python(*words, cwd=folder, env=ENVIRONMENT | {"LAB_FOLDER": str(folder / "lab")})


@pytest.mark.parametrize("number", [pytest.param("7", marks=pytest.mark.long), "8", "9"])
def test_a_script_shows_what_it_says(tmp_path, number):
    done = run(tmp_path, _solution(number))
    assert done.returncode == 0, done.stdout + done.stderr
    says_so(number, done.stdout, tmp_path / "lab")


def says_so(number: str, printed: str, pictures: Path) -> None:
    assert "FAIL" not in printed
    assert printed.count("  ok   ") >= 5
    assert (pictures / SCRIPTS[number].replace(".py", ".svg")).exists()


@pytest.mark.long
@pytest.mark.parametrize("number", ["8", "9"])
def test_a_script_runs_under_torchrun(tmp_path, number):
    done = run(
        tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", _solution(number)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout


def _solution(number: str) -> str:
    return str(ROOT / "lab" / "beyond" / SCRIPTS[number])


# ---- whole files, through the command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [pytest.param("7", marks=pytest.mark.long), pytest.param("8", marks=pytest.mark.long), "9"]
)
def test_the_solution_passes(tmp_path, number):
    done = run(tmp_path, "-m", "lockstep", "lab", "check", number, _solution(number))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout.splitlines()
    assert "FAIL" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("number", SCRIPTS)
def test_the_starter_does_not_pass(tmp_path, number):
    done = run(tmp_path, "-m", "lockstep", "lab", "check", number, str(ROOT / "lab" / "exercises" / SCRIPTS[number]))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not yet" in done.stdout


@pytest.mark.long
def test_verify_names_the_noise_of_the_starter(tmp_path):
    """With everything else mended."""
    text = (ROOT / "lab" / "exercises" / SCRIPTS["9"]).read_text()
    solution = Path(_solution("9")).read_text()
    functions = solution[solution.index("def mine(") : solution.index("# ---- part 3")]
    mended = text[: text.index("def mine(")] + functions + text[text.index("class Small") :]
    (tmp_path / "mended.py").write_text(mended)
    done = run(tmp_path, "-m", "lockstep", "lab", "check", "9", str(tmp_path / "mended.py"))
    assert done.returncode == 1
    assert "not yet: 1 to fix" in done.stdout
    assert "to the last bit: randomness" in done.stdout


# ---- one mistake each ---------------------------------------------------------------------------------------

# name: (exercise, old text, new text, words of the explanation)
MISTAKES = {
    "answer: the victim": (
        "7",
        '{"rank": 1, "line": None, "cause": "killed"}',
        '{"rank": 0, "line": None, "cause": "killed"}',
        "read the first line",
    ),
    "answer: a caller": (
        "7",
        '"line": "return x / scale[:, None]"',
        '"line": "x = self._normalise(x)"',
        "that is a caller",
    ),
    "answer: no line": ("7", '"line": "time.sleep(0.05)"', '"line": None', "open the file there"),
    "answer: a line for a kill": (
        "7",
        '"line": None, "cause": "killed"',
        '"line": "os.kill()", "cause": "killed"',
        "shows no stack",
    ),
    "answer: another cause": ("7", '"cause": "exit"', '"cause": "hang"', "with an exit code and without an exception"),
    "answer: one is missing": (
        "7",
        '    {"rank": 0, "line": "sys.exit(0)", "cause": "exit"},\n',
        "",
        "read the first line",
    ),
    "with replacement": (
        "8",
        ".permutation(self.samples)",
        ".integers(self.samples, size=self.samples)",
        "a third of the samples",
    ),
    "a generator that is kept": (
        "8",
        "np.random.default_rng((self.seed, epoch))",
        "self.__dict__.setdefault('g', np.random.default_rng(epoch))",
        "make the generator anew",
    ),
    "every epoch alike": ("8", "default_rng((self.seed, epoch))", "default_rng((self.seed, 0))", "pitfall 1"),
    "a rest is lost": (
        "8",
        "batch[rank * BATCH // world : (rank + 1) * BATCH // world]",
        "batch[rank * (BATCH // world) : (rank + 1) * (BATCH // world)]",
        "which leaves no rest",
    ),
    "no momentum": ("8", '    optimizer.load_state_dict(state["optimizer"])\n', "", "the momentum of the optimizer"),
    "one step again": (
        "8",
        "save(path, step + 1, model, optimizer)",
        "save(path, step, model, optimizer)",
        "one step is repeated",
    ),
    "torn": ("8", 'path.with_suffix(".new")', "path", "Write to another name"),
    "a mean of means": (
        "8",
        'F.cross_entropy(model(x), y, reduction="sum").backward()',
        "(F.cross_entropy(model(x), y) * BATCH / world).backward()",
        "mean of means",
    ),
    "every second one": (
        "9",
        "range(rank * count, (rank + 1) * count)",
        "range(rank, MICRO_BATCHES, world)",
        "what is next to each other",
    ),
    "a chain": (
        "9",
        "    while len(parts) > 1:\n",
        "    return sum(parts[1:], parts[0])\n    while len(parts) > 1:\n",
        "one after the other is a chain",
    ),
    "an all-reduce": (
        "9",
        "    dist.all_gather(roots, root, group=group)\n    return tree_sum(roots)",
        "    dist.all_reduce(root, group=group)\n    return root",
        "An all-reduce adds in an order of its own",
    ),
    "its own first": (
        "9",
        "return tree_sum(roots)",
        "r = dist.get_rank(group)\n    return tree_sum(roots[r:] + roots[:r])",
        "not its own first",
    ),
    "everything is sent": (
        "9",
        "    root = tree_sum(parts)\n",
        "    mine_all = torch.stack(parts)\n"
        "    everything = [torch.empty_like(mine_all) for _ in range(dist.get_world_size(group))]\n"
        "    dist.all_gather(everything, mine_all, group=group)\n"
        "    return tree_sum([part for rank in everything for part in rank])\n",
        "MICRO_BATCHES times the gradient",
    ),
    "the group is ignored": ("9", "(roots, root, group=group)", "(roots, root)", "pass group on"),
    "divided too early": (
        "9",
        "root = tree_sum(parts)\n",
        "root = tree_sum(parts) / dist.get_world_size(group)\n",
        "Divide once",
    ),
}


# Each costs a second or two, and another mistake is found by the same check: `make test-long`.
LONG = {
    "answer: a line for a kill",
    "answer: one is missing",
    "a generator that is kept",
    "with replacement",
    "every epoch alike",
    "a rest is lost",
    "one step again",
    "its own first",
    "divided too early",
    "the group is ignored",
}


@pytest.fixture(scope="module")
def graded(request, tmp_path_factory):
    """The findings for each mistake that was asked for, and for the solutions without one."""
    items = [item for item in request.session.items if item.name.startswith("test_a_mistake_is_explained")]
    chosen = {item.callspec.params["name"] for item in items}
    folder = tmp_path_factory.mktemp("variants")
    variants = {f"solution {number}": (number, _solution(number)) for number in SCRIPTS}
    for place, name in enumerate(sorted(chosen)):
        number, old, new, _ = MISTAKES[name]
        text = Path(_solution(number)).read_text()
        assert old in text, f"{name}: the solution no longer says {old!r}"
        path = folder / f"variant_{place}.py"
        path.write_text(text.replace(old, new, 1))
        variants[name] = (number, str(path))
    (folder / "variants.json").write_text(json.dumps(variants))
    done = run(folder, str(Path(__file__).with_name("grade_variants.py")), str(folder), _solution("7"))
    assert done.returncode == 0, done.stdout + done.stderr
    says_so("7", (folder / "script-7.txt").read_text(), folder / "lab")
    return json.loads((folder / "findings.json").read_text())


@pytest.mark.parametrize("number", SCRIPTS)
def test_nothing_is_wrong_with_a_solution(graded, number):
    assert [finding for finding in graded[f"solution {number}"] if not finding[1]] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in MISTAKES]
)
def test_a_mistake_is_explained(graded, name):
    words = MISTAKES[name][3]
    failed = [" ".join(finding) for finding in ((s, f, w) for s, passed, f, w in graded[name] if not passed)]
    assert failed, "it passed"
    assert any(words in text for text in failed), failed


# ---- the patient --------------------------------------------------------------------------------------------


def test_every_seed_plants_every_cause_once():
    for seed in range(20):
        faults = plan(seed)
        assert sorted(fault.cause for fault in faults) == sorted(CAUSES)
        assert plan(seed) == faults
    assert {fault.rank for seed in range(20) for fault in plan(seed)} == {0, 1}
    assert {silent_mistake(seed) for seed in range(20)} == set(SILENT)


def test_the_lines_of_the_faults_are_lines_of_the_task():
    lines = [line.strip() for line in TASK.read_text().splitlines()]
    assert [line for line in CAUSES.values() if line and lines.count(line) != 1] == []
