"""Writes the small files that describe a whole run into its folder, for `report` and for `--resume`.

The settings and the plan are written before the first step, and the summary at the end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.config import Resolved, to_yaml
from lockstep.observe.formats import finite
from lockstep.run_folder.names import CONFIG, PLAN, SOURCES, SUMMARY


def write_head(run_dir: Path, resolved: Resolved, plan: dict[str, Any]) -> None:
    """Write the settings and the plan, which are known before the first step."""
    # Each in one piece: after a kill, --resume reads the settings of the run from these files.
    files.write(run_dir / CONFIG, to_yaml(resolved.config))
    files.write(run_dir / SOURCES, json.dumps(resolved.sources, indent=2))
    files.write(run_dir / PLAN, json.dumps(plan, indent=2))

    # A summary from before a resume is out of date.
    (run_dir / SUMMARY).unlink(missing_ok=True)


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    files.write(run_dir / SUMMARY, json.dumps(finite(summary), indent=2))
