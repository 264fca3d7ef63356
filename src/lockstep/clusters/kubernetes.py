"""Kubernetes: manifests of a TrainJob (Kubeflow Trainer v2), a JobSet, or a plain indexed Job; one launcher per pod.

Kubernetes places pods and replaces lost ones. Which pods it replaces follows from the launcher's exit code
(`errors.ExitCode`): 0 means that the run has finished, after 1, 2 and 130 a restart would fail as well, and after any
other code it starts again. The run folder is on a volume that all pods share, so that a new pod resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from lockstep.clusters.request import JobRequest
from lockstep.errors import UserError, final_codes
from lockstep.launch.job import parse_nproc
from lockstep.launch.wire.secret import SECRET, SECRET_FILE, find_secret

HELP = "Kubernetes: a Kubeflow TrainJob, a JobSet, or a plain indexed Job"

# The run folder is a path in the pods.
SEES_RUN_DIR = False

MANIFEST = "manifest.yaml"

# Kubeflow Trainer looks for the job and the container by this name, and for the label.
NODE = "node"
TRAINER_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}

# The key of the job's secret in its Secret.
SECRET_KEY = "secret"

# A launcher tries all addresses of --join until one answers. With several it also waits for a pod whose name the
# cluster's DNS does not know yet.
MOST_ADDRESSES = 3

# Room for what the controllers append to the name of a job, in the 63 characters of a host name.
LONGEST_NAME = 40

# After `restart.grace` the launcher kills ranks that still run, and needs a moment to end itself.
END_S = 30

Manifest = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", choices=["job", "jobset", "trainjob"], default="job", help="what is created (default job)"
    )
    parser.add_argument("--image", required=True, help="container image with lockstep and your code")
    parser.add_argument("--namespace", metavar="NAME", help="namespace of the job (default: that of kubectl)")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs of each pod (default: one for each process; 0: none)"
    )
    parser.add_argument(
        "--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="what the cluster calls a GPU (nvidia.com/gpu)"
    )
    parser.add_argument("--cpus", metavar="N", help="CPU cores that each pod requests, such as 16")
    parser.add_argument("--memory", metavar="SIZE", help="memory of each pod, such as 128Gi")
    parser.add_argument(
        "--pvc",
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="mount this volume claim; the run folder is on the first one, which all pods must be able to write",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the pods"
    )
    parser.add_argument("--port", type=int, default=29400, help="where the pods meet (default 29400)")
    parser.add_argument(
        "--max-restarts", type=int, default=100, metavar="N", help="how often a preempted job starts again (100)"
    )
    parser.add_argument(
        "--runtime", metavar="NAME", help="with --kind trainjob: use this ClusterTrainingRuntime of the cluster"
    )


# ---- what was asked for, checked ----


@dataclass(frozen=True)
class Pods:
    """The pods of a job, which are all alike."""

    name: str
    options: argparse.Namespace
    fewest: int
    most: int
    nproc: int | None  # None: one process for each GPU
    gpus: int
    command: list[str]
    volumes: list[tuple[str, str]]  # (claim, path)
    grace_s: int

    @property
    def elastic(self) -> bool:
        """Whether the launchers that are left continue when a pod is lost."""
        return self.fewest < self.most

    @property
    def meet(self) -> bool:
        return self.most > 1

    @property
    def secret(self) -> str:
        return f"{self.name}-secret"


def _describe(request: JobRequest, options: argparse.Namespace) -> Pods:
    _check_values(options)
    if options.runtime and options.kind != "trainjob":
        raise UserError(
            f"--runtime {options.runtime} is for --kind trainjob", f"--kind {options.kind}", "leave --runtime out"
        )

    for text in options.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", text, re.DOTALL):
            raise UserError(f"--env {text} sets no variable", "the form is NAME=VALUE", "use --env NCCL_DEBUG=INFO")

    nproc, gpus = _processes(request, options)
    volumes = [_parse_claim(text) for text in options.pvc]
    located = replace(request, run_dir=_run_folder(request, volumes, options))
    name = dns_name(request.name)
    most = request.nnodes.most
    join = ["--join", ",".join(_addresses(name, options, most))] if most > 1 else []
    return Pods(
        name=name,
        options=options,
        fewest=request.nnodes.least,
        most=most,
        nproc=nproc,
        gpus=gpus,
        command=located.train_command(*join),
        volumes=volumes,
        grace_s=_grace_s(request),
    )


def dns_name(text: str) -> str:
    """Return a name for objects and hosts: a DNS label that begins with a letter (RFC 1035)."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".strip("-")

    if len(name) > LONGEST_NAME:
        raise UserError(
            f"the job's name {name} is too long for Kubernetes",
            f"{len(name)} characters, of {LONGEST_NAME} at most",
            "set a run_dir with a shorter name: run_dir=runs/NAME",
        )

    return name


