"""The shapes of a call's tensors, and which sizes vary, learnt from the calls of the first steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # (args, kwargs)
Shape = tuple[int, ...]
Sizes = list[list[list[int]]]  # [tensor][dimension]: the sizes seen, in ascending order
Dims = frozenset[tuple[int, int]]  # (index of a tensor, dimension)
SMALLEST = 2  # torch compiles for the sizes 0 and 1 separately, even if a dimension is dynamic


@dataclass
class SizesSeen:
    """The sizes of the tensors that a function was called with."""

    sizes: Sizes | None = None
    irregular: bool = False  # the calls had different numbers of tensors or dimensions
    shapes: set[tuple[Shape, ...]] = field(default_factory=set)  # on this rank

    def add(self, shapes: Sequence[Shape]) -> None:
        """Add the shapes of one call's tensors."""
        # The same shapes as before teach nothing.
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

    def varying(self) -> Dims:
        """Return the dimensions with more than one size."""
        return frozenset(
            (index, dim)
            for index, dims in enumerate(self.sizes or [])
            for dim, sizes in enumerate(dims)
            if len(sizes) > 1
        )


def fits(shapes: Sequence[Shape], compiled: Sequence[Shape], dynamic: Dims) -> bool:
    """Return whether code that was compiled for one set of shapes, with dynamic dimensions, takes another one."""
    if len(shapes) != len(compiled):
        return False

    for index, (shape, expected) in enumerate(zip(shapes, compiled, strict=True)):
        if len(shape) != len(expected):
            return False

        for dim, (size, known) in enumerate(zip(shape, expected, strict=True)):
            if size == known:
                continue
            if (index, dim) not in dynamic or size < SMALLEST:
                return False

    return True


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
