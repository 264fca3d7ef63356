"""The notebook whose kernel this process is, if it is one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import PurePath
from typing import Any

# The variable in which VS Code leaves the path of the notebook, among the names of its cells.
VSCODE_PATH = "__vsc_ipynb_file__"

# The environment variable in which a Jupyter server does so. In a console it holds some other name.
JUPYTER_PATH = "JPY_SESSION_NAME"


def shell() -> Any | None:
    """Return IPython's shell if this process is a kernel: of Jupyter, of VS Code, of Colab. A terminal has none."""
    # Without an import: a kernel has imported it already. The shell of a terminal has no kernel.
    ipython = sys.modules.get("IPython")

    found = ipython.get_ipython() if ipython is not None else None
    return found if hasattr(found, "kernel") else None


def notebook_name() -> str | None:
    """Return the name of the notebook's file without .ipynb, fit for the name of a folder; None if it is not known."""
    here = shell()
    if here is None:
        return None

    # VS Code leaves the path in the notebook's own names, a Jupyter server in the environment.
    path = PurePath(str(here.user_ns.get(VSCODE_PATH) or os.environ.get(JUPYTER_PATH, "")))
    if path.suffix != ".ipynb":
        return None

    return re.sub(r"[^\w.-]+", "-", path.stem).strip("-.").lower() or None