def _processes(request: JobRequest, options: argparse.Namespace) -> tuple[int | None, int]:
    """Return the processes of each pod, None for `auto`, and its GPUs."""
    # `auto` must not be counted here: this machine is not the one that trains.
    most = None if request.nproc == "auto" else parse_nproc(request.nproc).most
    gpus = options.gpus_per_node
    if gpus is None and most is None:
        raise UserError(
            "the number of GPUs of each pod is not known", "--nproc auto", "add --gpus-per-node 8, or --nproc 8"
        )

    if gpus is None:
        gpus = most
    if gpus < 0:
        raise UserError(f"--gpus-per-node {gpus} is not a number of GPUs", "", "use 0 or more")

    if gpus and most and most > gpus:
        raise UserError(
            f"--nproc {request.nproc} needs more GPUs than a pod has",
            f"--gpus-per-node {gpus}",
            f"use --nproc {gpus}, or --gpus-per-node {most}",
        )

    fixed = most is not None and parse_nproc(request.nproc).least == most
    return (most if fixed else None), gpus


def _parse_claim(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not (claim and colon and path.startswith("/")):
        raise UserError(f"--pvc {text} names no volume", "the form is CLAIM:PATH", "use --pvc my-claim:/data")
    return claim, path.rstrip("/") or "/"


def _run_folder(request: JobRequest, volumes: list[tuple[str, str]], options: argparse.Namespace) -> Path:
    """Return where the run folder is in a pod. A relative path counts from the first volume."""
    folder = PurePosixPath(request.run_dir)
    if volumes and not folder.is_absolute():
        folder = PurePosixPath(volumes[0][1]) / folder

    # Volumes that a runtime of the cluster mounts are not known here.
    kept = any(folder.is_relative_to(path) for _, path in volumes) or (options.runtime and folder.is_absolute())
    if not kept:
        raise UserError(
            f"the run folder {folder} would be lost with its pod",
            "it is on no volume",
            "add --pvc CLAIM:/data, a volume claim that all pods may write (ReadWriteMany)",
        )

    return Path(folder)


def _addresses(name: str, options: argparse.Namespace, most: int) -> list[str]:
    """Return where the first pods listen: their host names, in the domain of the headless service."""
    prefix = name if options.kind == "job" else f"{name}-{NODE}-0"
    return [f"{prefix}-{index}.{name}:{options.port}" for index in range(min(most, MOST_ADDRESSES))]


def _grace_s(request: JobRequest) -> int:
    """Return how long a pod may take to end: the time that preempted ranks have to save, and a little more."""
    from lockstep.config import read_layers, resolve

    layers = read_layers(list(request.config_files), list(request.overrides))
    return math.ceil(resolve(layers).config.restart.grace) + END_S


# ---- manifests ----


def render(request: JobRequest, options: argparse.Namespace) -> dict[str, str]:
    pods = _describe(request, options)
    kinds = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}
    return {MANIFEST: _comment(pods) + "---\n".join(map(_to_yaml, kinds[options.kind](pods)))}


class _Quoted(yaml.SafeDumper):
    """Writes every text in quotes: kubectl reads more plain words as numbers or booleans than Python does."""

    def ignore_aliases(self, data: object) -> bool:
        """Labels that two objects share are written twice, without YAML's anchors."""
        return True


def _quote_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


