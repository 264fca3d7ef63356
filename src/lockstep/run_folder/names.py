"""The names of what Lockstep writes into a run's folder. `checkpoint_names.py` has the names in RUN/checkpoints."""

from __future__ import annotations

# What a run is: its settings, where each of them comes from, and what follows from them.
CONFIG = "config.yaml"
SOURCES = "config.sources.json"
PLAN = "plan.json"
MICRO_BATCH = "micro_batch.json"  # the largest micro-batch that fits, with micro_batch=auto

# What it records.
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
LOGS = "logs"
SAMPLES = "samples"
PROFILE = "profile"

# What it has trained.
CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
AVERAGED_WEIGHTS = "ema.safetensors"  # with ema.decay
ASSETS = "assets"  # files of the task that belong to the weights, such as a tokenizer

# What commands add: `lockstep evaluate`, `lockstep ckpt export`, `lockstep launch` and `lockstep resize`.
EVALUATIONS = "evaluations"
EXPORT = "export"
LAUNCH = "launch"
RESIZE_REQUEST = "resize"

# The locks of rank 0 and of the launcher (`locks.py`).
LOCK = ".lock"
LAUNCHER_LOCK = ".launcher"

# The file that exists while a run goes back to one of its own checkpoints, whose name it holds: until the later ones
# are set aside, or the run has committed another one.
GOING_BACK = ".going-back"

# All of these, as patterns of `fnmatch`. `lockstep rm` deletes them, and no run begins where one is a link. Sinks say
# themselves what else they write.
WRITTEN = (
    *(CONFIG, SOURCES, PLAN, MICRO_BATCH),
    *(METRICS, EVENTS, SUMMARY, REPORT, LOGS, SAMPLES, PROFILE),
    *(CHECKPOINTS, WEIGHTS, AVERAGED_WEIGHTS, ASSETS),
    *(EVALUATIONS, EXPORT, LAUNCH, RESIZE_REQUEST),
    *(LOCK, LAUNCHER_LOCK, GOING_BACK, ".seen-*", ".probe-*", ".secret*", ".shared-*", ".coordinator*", ".cut-off-*"),
    ".*.tmp",  # temporary files of any of them
)

_BEGINNINGS = {pattern.partition(".")[0] for pattern in WRITTEN}


def is_written(name: str) -> bool:
    """Return whether Lockstep writes to this name, or a sink to a similar one, such as metrics.csv."""
    return name.partition(".")[0] in _BEGINNINGS
