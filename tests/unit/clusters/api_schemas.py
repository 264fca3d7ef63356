"""The published schemas of the Kubernetes objects that `lockstep launch kubernetes` makes.

Kubeflow publishes them as the package kubeflow-trainer-api (Apache-2.0), for TrainJob and TrainingRuntime, and for
JobSet, Job, Service and Secret, which these contain or need. That package has every field with its type, but not the
limits that the CRDs set on the values: LIMITS has those of the fields that our manifests use, and RULES the CEL rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

import jsonschema

# (apiVersion, kind) -> module and class of the package.
MODELS = {
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainer_v1alpha1_train_job:TrainerV1alpha1TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "trainer_v1alpha1_training_runtime"
    ":TrainerV1alpha1TrainingRuntime",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset_v1alpha2_job_set:JobsetV1alpha2JobSet",
    ("batch/v1", "Job"): "io_k8s_api_batch_v1_job:IoK8sApiBatchV1Job",
    ("v1", "Service"): "io_k8s_api_core_v1_service:IoK8sApiCoreV1Service",
    ("v1", "Secret"): "io_k8s_api_core_v1_secret:IoK8sApiCoreV1Secret",
}

# The generated classes of these two hold a value in a wrapper, which is not what a manifest contains.
SCALARS = {
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["integer", "string"]},
    "IoK8sApimachineryPkgApiResourceQuantity": {
        "type": ["string", "number"],
        "pattern": r"^[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?$",
    },
}

LABEL = {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "minLength": 1, "maxLength": 63}
WORDS = {"maxItems": 128, "items": {"type": "string", "maxLength": 65536}}
LIMITS: dict[tuple[str, str], dict[str, Any]] = {
    ("JobsetV1alpha2FailurePolicyRule", "name"): {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    ("JobsetV1alpha2FailurePolicyRule", "action"): {
        "enum": [
            "FailJobSet",
            "RestartJobSet",
            "RestartJobSetAndIgnoreMaxRestarts",
            "RestartJob",
            "RestartJobAndIgnoreMaxRestarts",
        ]
    },
    ("JobsetV1alpha2FailurePolicyRule", "onJobFailureReasons"): {
        "uniqueItems": True,
        "items": {
            "enum": [
                "BackoffLimitExceeded",
                "DeadlineExceeded",
                "FailedIndexes",
                "MaxFailedIndexesExceeded",
                "PodFailurePolicy",
            ]
        },
    },
    ("JobsetV1alpha2ReplicatedJob", "name"): {**LABEL, "maxLength": 20},
    ("TrainerV1alpha1RuntimeRef", "name"): {"minLength": 1, "maxLength": 253},
    ("TrainerV1alpha1RuntimeRef", "kind"): {"enum": ["ClusterTrainingRuntime", "TrainingRuntime"]},
    ("TrainerV1alpha1RuntimeRef", "apiGroup"): {"enum": ["trainer.kubeflow.org"]},
    ("TrainerV1alpha1Trainer", "image"): {"maxLength": 500},
    ("TrainerV1alpha1Trainer", "command"): WORDS,
    ("TrainerV1alpha1Trainer", "args"): WORDS,
    ("TrainerV1alpha1Trainer", "env"): {"maxItems": 128},
    ("TrainerV1alpha1TrainJobSpec", "runtimePatches"): {"maxItems": 16},
    ("TrainerV1alpha1RuntimePatch", "manager"): {"minLength": 1, "maxLength": 253},
    ("TrainerV1alpha1ReplicatedJobPatch", "name"): LABEL,
    ("IoK8sApiBatchV1JobSpec", "completionMode"): {"enum": ["Indexed", "NonIndexed"]},
    ("IoK8sApiBatchV1JobSpec", "backoffLimit"): {"minimum": 0, "maximum": 2**31 - 1},
    ("IoK8sApiBatchV1PodFailurePolicyRule", "action"): {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
    ("IoK8sApiBatchV1PodFailurePolicyOnExitCodesRequirement", "operator"): {"enum": ["In", "NotIn"]},
    ("IoK8sApiBatchV1PodFailurePolicyOnExitCodesRequirement", "values"): {
        "minItems": 1,
        "maxItems": 255,
        "uniqueItems": True,
        "items": {"minimum": 1, "maximum": 255},
    },
    ("IoK8sApiCoreV1PodSpec", "restartPolicy"): {"enum": ["Always", "OnFailure", "Never"]},
    ("IoK8sApiCoreV1Container", "name"): LABEL,
    ("IoK8sApiCoreV1Volume", "name"): LABEL,
    ("IoK8sApimachineryPkgApisMetaV1ObjectMeta", "namespace"): LABEL,
}


@cache
def schema_of(version: str, kind: str) -> dict[str, Any]:
    module, name = MODELS[version, kind].split(":")
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    schema = model.model_json_schema(by_alias=True)
    for owner, definition in schema["$defs"].items():
        definition |= SCALARS.get(owner, {})
        if owner in SCALARS:
            definition.pop("properties")
            continue
        close(definition)
        for field in definition.get("properties", {}):
            if limit := LIMITS.get((owner, field)):
                definition["properties"][field] = {"allOf": [definition["properties"][field], limit]}
    close(schema)
    return schema


def close(definition: dict[str, Any]) -> None:
    """Refuse fields that are not in the schema, as `kubectl apply` does."""
    if definition.get("properties"):
        definition["additionalProperties"] = False


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what the API would refuse in one manifest."""
    schema = schema_of(manifest["apiVersion"], manifest["kind"])
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [*(f"{error.json_path}: {error.message[:300]}" for error in found), *broken_rules(manifest)]


