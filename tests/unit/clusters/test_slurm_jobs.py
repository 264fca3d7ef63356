"""`lockstep launch slurm` without Slurm: the script that it writes, what the script does, and what is refused.

tests/cluster/test_slurm.py runs such scripts on a real cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.clusters import slurm, slurm_partitions
from lockstep.clusters.slurm_job import seconds_of
from lockstep.clusters.slurm_partitions import PartitionNodes, megabytes, parse_sinfo

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Slurm, whatever this one has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "ask_cluster", lambda: "no cluster here")
    for name in [name for name in os.environ if name.startswith("SBATCH_")]:
        monkeypatch.delenv(name)


def rendered(capsys: pytest.CaptureFixture[str], *words: str, target: str = "char_lm") -> str:
    assert main(["launch", "slurm", target, "run_dir=runs/x", *words]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    return script


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "slurm", "char_lm", *words]) == 2
    return capsys.readouterr().err


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def train_commands(script: str) -> list[list[str]]:
    """Return the words of each `lockstep train`, with the shell's variables as they are."""
    step = script[script.index("\nsrun ") : script.index("\ncode=$?")].replace("\\\n", " ")
    commands = [part.split(" train ", 1)[1] for part in re.split(r"\s:\s", step)]
    return [shlex.split(command) for command in commands]


def test_what_is_submitted_is_said_before_it_is_done(capsys, monkeypatch):
    said_before = []

    def run(words, *_):
        said_before.append(capsys.readouterr().err)
        return subprocess.CompletedProcess(words, 0, stdout="70\n", stderr="")

    monkeypatch.setattr(slurm, "run", run)
    assert main(["launch", "slurm", "char_lm", "run_dir=runs/x", "--submit"]) == 0
    assert len(said_before) == 2
    assert said_before[1] == "lockstep: submitting it: sbatch runs/x/launch/job.slurm\n"


# ---- the script ----


def test_two_nodes(capsys):
    script = rendered(capsys, "steps=3", "--nproc", "4", "--nnodes", "2", "--time", "1:00:00", "--gpus-per-node", "4")
    asked = directives(script)
    for line in ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--gpus-per-node=4", "--time=1:00:00"):
        assert line in asked
    for line in ("--requeue", "--signal=USR1@120", "--open-mode=append", "--output=runs/x/slurm-%j.log"):
        assert line in asked
    assert "--no-kill" not in asked

    (words,) = train_commands(script)
    assert words[:3] == ["char_lm", "steps=3", "run_dir=$run"]
    assert words[3:] == ["--nproc", "4", "--nnodes", "2", "--join", "$first:$port", "--resume", "auto"]


def test_one_node_needs_no_address(capsys):
    script = rendered(capsys, "--nproc", "2")
    assert "port=" not in script
    assert "--join" not in script


def test_fewer_nodes_may_do(capsys):
    """With a number of tasks, Slurm would give the fewest nodes; without --no-kill, a lost node would end the step."""
    script = rendered(capsys, "--nproc", "2", "--nnodes", "1:4")
    assert "--nodes=1-4" in directives(script)
    assert "--no-kill" in directives(script)
    assert not [line for line in directives(script) if line.startswith("--ntasks")]
    assert re.search(r"^srun .*--ntasks-per-node=1 .*--no-kill", script, re.M)


def test_words_with_spaces_and_dollars_reach_the_command_as_typed(capsys, tmp_path):
    (tmp_path / "own.py").write_text("import lockstep\n\nwith lockstep.start() as run:\n    pass\n")
    words = ["--config", "a b.yaml", "--nproc", "2", "--", "--text", "$HOME `ls` it's", "a\nb"]
    (tmp_path / "a b.yaml").write_text("steps: 3\n")
    script = rendered(capsys, *words, target="own.py")
    (command,) = train_commands(script)
    assert command[command.index("--") + 1 :] == words[-3:]
    assert "a b.yaml" in command


