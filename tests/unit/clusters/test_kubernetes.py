"""`lockstep launch kubernetes`: the manifests are valid, restart what should be, and hold no secret."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_schemas import problems

from lockstep import cli
from lockstep.clusters.kubernetes import dns_name
from lockstep.errors import UserError
from lockstep.launch.job import Bounds, Job, parse_nnodes
from lockstep.launch.nodes.node_launcher import run_node

KINDS = ["job", "jobset", "trainjob"]
BASE = ["launch", "kubernetes", "char_lm", "--image", "me/train:1"]
TWO = [*BASE, "--nproc", "8", "--nnodes", "2", "--pvc", "data:/data", "run_dir=runs/first"]


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert cli.main(list(words)) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    return capsys.readouterr().err


def find(value: Any, key: str) -> Any:
    """Return the first value of a key, at any depth."""
    if isinstance(value, dict) and key in value:
        return value[key]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((found for one in inner if (found := find(one, key)) is not None), None)


# ---- schemas ----------------------------------------------------------------------------------------------


FULL = ["--cpus", "16", "--memory", "128Gi", "--namespace", "research", "--env", "NCCL_DEBUG=INFO"]
FULL = [*FULL, "--pvc", "data:/cache", "--pvc", "sets:/sets"]
OWN_RUNTIME = ["--runtime", "torch-distributed"]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1", "2", "1:4"])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_valid(kind, nodes, capsys):
    words = [*BASE, "--kind", kind, "--pvc", "data:/data", "--nproc", "2", "--nnodes", nodes]
    for extra in ([], FULL, ["--gpus-per-node", "0"], *([OWN_RUNTIME] if kind == "trainjob" else [])):
        for manifest in rendered(capsys, *words, *extra):
            assert problems(manifest) == [], extra


@pytest.mark.slow
def test_a_wrong_manifest_is_noticed(capsys):
    """A misspelt field, a wrong type, a value that the CRD does not know, and a broken rule."""
    (jobset,) = rendered(capsys, *TWO, "--kind", "jobset")
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    for owner, key, value in (
        (job, "backofflimit", 1),
        (job, "backoffLimit", "0"),
        (jobset["spec"]["failurePolicy"]["rules"][0], "action", "Restart"),
        (job["template"]["spec"], "restartPolicy", "OnFailure"),
        (job["template"]["spec"]["containers"][0]["resources"]["limits"], "memory", "many"),
        (jobset["metadata"], "name", "x" * 60),
    ):
        before = owner.get(key)
        owner[key] = value
        assert problems(jobset), key
        owner[key] = before
        if before is None:
            del owner[key]
        assert problems(jobset) == []


# ---- exit codes -------------------------------------------------------------------------------------------


def matches(rule: dict[str, Any], code: int, disrupted: bool) -> bool:
    if "onPodConditions" in rule:
        return disrupted
    listed = code in rule["onExitCodes"]["values"]
    return listed == (rule["onExitCodes"]["operator"] == "In")


def outcome(manifests: list[dict[str, Any]], code: int, disrupted: bool = False) -> str:
    """Follow the rules as the controllers do. Returns what happens after one pod has failed."""
    job = find(manifests, "podFailurePolicy")
    action = next((rule["action"] for rule in job["rules"] if matches(rule, code, disrupted)), "Count")
    if action in ("Ignore", "Count") and find(manifests, "backoffLimit") > 0:
        return "pod again"

    reason = "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
    policy = find(manifests, "failurePolicy")
    if policy is None:
        return "failed"
    chosen = next(rule for rule in policy["rules"] if reason in rule.get("onJobFailureReasons", [reason]))
    return {"RestartJobSet": "all again", "FailJobSet": "failed"}[chosen["action"]]


@pytest.mark.parametrize(
    ("kind", "nodes", "again"),
    [
        ("job", "2", "pod again"),
        ("job", "1:4", "pod again"),
        ("jobset", "2", "all again"),
        ("jobset", "1:4", "pod again"),
        ("trainjob", "2", "all again"),
        ("trainjob", "1:4", "pod again"),
    ],
)
def test_the_exit_code_decides_about_a_restart(kind, nodes, again, capsys):
    manifests = rendered(capsys, *TWO, "--nnodes", nodes, "--kind", kind)
    assert outcome(manifests, 75) == again
    assert outcome(manifests, 137) == again, "a launcher that was killed, such as by the kernel for lack of memory"
    assert outcome(manifests, 137, disrupted=True) == again
    assert outcome(manifests, 1, disrupted=True) == again
    assert [outcome(manifests, code) for code in (2, 130)] == ["failed"] * 2

    # In an elastic job a launcher may fail alone: one that is cut off from the others, which go on.
    assert outcome(manifests, 1) == (again if ":" in nodes else "failed")


# What kubectl (go-yaml) reads as something else than text, if it has no quotes.
NOT_TEXT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?0[xob]?[0-9a-fA-F_]+|[-+]?\.(inf|nan)"
    r"|y|n|yes|no|on|off|true|false|null|~|[0-9]+(:[0-5]?[0-9])+|\d{4}-\d\d?-\d\d?.*|",
    re.IGNORECASE,
)
ODD = ["1e-3", "1e3", "1.5e3", ".5e1", "+.5", "08", "0o17", "y", "n", "N", "Y", "on", "~", "", "0x1F", "1_000", "12:30"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_is_a_text_to_kubectl(kind, capsys):
    words = [word for number, value in enumerate(ODD) for word in ("--env", f"V{number}={value}")]
    words += ["--cpus", "1e1", "--memory", "1e9", "--gpu-resource", "y"]
    assert cli.main([*TWO, *words, "--kind", kind]) == 0
    written = capsys.readouterr().out
    scalars = [event for event in yaml.parse(written) if isinstance(event, yaml.ScalarEvent)]
    assert set(ODD) <= {event.value for event in scalars if event.style == '"'}

    # What has no quotes is a number or a boolean in Python too, or a name that is nothing else to kubectl.
    for event in scalars:
        is_text = isinstance(yaml.safe_load(event.value), str)
        assert event.style == '"' or not (is_text and NOT_TEXT.fullmatch(event.value)), event.value
    found = [one["value"] for one in find(list(yaml.safe_load_all(written)), "env") if "value" in one]
    assert found == ODD


def expanded(text: str) -> str:
    """Do what Kubernetes does with the words of a command, and with variables, in a pod without variables."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda match: "$" if match[0] == "$$" else f"value of {match[1]}", text)