# ---- rules that a schema cannot express: CEL rules of the CRDs, and what the controllers' webhooks check ----


def pods_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every Job spec in a manifest."""
    if isinstance(value, dict):
        if "backoffLimit" in value:
            yield value
        for inner in value.values():
            yield from pods_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods_of(inner)


def name_is_a_label(manifest: dict[str, Any]) -> bool:
    """TrainJob: matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') and size <= 63; a Service's name has the same form."""
    name = manifest["metadata"]["name"]
    return bool(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)) and len(name) <= 63


def host_names_fit(manifest: dict[str, Any]) -> bool:
    """JobSet: the name of a pod, NAME-JOB-INDEX-INDEX-xxxxx, has at most 63 characters."""
    return len(f"{manifest['metadata']['name']}-node-0-9999-abcde") <= 63


def failure_policy_has_never(manifest: dict[str, Any]) -> bool:
    """Job: podFailurePolicy needs restartPolicy Never, and its rules name a container that exists."""
    for spec in pods_of(manifest):
        pod = spec["template"]["spec"]
        names = {container["name"] for container in pod["containers"]}
        rules = spec.get("podFailurePolicy", {}).get("rules", [])
        if rules and pod["restartPolicy"] != "Never":
            return False
        for rule in rules:
            # Exactly one requirement for each rule.
            if len({"onExitCodes", "onPodConditions"} & set(rule)) != 1:
                return False
            if "onExitCodes" in rule and rule["onExitCodes"]["containerName"] not in names:
                return False
    return True


def mounts_have_volumes(manifest: dict[str, Any]) -> bool:
    for spec in pods_of(manifest):
        pod = spec["template"]["spec"]
        volumes = [volume["name"] for volume in pod["volumes"]]
        mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
        paths = [mount["mountPath"] for mount in mounts]
        if {mount["name"] for mount in mounts} != set(volumes) or len(set(volumes)) < len(volumes):
            return False
        if len(set(paths)) < len(paths):
            return False
    return True


def no_reserved_variables(manifest: dict[str, Any]) -> bool:
    """TrainJob: torchrun's variables are the controller's, and a patch sets no variable of the container `node`."""
    spec = manifest["spec"]
    names = {variable["name"] for variable in spec["trainer"].get("env", [])}
    return not any(name.startswith("PET_") for name in names)


RULES: dict[str, list[Callable[[dict[str, Any]], bool]]] = {
    "TrainJob": [name_is_a_label, host_names_fit, no_reserved_variables],
    "TrainingRuntime": [name_is_a_label, failure_policy_has_never, mounts_have_volumes],
    "JobSet": [name_is_a_label, host_names_fit, failure_policy_has_never, mounts_have_volumes],
    "Job": [name_is_a_label, failure_policy_has_never, mounts_have_volumes],
    "Service": [name_is_a_label],
    "Secret": [],
}


def broken_rules(manifest: dict[str, Any]) -> list[str]:
    return [rule.__doc__ or rule.__name__ for rule in RULES[manifest["kind"]] if not rule(manifest)]