def test_a_folder_with_odd_characters(capsys):
    folder = "runs/100% $x's"
    assert main(["launch", "slurm", "char_lm", f"run_dir={folder}", "--nproc", "1"]) == 0
    script = capsys.readouterr().out
    assert f"run={shlex.quote(folder)}\n" in script
    (output,) = [line for line in directives(script) if line.startswith("--output")]
    assert shlex.split(output) == ["--output=runs/100%% $x's/slurm-%j.log"]


def test_an_array_has_a_folder_and_settings_for_each_task(capsys):
    script = rendered(capsys, "--vary", "seed=1,2", "--vary", "lr.peak=1e-3,1e-4", "--nproc", "1")
    assert "--array=0-3" in directives(script)
    assert "--output=runs/x/slurm-%A_%a.log" in directives(script)
    assert "2) settings=(seed=2 lr.peak=1e-3) ;;" in script
    assert 'run=runs/x/task-"$SLURM_ARRAY_TASK_ID"' in script


def test_nodes_of_two_kinds(capsys):
    kind = "nproc=8 nnodes=1 gpus_per_node=h100:8 constraint=h100"
    script = rendered(capsys, "--nproc", "4", "--nnodes", "2", "--gpus-per-node", "4", "--component", kind)
    asked = directives(script)
    first, second = asked[: asked.index("hetjob")], asked[asked.index("hetjob") + 1 :]
    assert {"--nodes=2", "--gpus-per-node=4", "--cpus-per-task=4"} <= set(first)
    assert {"--nodes=1", "--gpus-per-node=h100:8", "--cpus-per-task=8", "--constraint=h100"} <= set(second)
    commands = train_commands(script)
    assert [command[command.index("--nproc") + 1] for command in commands] == ["4", "8"]
    assert {command[command.index("--nnodes") + 1] for command in commands} == {"3"}


def test_tasks_as_ranks(capsys):
    script = rendered(capsys, "--mode", "srun", "--nproc", "4", "--nnodes", "2", "--cpus-per-task", "3")
    assert {"--ntasks-per-node=4", "--cpus-per-task=3"} <= set(directives(script))
    (words,) = train_commands(script)
    assert words == ["char_lm", "run_dir=$run", "--resume", "auto"]
    assert "--wait=120" in script

    # A rank that fails counts more than one that has only missed it, and ends with 75.
    assert "export LOCKSTEP_FINAL_CODES='1 2 130'\n" in script


def test_options_for_sbatch_hold_for_every_component(capsys):
    script = rendered(capsys, "--nproc", "1", "--component", "nproc=2 nnodes=1", "--sbatch", "exclusive")
    asked = directives(script)
    assert "--exclusive" in asked[: asked.index("hetjob")]
    assert "--exclusive" in asked[asked.index("hetjob") :]


def test_more_options_for_sbatch_and_lines_to_run_first(capsys):
    words = ["--sbatch", "exclude=node7 exclusive", "--sbatch=--comment 'two words'", "--setup", "module load cuda"]
    script = rendered(capsys, *words, "--nproc", "1")
    assert {"--exclude=node7 --exclusive", "--comment 'two words'"} <= set(directives(script))
    assert "\nmodule load cuda\n" in script

    # An environment that these lines activate comes before the one of the launcher.
    assert script.index("export PATH=") < script.index("\nmodule load cuda\n")


# ---- what the script does with the exit code of its tasks ----


