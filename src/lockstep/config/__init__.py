"""What the user asked for: one typed, frozen `RunConfig`, and where each of its values came from.

Values arrive in layers (task default, preset, file, command line, argument); a later layer wins, key by key.
All problems of all layers are reported together. Nothing is derived here (that is the Plan's job), and `task.*` is
passed on unchanged: only the task can check its options.

schema        the keys with their meaning; those with a dot are in sections
value_types   how a key is declared, and types of values
settings      values with their source; nested values and dotted keys
strategies    what a configuration must know about each strategy
conflicts     settings that do not work together
yaml_dialect  the YAML that we read and write
resolve       layers -> RunConfig with sources, or every problem at once
changes       settings that differ between a saved run and this one
load          files, command line, Python objects -> layers
"""

from __future__ import annotations

from lockstep.config.load import from_object, read_file, read_layers, words_not_read
from lockstep.config.resolve import (
    ONLY_TRAINING,
    Layer,
    Resolved,
    check,
    extend,
    resolve,
    resolve_for,
    strongest_value,
)
from lockstep.config.schema import KEYS, RunConfig
from lockstep.config.sections import (
    ClipConfig,
    DataConfig,
    DDPConfig,
    FSDPConfig,
    LrConfig,
    ScalerConfig,
    SpikeConfig,
)
from lockstep.config.settings import flatten
from lockstep.config.yaml_dialect import to_yaml

__all__ = [
    "KEYS",
    "ONLY_TRAINING",
    "ClipConfig",
    "DDPConfig",
    "DataConfig",
    "FSDPConfig",
    "Layer",
    "LrConfig",
    "Resolved",
    "RunConfig",
    "ScalerConfig",
    "SpikeConfig",
    "check",
    "extend",
    "flatten",
    "from_object",
    "read_file",
    "read_layers",
    "resolve",
    "resolve_for",
    "strongest_value",
    "to_yaml",
    "words_not_read",
]
