"""Lets torchvision, which timm and transformers import, load beside a torch that it was not built for.

Its wheels are built for one build of torch. Beside another one (a CPU's, say) its compiled part does not load, and then
its Python part ends in "operator torchvision::nms does not exist". No model here calls these operators: it is enough
that they have a name. Where the compiled part loads, nothing is declared.

Because it would also break transformers for everybody else in the virtual environment, `make` keeps such a torchvision
in a folder of its own, which is on the path here only.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

APART = Path(sys.prefix) / "apart"

# Those that torchvision describes to torch.compile whether or not its compiled part has loaded.
SCHEMAS = [f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")]


def declare_missing() -> torch.library.Library | None:
    """Declare the operators of torchvision if its compiled part cannot be loaded. Whoever calls this keeps the result:
    they vanish with it."""
    if APART.is_dir() and str(APART) not in sys.path:
        sys.path.append(str(APART))

    # Found without importing it, which takes seconds.
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        torch.ops.load_library(next(Path(found.origin).parent.glob("_C*")))
        return None
    except (OSError, StopIteration):
        declared = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            declared.define(schema)
        return declared