def _plain_names(dumper: yaml.SafeDumper, fields: Manifest) -> yaml.MappingNode:
    node = dumper.represent_mapping("tag:yaml.org,2002:map", fields)
    for key, _ in node.value:
        # A name of several letters, but not one of the words that are booleans.
        is_plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9]+([./-][A-Za-z0-9]+)*", key.value)
        if is_plain and key.value.lower() not in ("yes", "no", "on", "off", "true", "false", "null"):
            key.style = None

    return node


_Quoted.add_representer(str, _quote_text)
_Quoted.add_representer(dict, _plain_names)


def _to_yaml(manifest: Manifest) -> str:
    return yaml.dump(manifest, Dumper=_Quoted, sort_keys=False, width=sys.maxsize)


def _comment(pods: Pods) -> str:
    if not pods.meet:
        return ""

    namespace = f" --namespace {shlex.quote(pods.options.namespace)}" if pods.options.namespace else ""
    return (
        "# The pods prove to each other that they know the job's secret, which is not in this file. Make it once:\n"
        f"# openssl rand -hex 32 | kubectl{namespace} create secret generic {pods.secret}"
        f" --from-file={SECRET_KEY}=/dev/stdin\n"
    )


def _object(version: str, kind: str, pods: Pods, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": _metadata(pods, pods.name), "spec": spec}


def _metadata(pods: Pods, name: str) -> Manifest:
    namespace = {"namespace": pods.options.namespace} if pods.options.namespace else {}
    return {"name": name, **namespace, "labels": {"app.kubernetes.io/managed-by": "lockstep"}}


def _job(pods: Pods) -> list[Manifest]:
    spec = {**_counts(pods), **_job_spec(pods)}
    if not pods.meet:
        return [_object("batch/v1", "Job", pods, spec)]

    # A pod's host name is JOB-INDEX, in the domain of this service.
    spec["template"]["spec"]["subdomain"] = pods.name
    service = {
        "clusterIP": "None",
        "selector": {"batch.kubernetes.io/job-name": pods.name},
        # The pods must find each other before they are ready.
        "publishNotReadyAddresses": True,
        "ports": [{"name": "join", "port": pods.options.port}],
    }
    return [_object("v1", "Service", pods, service), _object("batch/v1", "Job", pods, spec)]


def _jobset(pods: Pods) -> list[Manifest]:
    spec = _jobset_spec(pods)
    template = spec["replicatedJobs"][0]["template"]
    template["spec"] = {**_counts(pods), **template["spec"]}
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", pods, spec)]


def _trainjob(pods: Pods) -> list[Manifest]:
    """Return a TrainJob, and the runtime that it refers to unless the cluster has one."""
    version = "trainer.kubeflow.org/v1alpha1"
    trainer: Manifest = {"image": pods.options.image, "command": _unexpanded(pods.command), "numNodes": pods.most}
    if pods.nproc:
        trainer["numProcPerNode"] = pods.nproc

    if pods.options.runtime:
        ref = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": pods.options.runtime}
        trainer |= {"env": _environment(pods), "resourcesPerNode": _resources(pods)}
        spec = {"runtimeRef": ref, "trainer": trainer, "runtimePatches": [_patch(pods)]}
        return [_object(version, "TrainJob", pods, spec)]

    # A runtime of our own, because only a runtime can have a failure policy.
    template = _jobset_spec(pods)
    job = template["replicatedJobs"][0]
    job["template"] = {"metadata": {"labels": TRAINER_LABEL}, **job["template"]}
    runtime = {"mlPolicy": {"numNodes": pods.most, "torch": {}}, "template": {"spec": template}}
    ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": pods.name}
    return [
        _object(version, "TrainingRuntime", pods, runtime),
        _object(version, "TrainJob", pods, {"runtimeRef": ref, "trainer": trainer}),
    ]


def _patch(pods: Pods) -> Manifest:
    """Return what a TrainJob changes in the pods of a runtime that it does not own."""
    pod = _pod(pods)
    patched = {
        "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "volumes": pod["volumes"],
        "containers": [{"name": NODE, "volumeMounts": pod["containers"][0]["volumeMounts"]}],
    }
    job = {"name": NODE, "template": {"spec": {"template": {"spec": patched}}}}
    return {"manager": "lockstep", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


# ---- restarts ----


def _counts(pods: Pods) -> Manifest:
    return {"completionMode": "Indexed", "completions": pods.most, "parallelism": pods.most}


def _job_spec(pods: Pods, restarts_all: bool = False) -> Manifest:
    """Return the spec of a Job. With `restarts_all` a lost pod ends it, and its JobSet starts all pods again."""
    lost: Manifest = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": NODE, "operator": "In", "values": final_codes(pods.elastic)}

    # After all other codes the pod is counted and starts again. With a limit of 0, the first one that fails ends the
    # Job, and the reason tells the JobSet whether the last rule has applied.
    rules = [{"action": "Count" if restarts_all else "Ignore", **lost}, {"action": "FailJob", "onExitCodes": codes}]

    # Kubernetes counts pods, and a preempted job ends in all of its pods.
    limit = 0 if restarts_all else pods.options.max_restarts * pods.most
    spec: Manifest = {"backoffLimit": limit, "podFailurePolicy": {"rules": rules}}
    if pods.elastic:
        # When the run is over, a pod that never found a place need not run any more.
        spec["successPolicy"] = {"rules": [{"succeededCount": pods.fewest}]}

    return {**spec, "template": {"spec": _pod(pods)}}


def _jobset_spec(pods: Pods) -> Manifest:
    # Launchers that survive a lost pod are left alone. Otherwise all pods start again together.
    restarts_all = not pods.elastic
    final = {"name": "neverRestart", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    restart = {"name": "otherwise", "action": "RestartJobSet"}
    fail = {"name": "always", "action": "FailJobSet"}
    policy = (
        {"maxRestarts": pods.options.max_restarts, "rules": [final, restart]} if restarts_all else {"rules": [fail]}
    )
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": policy,
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": _job_spec(pods, restarts_all)}}],
    }


# ---- pods ----


def _pod(pods: Pods) -> Manifest:
    # A volume claim may be mounted at two paths, but is one volume.
    claims = {
        claim: f"volume-{number}" for number, claim in enumerate(dict.fromkeys(claim for claim, _ in pods.volumes))
    }
    volumes: list[Manifest] = [
        {"name": name, "persistentVolumeClaim": {"claimName": it}} for it, name in claims.items()
    ]
    mounts = [{"name": claims[claim], "mountPath": path} for claim, path in pods.volumes]

    # Worker processes and ranks exchange tensors in shared memory, of which a container has 64 MiB by default.
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})

    container = {
        "name": NODE,
        "image": pods.options.image,
        "command": _unexpanded(pods.command),
        "env": _environment(pods),
        "resources": _resources(pods),
        "volumeMounts": mounts,
    }
    return {
        # The failure policy needs Never; the launcher restarts ranks by itself.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace_s,
        "containers": [container],
        "volumes": volumes,
    }