def run_script(script: str, folder: Path, code: int, requeue: int = 0, **env: str) -> tuple[int, str, str]:
    """Run a script with stand-ins for Slurm's commands. Returns its exit code, their arguments, and its output."""
    stand_ins = {
        "srun": f'[ -z "$FINISHES" ] || echo {{}} > "$FINISHES/summary.json"; exit {code}',
        "scontrol": f'echo scontrol "$@" >> {folder}/asked; exit {requeue}',
        "sbatch": f'echo sbatch "$@" "$LOCKSTEP_RESTARTS" >> {folder}/asked',
    }
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in stand_ins.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(stat.S_IRWXU)
    (folder / "asked").write_text("")
    (folder / "job.slurm").write_text(re.sub(r"^export PATH=.*$", "", script, flags=re.M))

    slurms = {"SLURM_JOB_ID": "70", "SLURMD_NODENAME": "localhost", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")} | slurms | env
    done = subprocess.run(["bash", "job.slurm"], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, (folder / "asked").read_text(), done.stdout + done.stderr


def test_a_finished_job_and_a_failed_one_are_not_requeued(capsys, tmp_path):
    script = rendered(capsys, "--nproc", "2", "--nnodes", "2")
    for code in (0, 1, 2, 130):
        assert run_script(script, tmp_path, code) == (code, "", "")


# How a launcher may end, and a stand-in that ends so: by its own exit code, or killed by a signal.
REFUSED = [sys.executable, "-m", "lockstep", "train", "nothing"]
FAILED = [sys.executable, "-c", "from lockstep import cli; cli._run = lambda words: 1 / 0; exit(cli.main())"]
LOST = "def lost(words): raise RuntimeError('[pair.cc:553] Connection closed by peer')"
LOST_PEER = [sys.executable, "-c", f"from lockstep import cli\n{LOST}\ncli._run = lost\nexit(cli.main())"]
ENDS = {"refused": REFUSED, "failed": FAILED, "lost a rank": LOST_PEER, "preempted": ["sh", "-c", "exit 75"]}
# A signal is not used for the last one: a shell in the background ignores SIGINT, and so does what it starts.
ENDS |= {"killed": ["sh", "-c", "kill -9 $$"], "interrupted": ["sh", "-c", "exit 130"]}


@pytest.fixture(scope="module")
def codes() -> dict[tuple[str, str], int]:
    """The exit codes of launchers in a job that needs all of its nodes, and in one that does not."""
    found = {}
    for final in ("1 2 130", "2 130"):
        env = os.environ | {"LOCKSTEP_FINAL_CODES": final, "PYTHONPATH": str(ROOT / "src")}
        running = {how: subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL) for how, words in ENDS.items()}
        for how, process in running.items():
            code = process.wait(60)
            found[final, how] = code if code >= 0 else 128 - code
    return found


@pytest.mark.parametrize(
    ("nodes", "ends", "code", "requeued"),
    [
        ("2", ("refused", "preempted"), 2, False),
        ("2", ("failed", "preempted"), 1, False),
        ("2", ("failed", "killed"), 1, False),
        ("2", ("refused", "killed"), 2, False),
        ("2", ("lost a rank", "preempted"), 75, True),
        ("2", ("killed", "preempted"), 137, True),
        ("2", ("preempted", "preempted"), 75, True),
        ("2", ("interrupted", "interrupted"), 130, False),
        ("1:2", ("failed", "preempted"), 75, True),
        ("1:2", ("refused", "preempted"), 2, False),
        ("1:2", ("failed", "failed"), 1, False),
    ],
)
def test_a_failure_wins_over_a_wish_to_start_again(capsys, tmp_path, codes, nodes, ends, code, requeued):
    """srun returns the highest exit code of its tasks."""
    script = rendered(capsys, "--nproc", "2", "--nnodes", nodes)
    (final,) = re.findall(r"^export LOCKSTEP_FINAL_CODES='(.*)'$", script, re.M)
    highest = max(codes[final, how] for how in ends)
    ended, asked, _ = run_script(script, tmp_path, highest)
    assert (ended, asked) == (code, "scontrol requeue 70\n" if requeued else "")


def test_a_node_that_is_refused_does_not_end_a_run_that_goes_on_without_it(capsys, tmp_path, codes):
    script = rendered(capsys, "--nproc", "2", "--nnodes", "1:2")
    folder = tmp_path / "runs" / "x" / "checkpoints"
    (folder / "step-1").mkdir(parents=True)  # of an earlier start
    for path in (folder, folder / "step-1"):
        os.utime(path, (0, 0))
    refused = codes["2 130", "refused"]
    assert run_script(script, tmp_path, refused)[:2] == (2, "")
    step = script.replace("\ncode=$?", f"\ncode=$?\ntouch -d '1 min' {folder}/step-2")
    assert run_script(step, tmp_path, refused)[:2] == (75, "scontrol requeue 70\n")


def test_a_job_that_has_saved_is_requeued(capsys, tmp_path):
    script = rendered(capsys, "--nproc", "2", "--nnodes", "2")
    assert run_script(script, tmp_path, 75) == (75, "scontrol requeue 70\n", "")


def test_a_job_that_may_not_be_requeued_is_submitted_again(capsys, tmp_path):
    script = rendered(capsys, "--nproc", "2")
    _, asked, _ = run_script(script, tmp_path, 75, requeue=1, LOCKSTEP_RESTARTS="4")
    assert asked == "scontrol requeue 70\nsbatch --dependency=afterany:70 job.slurm 5\n"


def test_the_number_of_requeues_is_limited(capsys, tmp_path):
    script = rendered(capsys, "--nproc", "2", "--max-requeues", "3")
    assert run_script(script, tmp_path, 75, SLURM_RESTART_COUNT="2")[1] == "scontrol requeue 70\n"
    _, asked, said = run_script(script, tmp_path, 75, SLURM_RESTART_COUNT="1", LOCKSTEP_RESTARTS="2")
    assert (asked, said) == ("", "not requeued: this was start 4, and --max-requeues is 3\n")


def test_a_task_of_an_array_is_requeued_by_its_index(capsys, tmp_path):
    """The last task of an array has the number of the whole array as its own."""
    script = rendered(capsys, "--array", "0-1", "--nproc", "2")
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "1"}
    _, asked, _ = run_script(script, tmp_path, 75, requeue=1, **array)
    assert asked == "scontrol requeue 70_1\nsbatch --array=1 --dependency=afterany:70 job.slurm 1\n"