@pytest.mark.parametrize("kind", KINDS)
def test_dollars_reach_the_pods_as_typed(kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import lockstep\n\nwith lockstep.start() as run:\n    pass\n")
    odd = ["$(HOSTNAME)", "$$x", "$5", "$$(A)", "a$"]
    words = ["launch", "kubernetes", "own.py", "--image", "i", "--nproc", "1", "--pvc", "d:/d", "--kind", kind]
    words += [word for number, value in enumerate(odd) for word in ("--env", f"V{number}={value}")]
    for extra in ([], OWN_RUNTIME) if kind == "trainjob" else ([],):
        manifests = rendered(capsys, *words, *extra, "run_dir=/d/x", "--", *odd)
        assert [expanded(word) for word in find(manifests, "command")][-len(odd) :] == odd
        assert [expanded(one["value"]) for one in find(manifests, "env")] == odd


def test_the_number_of_restarts_is_limited(capsys):
    (_, job) = rendered(capsys, *TWO, "--max-restarts", "5")
    assert job["spec"]["backoffLimit"] == 10, "two pods end each time"
    (jobset,) = rendered(capsys, *TWO, "--max-restarts", "5", "--kind", "jobset")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 5


# ---- pods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [("job", ["first-0.first", "first-1.first"])]
    + [(kind, ["first-node-0-0.first", "first-node-0-1.first"]) for kind in ("jobset", "trainjob")],
)
def test_every_pod_runs_one_launcher_that_finds_the_others(kind, hosts, capsys):
    manifests = rendered(capsys, *TWO, "steps=10", "--kind", kind)
    command = find(manifests, "command")
    options = cli._parser().parse_args(command[1:])
    assert (options.verb, options.target, options.nproc, options.resume) == ("train", "char_lm", "8", "auto")
    assert options.overrides == ["steps=10", "run_dir=/data/runs/first"]
    assert parse_nnodes(options.nnodes) == Bounds(2, 2)
    assert options.join == ",".join(f"{host}:29400" for host in hosts)
    assert find(manifests, "limits") == {"nvidia.com/gpu": "8"}
    pod = find(manifests, "containers")[0]
    assert {mount["mountPath"] for mount in pod["volumeMounts"]} == {"/data", "/dev/shm"}


def test_the_service_finds_the_pods_of_the_job(capsys):
    service, job = rendered(capsys, *TWO)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"


