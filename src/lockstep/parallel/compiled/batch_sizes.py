"""The sizes of batches: which dimensions vary, learnt from the calls of the first steps, and which calls code takes.

Code that torch compiles for one size does not take another one, unless the dimension was marked as dynamic. So the
shapes of all tensors in a call are noted (`SeenShapes`), all ranks agree on the dimensions that vary, and later calls
are compared with the shapes that the code was compiled for (`fits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.runtime.collectives import Collectives

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # (args, kwargs)
Shape = tuple[int, ...]
Dims = frozenset[tuple[int, int]]  # (index of a tensor, dimension)

SMALLEST = 2  # torch compiles for the sizes 0 and 1 separately, even if a dimension is dynamic
ALIGNED = 8  # some kernels have a version for sizes that are multiples of this
MOST_EXAMPLES = 3


# ---- the shapes of one call ----


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the arguments of a call, in a fixed order."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)

        # Containers that torch does not know, such as transformers' BatchEncoding.
        elif isinstance(leaf, Mapping):
            found += tensors_in(dict(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, part.name) for part in fields(leaf)])

    return found


def shapes_of(arguments: Any) -> list[Shape]:
    """Return the shape of each tensor in the arguments of a call, in the order of `tensors_in`."""
    return [tuple(tensor.shape) for tensor in tensors_in(arguments)]


def fits(shapes: Sequence[Shape], compiled: Sequence[Shape], dynamic: Dims) -> bool:
    """Return whether a call with `shapes` can run the code that was compiled for the shapes `compiled`.

    dynamic: the dimensions that were marked as dynamic, so that they may have any size from SMALLEST on
    """
    if len(shapes) != len(compiled):
        return False

    for index, (shape, expected) in enumerate(zip(shapes, compiled, strict=True)):
        if len(shape) != len(expected):
            return False

        # Code for a dynamic dimension takes any size but the smallest ones, for which torch compiles separately.
        for dim, (size, known) in enumerate(zip(shape, expected, strict=True)):
            may_differ = (index, dim) in dynamic and size >= SMALLEST
            if size != known and not may_differ:
                return False

    return True


# ---- the shapes of many calls ----


class SeenShapes:
    """The shapes of the batches so far, and a few calls of the model, to compile for these sizes."""

    def __init__(self) -> None:
        # The shapes of the tensors of each call that differed from all before, in order. `agree` adds other ranks'.
        self._calls: dict[tuple[Shape, ...], None] = {}
        self.varying: Dims = frozenset()  # the dimensions that vary, as all ranks have agreed

        # One call for each class of sizes, by which of its sizes are aligned: torch compiles a version for each.
        self._examples: dict[tuple[bool, ...], Arguments] = {}

    def note(self, shapes: Sequence[Shape]) -> None:
        """Note the shapes of one call's tensors."""
        self._calls[tuple(shapes)] = None

    @property
    def irregular(self) -> bool:
        """Whether calls had different numbers of tensors or dimensions."""
        return len({tuple(map(len, shapes)) for shapes in self._calls}) > 1

    def sizes(self) -> list[list[list[int]]]:
        """Return the sizes seen of each tensor and dimension, in ascending order; of irregular calls, of the first."""
        first = next(iter(self._calls), ())
        alike = [shapes for shapes in self._calls if [*map(len, shapes)] == [*map(len, first)]]
        return [
            [sorted(set(sizes)) for sizes in zip(*of_tensor, strict=True)] for of_tensor in zip(*alike, strict=True)
        ]

    def describe(self) -> list[list[int]]:
        """Return the size of each dimension, or -1 if it varies."""
        return [[sizes[0] if len(sizes) == 1 else -1 for sizes in dims] for dims in self.sizes()]

    def smallest(self) -> list[Shape]:
        """Return, for each tensor, the smallest size seen of each dimension."""
        return [tuple(sizes[0] for sizes in dims) for dims in self.sizes()]

    def agree(self, collectives: Collectives) -> None:
        """Give all ranks the same shapes. Collective."""
        # In the order of the ranks, so that all get the same result.
        gathered = collectives.all_gather_json(list(self._calls))
        self._calls = {tuple(map(tuple, shapes)): None for calls in gathered for shapes in calls}

        # Irregular calls have no common dimensions, so none of them is marked as dynamic.
        self.varying = frozenset(
            (index, dim)
            for index, dims in enumerate(self.sizes())
            for dim, sizes in enumerate(dims)
            if len(sizes) > 1 and not self.irregular
        )

    @property
    def examples(self) -> list[Arguments]:
        return list(self._examples.values())

    def keep_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep a call of the model, if it is the first one of its class of sizes."""
        if len(self._examples) >= MOST_EXAMPLES:
            return

        sizes = [size for shape in shapes_of((args, kwargs)) for size in shape]
        aligned = tuple(size % ALIGNED == 0 for size in sizes)
        self._examples.setdefault(aligned, (args, kwargs))

    def drop_examples(self) -> None:
        """Free the memory of the batches."""
        self._examples.clear()