def test_a_run_that_finished_on_the_nodes_that_are_left_has_finished(capsys, tmp_path):
    script = rendered(capsys, "--nproc", "2", "--nnodes", "1:2")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "summary.json").write_text("{}")  # of an earlier run
    os.utime(tmp_path / "runs" / "x" / "summary.json", (0, 0))
    assert run_script(script, tmp_path, 137)[0] == 137
    assert run_script(script, tmp_path, 137, FINISHES="runs/x")[0] == 0


def test_a_port_that_is_in_use_is_not_taken(capsys, tmp_path):
    script = rendered(capsys, "--nproc", "2", "--nnodes", "2").replace("\ncode=$?", '\ncode=$?\necho "$port"')
    with socket.create_server(("localhost", 0)) as other:
        taken = other.getsockname()[1]
        script = script.replace("$((10000 + SLURM_JOB_ID % 20000))", str(taken))
        _, _, said = run_script(script, tmp_path, 1)
    assert int(said) > taken


# ---- what is refused ----


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nproc", "8", "--gpus-per-node", "4", "--nnodes", "2"], "--nproc 4 --nnodes 4 for 16"),
        (["--nproc", "2", "--gpus-per-node", "4"], "GPUs that no process would use"),
        (["--nproc", "4", "--cpus-per-task", "2"], "use --cpus-per-task 4"),
        (["--gpus-per-node", "many"], "use --gpus-per-node 4"),
        (["--time", "soon"], "--time soon is not a time limit"),
        (["--time", "3:00"], "leaves no time to train"),
        (["--signal-before", "0"], "use --signal-before 120"),
        (["--array", "1..3"], "use --array 0-3"),
        (["--vary", "seed=1,2", "--array", "0-3"], "leave --array out"),
        (["--vary", "sed=1,2"], "sed"),
        (["--vary", "seed"], "the form is key=A,B"),
        (["--sbatch", "nodes=3"], "use --nnodes in its place"),
        (["--sbatch=-N3"], "use --nnodes in its place"),
        (["--sbatch", "partition=fast"], "use --partition in its place"),
        (["--sbatch=--part fast"], "the script sets --partition itself"),
        (["--sbatch=-pfast"], "use --partition in its place"),
        (["--sbatch=-C a100"], "use --constraint in its place"),
        (["--sbatch", "mem=4G"], "use --mem in its place"),
        (["--sbatch=-A me -q low"], "use --account in its place"),
        (["--sbatch", "qos=low"], "use --qos in its place"),
        (["--sbatch", "chdir=/tmp"], "use `cd DIR` before `lockstep launch` in its place"),
        (["--sbatch=-D /tmp"], "use `cd DIR` before `lockstep launch` in its place"),
        (["run_dir=a\\b"], "cannot be written into a batch script"),
        (["run_dir=a\nb"], "cannot be written into a batch script"),
        (["--sbatch", "it's"], "--sbatch it's cannot be read"),
        (["--setup", "a\nb"], "once for each line"),
        (["--partition", "a b"], "--partition 'a b' is not one word"),
        (["--component", "nprox=8"], "nproc=..."),
        (["--component", "nproc=8", "--mode", "srun", "--nproc", "2"], "use --mode agent"),
        (["--mode", "srun", "--nnodes", "1:2", "--nproc", "2"], "--mode srun needs fixed numbers"),
        (["--mode", "srun", "--nproc", "auto"], "--mode srun needs fixed numbers"),
        (["--mem", "lots"], "use --mem 64G"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(capsys, monkeypatch, words, expected):
    monkeypatch.setattr(slurm, "ask_cluster", lambda: CLUSTER)
    assert expected in refused(capsys, *words)


SINFO = """main*|2|8|4000|gpu:4|1-00:00:00|(null)
main*|1|64|256000|gpu:a100:4(S:0-1),gpu:t4:1,shard:8|1-00:00:00|a100,big
fast|4|16+|8000|(null)|infinite|(null)
"""
CLUSTER = parse_sinfo(SINFO)


def test_what_sinfo_prints_is_understood():
    assert CLUSTER[0] == PartitionNodes("main", True, 2, 8, 4000, 4, "1-00:00:00", ("(null)",))
    assert (CLUSTER[1].gpus, CLUSTER[1].features) == (5, ("a100", "big"))
    assert (CLUSTER[2].cpus, CLUSTER[2].gpus, CLUSTER[2].default) == (16, 0, False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nnodes", "4"], "partition main does not have 4 nodes\n"),
        (["--nnodes", "4"], "use --nnodes 3, or another --partition"),
        (["--nnodes", "2", "--mem", "8G"], "partition main does not have 2 nodes with 8192 MB\n"),
        (["--nproc", "8", "--gpus-per-node", "8"], "use --gpus-per-node 5 --nproc 5, and --nnodes 2"),
        (["--nnodes", "2", "--cpus-per-task", "64"], "use --nnodes 1, or another --partition"),
        (["--cpus-per-task", "65"], "use --cpus-per-task 64 at most"),
        (["--partition", "fast", "--mem", "9G"], "use --mem 8000M at most"),
        (["--constraint", "h100"], "partition main does not have 1 node with the feature h100"),
        (["--partition", "fsat"], "--partition=fast"),
        (["--time", "2-00:00:00"], "use --time 1-00:00:00: the job is requeued"),
    ],
)
def test_what_the_partition_cannot_give_is_refused_with_the_fix(capsys, monkeypatch, words, expected):
    monkeypatch.setattr(slurm, "ask_cluster", lambda: CLUSTER)
    assert expected in refused(capsys, "--nproc", "1", *words)


