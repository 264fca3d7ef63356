"""The decisions of a job are made from what they are told: they reach neither the disk nor a process."""

import ast
from pathlib import Path

import pytest

from lockstep.launch import decisions

MODULES = sorted(Path(decisions.__file__).parent.glob("*.py"))

# With these a decision could look for itself.
OUTSIDE = {"io", "os", "shutil", "socket", "subprocess", "tempfile", "threading", "time"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_decision_does_not_look_for_itself(path):
    imported, from_folder = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
            if (node.module or "").startswith("lockstep.run_folder"):
                from_folder |= {alias.name for alias in node.names}

    assert not imported & OUTSIDE
    assert from_folder <= {"CheckpointFacts", "LOGS"}  # a value, and a name