def test_one_pod_needs_neither_service_nor_secret(capsys):
    (job,) = rendered(capsys, *BASE, "--nproc", "8", "--pvc", "data:/data")
    assert "--join" not in find(job, "command")
    assert find(job, "env") == []


def test_a_pod_has_the_time_that_a_save_may_take(capsys):
    assert find(rendered(capsys, *TWO), "terminationGracePeriodSeconds") == 630
    assert find(rendered(capsys, *TWO, "restart.grace=1000.5"), "terminationGracePeriodSeconds") == 1031


class ThirdTime(list[str]):
    """The signals that a launcher has received: one, when it asks for the third time."""

    def __init__(self) -> None:
        super().__init__(["SIGTERM"])
        self.asked = 0

    def __bool__(self) -> bool:
        self.asked += 1
        return self.asked >= 3


def test_a_launcher_waits_for_a_name_that_the_dns_does_not_know_yet(tmp_path, capsys):
    """The service publishes a pod's name a moment after the pod has started: the launcher tries again."""
    join = "first-0.first.invalid:29400,first-1.first.invalid:29400"
    signals = ThirdTime()
    job = Job({}, tmp_path, Bounds(1, 1), Bounds(2, 2), join)
    assert run_node(job, "first-1", signals).ending.code == 75
    assert signals.asked == 3
    assert "ended while no node coordinates" in capsys.readouterr().err


def test_the_run_folder_outlives_its_pod(capsys):
    words = [*BASE, "--nproc", "8"]
    assert "would be lost with its pod" in refused(capsys, *words, "run_dir=runs/x")
    assert "/scratch/x would be lost" in refused(capsys, *words, "--pvc", "data:/data", "run_dir=/scratch/x")
    assert "run_dir=/data/x" in find(rendered(capsys, *words, "--pvc", "d:/data", "run_dir=/data/x"), "command")

    # A runtime of the cluster may mount what we cannot see.
    trainjob = [*words, "--kind", "trainjob", "--runtime", "ours", "run_dir=/shared/x"]
    assert "run_dir=/shared/x" in find(rendered(capsys, *trainjob), "command")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus-per-node", "4"], "--nproc 8 needs more GPUs than a pod has"),
        (["--gpus-per-node", "-1"], "--gpus-per-node -1 is not a number of GPUs"),
        (["--nproc", "auto"], "the number of GPUs of each pod is not known"),
        (["--pvc", "data"], "--pvc data names no volume"),
        (["--pvc", "data:here"], "--pvc data:here names no volume"),
        (["--env", "1X=2"], "--env 1X=2 sets no variable"),
        (["--runtime", "ours"], "--runtime ours is for --kind trainjob"),
    ],
)
def test_what_cannot_work_is_refused(words, said, capsys):
    assert said in refused(capsys, *TWO, *words)


def test_names_are_labels_of_the_dns():
    assert dns_name("char_lm-2026.11") == "char-lm-2026-11"
    assert dns_name("2nd Run_") == "run-2nd-run"
    with pytest.raises(UserError, match="too long for Kubernetes"):
        dns_name("x" * 41)


# ---- submitting -------------------------------------------------------------------------------------------


FAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *"get secret"*) [ -e "$CALLS.secret" ] && echo secret/there ;;
  *"get "*) echo "$OLDER" ;;
  *"create -f -"*) cat > "$CALLS.secret" ;;
  *apply*) exit "${APPLY_CODE:-0}" ;;