def test_the_partition_of_the_environment_is_the_default(capsys, monkeypatch):
    monkeypatch.setattr(slurm, "ask_cluster", lambda: CLUSTER)
    monkeypatch.setenv("SBATCH_PARTITION", "fast")
    assert "partition fast does not have 5 nodes" in refused(capsys, "--nproc", "1", "--nnodes", "5")
    assert directives(rendered(capsys, "--nproc", "1", "--component", "nproc=1")).count("--partition=fast") == 2
    assert "--partition=main" in directives(rendered(capsys, "--nproc", "1", "--partition", "main"))


def test_hidden_partitions_are_asked_for_too(monkeypatch):
    def answer(words):
        hidden = "secret|4|16|8000|(null)|infinite|(null)\n" if "--all" in words else ""
        return subprocess.CompletedProcess(words, 0, SINFO + hidden, "")

    monkeypatch.setattr(slurm_partitions, "run", answer)
    assert "secret" in {nodes.partition for nodes in slurm_partitions.ask_cluster()}


def test_an_argument_that_separates_components_for_srun_is_refused(capsys, tmp_path):
    (tmp_path / "own.py").write_text("import lockstep\n\nwith lockstep.start() as run:\n    pass\n")
    assert main(["launch", "slurm", "own.py", "--nproc", "1", "--", "a", ":", "b"]) == 2
    assert "an argument that is only a colon" in capsys.readouterr().err


