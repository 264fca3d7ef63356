"""The sizes of batches: which dimensions vary, learnt from the calls of the first steps, and which calls code takes.

Code that torch compiles for one size does not take another one, unless the dimension was marked as dynamic. So the
shapes of all tensors in a call are noted (`BatchWatch`), all ranks agree on the dimensions that vary, and later calls
are compared with the shapes that the code was compiled for (`fits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.runtime.collectives import Collectives

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # (args, kwargs)
Shape = tuple[int, ...]
Sizes = list[list[list[int]]]  # [tensor][dimension]: the sizes seen, in ascending order
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

        for dim, (size, known) in enumerate(zip(shape, expected, strict=True)):
            may_differ = (index, dim) in dynamic and size >= SMALLEST
            if size != known and not may_differ:
                return False

    return True


# ---- the shapes of many calls ----


@dataclass
class SizesSeen:
    """The sizes of the tensors that a function was called with."""

    sizes: Sizes | None = None  # None: it was not called yet
    irregular: bool = False  # the calls had different numbers of tensors or dimensions
    shapes: set[tuple[Shape, ...]] = field(default_factory=set)  # on this rank

    def add(self, shapes: Sequence[Shape]) -> None:
        """Add the shapes of one call's tensors."""
        # Most calls have the same shapes as an earlier one, and cost one look-up.
        key = tuple(shapes)
        if key in self.shapes:
            return

        self.shapes.add(key)
        self.merge([[[size] for size in shape] for shape in shapes])

    def merge(self, other: Sizes | None) -> None:
        """Add the sizes that another rank has seen."""
        if other is None:
            return

        # These are the first.
        if self.sizes is None:
            self.sizes = other
            return

        if [len(dims) for dims in other] != [len(dims) for dims in self.sizes]:
            self.irregular = True
            return

        # The union of the sizes of each dimension of each tensor.
        self.sizes = [
            [sorted({*mine, *theirs}) for mine, theirs in zip(ours, others, strict=True)]
            for ours, others in zip(self.sizes, other, strict=True)
        ]

    def describe(self) -> list[list[int]]:
        """Return the size of each dimension, or -1 if it varies."""
        return [[sizes[0] if len(sizes) == 1 else -1 for sizes in dims] for dims in self.sizes or []]

    def smallest(self) -> list[Shape]:
        """Return, for each tensor, the smallest size seen of each dimension."""
        return [tuple(sizes[0] for sizes in dims) for dims in self.sizes or []]

    def varying(self) -> Dims:
        """Return the dimensions with more than one size."""
        return frozenset(
            (index, dim)
            for index, dims in enumerate(self.sizes or [])
            for dim, sizes in enumerate(dims)
            if len(sizes) > 1
        )


class BatchWatch:
    """The sizes of the batches so far, and a few calls of the model, to compile for these sizes."""

    def __init__(self) -> None:
        self.sizes = SizesSeen()
        self.varying: Dims = frozenset()  # the dimensions that vary, as all ranks have agreed

        # One call for each class of sizes, by which of its sizes are aligned: torch compiles a version for each.
        self._examples: dict[tuple[bool, ...], Arguments] = {}

    @property
    def examples(self) -> list[Arguments]:
        return list(self._examples.values())

    def note(self, arguments: Any) -> None:
        """Note the sizes of one call's tensors."""
        self.sizes.add(shapes_of(arguments))

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

    def agree(self, collectives: Collectives) -> None:
        """Give all ranks the same sizes. Collective."""
        # Merged from scratch on every rank, in the order of the ranks, so that all get the same result.
        agreed = SizesSeen()
        for sizes, irregular in collectives.gather_json([self.sizes.sizes, self.sizes.irregular]):
            agreed.merge(sizes)
            agreed.irregular |= irregular

        self.sizes.sizes = agreed.sizes
        self.sizes.irregular = agreed.irregular

        # Irregular calls have no common dimensions, so none of them is marked as dynamic.
        self.varying = frozenset() if agreed.irregular else agreed.varying()
