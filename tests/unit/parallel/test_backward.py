"""The backward that drivers call: torch's, without its checks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep.parallel.inner_gradients import LET_THROUGH, InnerGradients
from lockstep.parallel.micro_batches import backward_unchecked


class OtherTensor(Tensor):
    pass


def test_it_adds_to_the_gradients_as_torch_does():
    p, word = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.zeros(3))
    sent = torch.tensor([1.0, 2.0, 3.0])

    backward_unchecked(((p**2).sum(),), (torch.tensor(0.5),))
    backward_unchecked(((p**2).sum(), word), (torch.tensor(0.5), sent))

    torch.testing.assert_close(p.grad, torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(word.grad, sent)


def test_a_loss_of_another_class_goes_through_torchs_function(monkeypatch: pytest.MonkeyPatch):
    """It may have a backward of its own (`__torch_function__`), which only that function finds."""
    calls = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *args: calls.append(args))
    outputs, grads = (torch.ones(()).as_subclass(OtherTensor),), (torch.ones(()),)

    backward_unchecked(outputs, grads)

    assert calls == [(outputs, grads)]


def test_a_block_that_is_entered_twice_leaves_torch_as_it_was():
    engine = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
    calls = []
    inner_gradients = InnerGradients(calls.append)
    x = torch.ones(2, requires_grad=True)

    with inner_gradients, inner_gradients:
        x.sum().backward()
        with LET_THROUGH:
            x.sum().backward()
        x.sum().backward()
    x.sum().backward()

    assert len(calls) == 2
    assert torch.autograd._engine_run_backward is engine  # pyrefly: ignore[missing-attribute]


def test_a_block_that_was_left_does_nothing_when_it_closes_later():
    """A custom loop that fails leaves its block; Python closes the iterator of the loop whenever it likes."""
    engine = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
    failed, other = InnerGradients([].append), InnerGradients([].append)

    failed.__enter__()
    failed.leave()
    assert torch.autograd._engine_run_backward is engine  # pyrefly: ignore[missing-attribute]

    with other:
        replaced = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
        failed.__exit__()
        assert torch.autograd._engine_run_backward is replaced  # pyrefly: ignore[missing-attribute]