esac
exit 0
"""


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A command that stands for a cluster: it notes how it was called, and keeps the secret that it was given."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "kubectl"
    command.write_text(FAKE)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "calls"


def made_secret(calls: Path) -> dict[str, Any]:
    return json.loads(calls.with_name("calls.secret").read_text())


@pytest.mark.slow
def test_submitting_makes_the_secret_and_applies_the_file(kubectl, tmp_path, capfd):
    assert cli.main([*TWO, "--submit", "--namespace", "research", "--out", "made"]) == 0
    assert kubectl.read_text().splitlines() == [
        "--namespace research get job.batch first --ignore-not-found -o name",
        "--namespace research get secret first-secret --ignore-not-found -o name",
        "--namespace research create -f -",
        "--namespace research apply -f made/manifest.yaml",
    ]
    secret = made_secret(kubectl)
    assert problems(secret) == []
    text = secret["stringData"]["secret"]
    assert len(text) == 64

    # Neither the file nor the screen shows it, and the pods refer to it by name.
    written = (tmp_path / "made" / "manifest.yaml").read_text()
    out = capfd.readouterr()
    assert text not in written + out.out + out.err + kubectl.read_text()
    (variable,) = find(list(yaml.safe_load_all(written)), "env")
    assert variable == {
        "name": "LOCKSTEP_SECRET",
        "valueFrom": {"secretKeyRef": {"name": "first-secret", "key": "secret"}},
    }
    assert secret["metadata"]["name"] == "first-secret"
    assert "kubectl --namespace research logs -f -l batch.kubernetes.io/job-name=first" in out.out

    # A job that is submitted again keeps its secret: pods of the first one may still run.
    assert cli.main([*TWO, "--submit", "--out", "made"]) == 0
    assert made_secret(kubectl) == secret


def test_nothing_is_written_to_a_folder_of_the_pods(kubectl, tmp_path):
    """`run_dir=/data/x` is a path in the pods: here it may not exist, or be something else."""
    elsewhere = tmp_path / "data"
    words = [*BASE, "--nproc", "8", "--pvc", f"claim:{elsewhere}", f"run_dir={elsewhere}/first"]
    assert cli.main([*words, "--submit"]) == 0
    assert kubectl.read_text().splitlines()[1:] == ["apply -f runs/first/launch/manifest.yaml"]
    assert not elsewhere.exists()


def test_a_secret_of_the_environment_is_used(kubectl, tmp_path, monkeypatch):
    path = tmp_path / "mine"
    path.write_text("0123456789abcdef\n")
    path.chmod(stat.S_IRUSR)
    monkeypatch.setenv("LOCKSTEP_SECRET_FILE", str(path))
    assert cli.main([*TWO, "--submit"]) == 0
    assert made_secret(kubectl)["stringData"] == {"secret": "0123456789abcdef"}


@pytest.mark.parametrize(("kind", "object"), [("job", "job.batch"), ("jobset", "jobset"), ("trainjob", "trainjob")])
def test_a_job_whose_name_is_taken_is_refused(kubectl, monkeypatch, capsys, kind, object):
    """`kubectl apply` would leave a finished job as it is, and call that a success."""
    monkeypatch.setenv("OLDER", f"{object}/first")
    said = refused(capsys, *TWO, "--submit", "--kind", kind, "--namespace", "our-team")
    assert f"the cluster has a {kind} first already" in said
    assert f"kubectl --namespace our-team delete {object} first" in said
    assert "apply" not in kubectl.read_text()
    assert "secret" not in kubectl.read_text()
    written = Path("runs/first/launch/manifest.yaml").read_text()
    assert "| kubectl --namespace our-team create secret" in written


def test_a_refusal_of_the_cluster_is_passed_on(kubectl, monkeypatch, capsys):
    monkeypatch.setenv("APPLY_CODE", "3")
    assert cli.main([*TWO, "--submit"]) == 1
    assert "failed with exit code 3: not submitted" in capsys.readouterr().err


def test_without_kubectl_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "kubectl is needed to submit the job" in refused(capsys, *TWO, "--submit", "--out", "made")
    assert (tmp_path / "made" / "manifest.yaml").exists()


def test_the_image_copies_what_is_there():
    """No image is built here: what it copies exists, and the builder is sent it."""
    root = Path(__file__).parents[3]
    copied = [
        source
        for line in (root / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    ]
    assert sorted(copied) == ["LICENSE", "README.md", "constraints.txt", "pyproject.toml", "src"]
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(copied)
    assert all((root / source).exists() for source in copied)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--memory=8GB", "use --memory 128Gi"),
        ("--memory=0", "use --memory 128Gi"),
        ("--cpus=four", "use --cpus 16"),
        ("--port=99999", "--port 99999 is not a port"),
        ("--namespace=My_NS", "use --namespace my-team"),
        ("--max-restarts=-1", "--max-restarts -1 is negative"),
        ("--image=", "--image '' is not a value that Kubernetes takes"),
    ],
)
def test_values_that_no_cluster_takes_are_refused(capsys, typed, said):
    assert said in refused(capsys, *TWO, typed)


@pytest.mark.parametrize("typed", ["--memory=1.5Gi", "--memory=500M", "--cpus=500m", "--cpus=0.5", "--namespace=a-1"])
def test_values_that_a_cluster_takes_are_passed_on(capsys, typed):
    assert cli.main([*TWO, typed]) == 0
    assert typed.partition("=")[2] in capsys.readouterr().out