def test_what_the_partition_has_is_accepted(capsys, monkeypatch):
    monkeypatch.setattr(slurm, "ask_cluster", lambda: CLUSTER)
    rendered(capsys, "--nproc", "4", "--nnodes", "3", "--gpus-per-node", "4", "--time", "1-00:00:00")
    rendered(capsys, "--nproc", "4", "--nnodes", "99", "--partition", "main,fast")  # Slurm's to judge


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:00:00", 3600), ("1-2", 93600), ("1-2:30", 95400), ("2-0:0:5", 172805)],
)
def test_time_limits_as_slurm_writes_them(text, seconds):
    assert seconds_of(text) == seconds


def test_sizes_as_sbatch_takes_them():
    assert [megabytes(text) for text in ("0", "4000", "64G", "1T", None)] == [0, 4000, 65536, 1048576, 0]


# ---- submitting ----


def test_a_job_is_tried_and_submitted_and_its_number_printed(capsys, monkeypatch):
    asked = []

    def answer(words, *_):
        asked.append(list(words))
        return subprocess.CompletedProcess(words, 0, "70;cluster\n", "")

    monkeypatch.setattr(slurm, "run", answer)
    assert main(["launch", "slurm", "char_lm", "run_dir=runs/x", "--nproc", "2", "--nnodes", "2", "--submit"]) == 0
    script = "runs/x/launch/job.slurm"
    assert asked == [["sbatch", "--test-only", script], ["sbatch", "--parsable", script]]
    said = capsys.readouterr().out
    for text in ("submitted job 70: 2 x 2 ranks", "tail -F runs/x/slurm-70.log", "squeue --jobs 70", "scancel 70"):
        assert text in said


def test_what_is_printed_can_be_pasted(capsys, monkeypatch):
    """A folder with a space, and one whose name looks like Slurm's word for the job's number."""
    monkeypatch.setattr(slurm, "run", lambda words, *_: subprocess.CompletedProcess(words, 0, "70\n", ""))
    for words, log in (([], "'runs/a b %j'/slurm-70.log"), (["--array", "0-1"], "'runs/a b %j'/slurm-70_*.log")):
        assert main(["launch", "slurm", "char_lm", "run_dir=runs/a b %j", "--nproc", "2", "--submit", *words]) == 0
        assert f"tail -F {log}\n" in capsys.readouterr().out


