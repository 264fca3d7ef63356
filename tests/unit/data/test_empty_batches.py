"""A batch is empty if collate left no sample of it, in whatever container it returns tensors."""

from collections import UserDict
from types import MappingProxyType

import pytest
import torch

from lockstep.data.loader import is_empty


@pytest.mark.parametrize("container", [dict, UserDict, MappingProxyType, lambda values: list(values.values())])
def test_tensors_without_rows_are_empty(container):
    def batch(rows):
        return container({"x": torch.ones(rows, 3), "inner": container({"y": torch.ones(rows)})})

    assert is_empty(batch(0))
    assert not is_empty(batch(2))


def test_none_is_empty_and_a_batch_without_tensors_is_not():
    assert is_empty(None)
    assert not is_empty({"text": "a"})


def test_a_nested_tensor_is_not_empty() -> None:
    assert not is_empty([torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])])