def _environment(pods: Pods) -> list[Manifest]:
    found: list[Manifest] = []
    if pods.meet:
        key = {"name": pods.secret, "key": SECRET_KEY}
        found.append({"name": SECRET, "valueFrom": {"secretKeyRef": key}})

    texts = dict(text.partition("=")[::2] for text in pods.options.env)
    values = _unexpanded(list(texts.values()))
    return [*found, *({"name": name, "value": value} for name, value in zip(texts, values, strict=True))]


def _unexpanded(words: list[str]) -> list[str]:
    """Return words that reach the container as typed: Kubernetes replaces $(NAME), and makes $ of $$."""
    return [word.replace("$", "$$") for word in words]


def _resources(pods: Pods) -> Manifest:
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    # A limit on CPU time would slow the ranks down even on an idle machine.
    if pods.options.cpus:
        requests["cpu"] = pods.options.cpus
    if pods.options.memory:
        requests["memory"] = limits["memory"] = pods.options.memory
    if pods.gpus:
        limits[pods.options.gpu_resource] = str(pods.gpus)

    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


# ---- submitting ----


def submit(request: JobRequest, options: argparse.Namespace, files: dict[str, Path]) -> int:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UserError(
            "kubectl is needed to submit the job",
            "it is not on the PATH",
            f"install it, or copy {files[MANIFEST]} and type there: kubectl apply -f {files[MANIFEST].name}",
        )

    words = [kubectl, *(["--namespace", options.namespace] if options.namespace else [])]
    prefix = ["kubectl", *words[1:]]
    pods = _describe(request, options)
    if code := _refuse_an_older_job(words, prefix, pods):
        return code
    if pods.meet and (code := _make_secret(words, pods)):
        return code

    code = _call([*words, "apply", "-f", str(files[MANIFEST])])
    if code == 0:
        label = "batch.kubernetes.io/job-name" if options.kind == "job" else "jobset.sigs.k8s.io/jobset-name"
        print(f"lockstep: submitted; to watch: {shlex.join([*prefix, 'logs', '-f', '-l', f'{label}={pods.name}'])}")
        print(f"lockstep: to remove it: {shlex.join([*prefix, 'delete', '-f', str(files[MANIFEST])])}")

    return code