def test_variables_of_sbatch_do_not_replace_what_the_script_says(monkeypatch):
    """sbatch believes its variables more than the lines of a script."""
    given = []

    def answer(words, seconds, env):
        given.append(env)
        return subprocess.CompletedProcess(words, 0, "70\n", "")

    monkeypatch.setattr(slurm, "run", answer)
    for name in ("SBATCH_TIMELIMIT", "SBATCH_PARTITION", "SBATCH_SIGNAL", "SBATCH_ACCOUNT", "SBATCH_RESERVATION"):
        monkeypatch.setenv(name, "x")
    words = ["run_dir=runs/x", "--nproc", "2", "--time", "1:00:00", "--partition", "main", "--submit"]
    assert main(["launch", "slurm", "char_lm", *words]) == 0
    for env in given:
        assert {name for name in env if name.startswith("SBATCH_")} == {"SBATCH_ACCOUNT", "SBATCH_RESERVATION"}


def test_an_sbatch_that_is_slow_may_have_submitted_the_job(capsys, monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text('#!/bin/sh\n[ "$1" = --test-only ] || exec sleep 60\n')
    (tmp_path / "sbatch").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm.SUBMIT_S > slurm_partitions.ANSWER_S
    monkeypatch.setattr(slurm, "SUBMIT_S", 0.5)
    said = refused(capsys, "run_dir=runs/x", "--nproc", "2", "--submit")
    assert "sbatch did not answer within" in said
    assert "the job may have been submitted all the same: `squeue --me` shows it" in said


def test_a_run_folder_that_cannot_be_made_is_refused(capsys, tmp_path):
    (tmp_path / "file").touch()
    words = ["run_dir=file/x", "--out", str(tmp_path / "out"), "--nproc", "2", "--submit"]
    assert "run_dir=file/x cannot be written to" in refused(capsys, *words)


def test_a_job_that_slurm_does_not_accept_is_not_submitted(capsys, monkeypatch):
    said = "sbatch: error: Batch job submission failed: Invalid account\n"
    monkeypatch.setattr(slurm, "run", lambda words, *_: subprocess.CompletedProcess(words, 1, "", said))
    error = refused(capsys, "run_dir=runs/x", "--nproc", "2", "--submit")
    assert "Slurm does not accept the job" in error
    assert "Batch job submission failed: Invalid account" in error


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
        "sbatch: error: fetch_config: failed\nsbatch: fatal: Could not establish a configuration source\n",
    ],
)
def test_a_cluster_that_cannot_be_reached_is_no_fault_of_the_job(capsys, monkeypatch, said):
    monkeypatch.setattr(slurm, "run", lambda words, *_: subprocess.CompletedProcess(words, 1, "", said))
    error = refused(capsys, "run_dir=runs/x", "--nproc", "2", "--submit")
    assert "no controller of a Slurm cluster can be reached" in error
    assert "change the options" not in error
    assert "sbatch: fatal" not in error


def test_the_script_says_where_it_is(tmp_path):
    assert main(["launch", "slurm", "char_lm", "run_dir=runs/x", "--nproc", "2", "--out", str(tmp_path / "job")]) == 0
    assert f"#   sbatch {tmp_path}/job/job.slurm\n" in (tmp_path / "job" / "job.slurm").read_text()


def test_a_machine_without_slurm_says_so(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "sbatch is not on this machine" in refused(capsys, "run_dir=runs/x", "--nproc", "2", "--submit")
    assert slurm_partitions.ask_cluster() == "sinfo is not on this machine"


@pytest.mark.parametrize("word", ["run_dir=a,b", "resume=never,auto"])
def test_the_folder_of_each_run_of_an_array_cannot_be_varied(word, capsys):
    """It was ignored: each run has its own folder in any case."""
    assert main(["launch", "slurm", "char_lm", "--nproc", "1", "--vary", word]) == 2
    assert f"--vary {word.partition('=')[0]} is not possible" in capsys.readouterr().err
