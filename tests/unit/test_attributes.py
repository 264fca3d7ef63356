"""What modules keep besides tensors: looked at, and put back."""

import torch
from torch import nn

from lockstep.parallel.attributes import Attributes, Settings


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.share, self.seen, self.by_name, self.table = nn.Dropout(0.5), 0.25, [1, 2], {"a": 1}, None


def test_plain_values_of_all_parts_make_a_difference():
    model = Keeping()
    settings = Settings(model.modules())
    first = settings.now()
    assert settings.now() == first
    for module, name, value in ((model, "share", 0.5), (model.drop, "p", 0.1), (model, "table", torch.ones(2))):
        before = getattr(module, name)
        setattr(module, name, value)
        assert settings.now() != first
        setattr(module, name, before)
        assert settings.now() == first
    assert hash(first)


def test_what_was_changed_is_named_and_put_back():
    model = Keeping()
    seen, by_name = model.seen, model.by_name
    before = Attributes(model)
    model.share = 1 / 4  # another object, the same value
    assert before.changed() == []
    model.share, model.new = 0.3, 1
    model.seen.append(3)
    model.by_name["a"] = 2
    model.drop.p = 0.9
    assert sorted(before.changed()) == [
        "Dropout.p", "Keeping.by_name", "Keeping.new", "Keeping.seen", "Keeping.share",
    ]  # fmt: skip
    before.restore()
    assert before.changed() == []
    assert (model.seen is seen, model.by_name is by_name) == (True, True)
    assert (model.share, model.seen, model.by_name, model.drop.p) == (0.25, [1, 2], {"a": 1}, 0.5)
    assert not hasattr(model, "new")
