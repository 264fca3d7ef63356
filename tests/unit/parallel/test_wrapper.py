from __future__ import annotations

import torch
from torch import nn

from lockstep.parallel.ddp.driver import _WithControlWord
from lockstep.runtime.control_word import LENGTH


def test_a_part_named_model_is_that_of_the_users_model() -> None:
    """Scripts written for DDP use `replica.module` as their model, and many models have a part of this name."""
    model = nn.Module()
    model.model = nn.Linear(2, 2)
    carrier = _WithControlWord(model, torch.zeros(LENGTH))
    assert carrier.model is model.model
    assert list(carrier.state_dict()) == ["model.weight", "model.bias"]