def _refuse_an_older_job(words: list[str], prefix: list[str], pods: Pods) -> int:
    """Refuse to submit a job whose name is taken: `apply` would change nothing, and say that all is well."""
    kind = {"job": "job.batch", "jobset": "jobset", "trainjob": "trainjob"}[pods.options.kind]
    looked = _look(words, kind, pods.name)
    if looked.stdout.strip():
        raise UserError(
            f"the cluster has a {pods.options.kind} {pods.name} already, which may have finished",
            "it would stay as it is, and nothing would start",
            f"use another run_dir; or, to run it again: {shlex.join([*prefix, 'delete', kind, pods.name])}",
        )

    return looked.returncode


def _look(words: list[str], kind: str, name: str) -> subprocess.CompletedProcess[bytes]:
    """Ask for an object by its name. The output is empty if there is none."""
    asked = [*words, "get", kind, name, "--ignore-not-found", "-o", "name"]
    return subprocess.run(asked, stdout=subprocess.PIPE, check=False)


def _make_secret(words: list[str], pods: Pods) -> int:
    """Create the job's Secret unless there is one. Its text passes through a pipe: no file and no argument shows it."""
    looked = _look(words, "secret", pods.secret)
    if looked.returncode or looked.stdout.strip():
        return looked.returncode

    given = os.environ.get(SECRET) or os.environ.get(SECRET_FILE)
    text = find_secret(Path()).key.decode() if given else secrets.token_hex(32)
    return _call([*words, "create", "-f", "-"], json.dumps(secret_object(pods, text)))


def secret_object(pods: Pods, text: str) -> Manifest:
    metadata = _metadata(pods, pods.secret)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {SECRET_KEY: text}}


def _call(words: list[str], text: str | None = None) -> int:
    done = subprocess.run(words, input=text, text=True, check=False)
    if done.returncode:
        print(f"lockstep: {words[0]} failed with exit code {done.returncode}: not submitted", file=sys.stderr)
    return 1 if done.returncode else 0


# What Kubernetes takes for options that are passed on as they were typed: a pattern, and an example.
PATTERNS = {
    "image": (r"[^\s]+", "registry.example/team/train:1"),
    "namespace": (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "my-team"),
    "cpus": (r"(?=.*[1-9])\d+(\.\d+)?(m|[eE]\d+)?", "16"),
    "memory": (r"(?=.*[1-9])\d+(\.\d+)?([KMGTPE]i|[kMGTPE]|[eE]\d+)?", "128Gi"),
}


def _check_values(options: argparse.Namespace) -> None:
    """Refuse what the cluster would refuse, or would never be able to place."""
    for name, (pattern, example) in PATTERNS.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(pattern, value, re.ASCII):
            raise UserError(f"--{name} {value!r} is not a value that Kubernetes takes", "", f"use --{name} {example}")

    if not 0 < options.port < 65536:
        raise UserError(f"--port {options.port} is not a port", "ports are 1 to 65535", "use --port 29400")
    if options.max_restarts < 0:
        raise UserError(f"--max-restarts {options.max_restarts} is negative", "", "use --max-restarts 0 for no restart")
