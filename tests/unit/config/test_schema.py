"""The keys, their types, and a RunConfig as an object."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from lockstep import config
from lockstep.config import RunConfig, resolve


def test_the_defaults_are_the_agreed_ones():
    resolved = resolve([])
    assert resolved.config == RunConfig()
    assert set(resolved.sources.values()) == {"default"}
    assert set(resolved.sources) == set(config.KEYS) == set(config.flatten(RunConfig()))
    values = config.flatten(RunConfig())
    expected = {"seed": 0, "tail": "short", "precision": "auto", "compile": "auto", "lr.decay": 0.2}
    expected |= {"scaler.initial": 2.0**15, "scaler.maximum": 2.0**24, "nonfinite.max_in_a_row": 5}
    expected |= {
        "data.prefetch": 2,
        "ddp.bucket_mb": "auto",
        "log.every": 10,
        "checks.every": 500,
        "steps": None,
    }
    assert {key: values[key] for key in expected} == expected


def test_the_config_is_frozen_and_can_be_sent_to_a_worker():
    made = resolve([("a", {"steps": 3, "task": {"width": 2}})]).config
    with pytest.raises(ValidationError):
        made.steps = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_config_built_directly_obeys_the_same_rules():
    for wrong in ({"steps": 1, "epochs": 2}, {"micro_batch": 8, "global_batch": 4}, {"step": 1}):
        with pytest.raises(ValidationError):
            RunConfig(**wrong)


@pytest.mark.parametrize(
    ("key", "given", "taken"),
    [
        ("epochs", 2, 2.0),
        ("lr.scaling", None, "none"),
        ("log.progress", False, "off"),
        ("data.workers", 0, 0),
        ("lr.peak", 0, 0.0),
        ("compile", True, True),
        ("run_dir", Path("runs") / "a", str(Path("runs") / "a")),
    ],
)
def test_what_is_taken_for_what(key, given, taken):
    value = config.flatten(resolve([("argument", {key: given})]).config)[key]
    assert value == taken
    assert type(value) is type(taken)


def test_reading_a_configuration_does_not_import_torch():
    code = "import sys, lockstep.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
