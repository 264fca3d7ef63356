"""The nouns of a step: their quick copies lose no field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from lockstep.task import MicroBatch, StepBatches


def distinct(cls: Any) -> Any:
    """Return an object with another value in each field, and none of the defaults."""
    return cls(**{field.name: f"the {field.name}" for field in fields(cls)})


def test_a_copy_with_other_data_has_all_other_fields() -> None:
    micro = distinct(MicroBatch)
    assert micro.with_data("other") == replace(micro, data="other")


def test_a_copy_with_other_micro_batches_has_all_other_fields() -> None:
    batches = distinct(StepBatches)
    assert batches.with_micro_batches([], 7) == replace(batches, micro_batches=[], step=7)
