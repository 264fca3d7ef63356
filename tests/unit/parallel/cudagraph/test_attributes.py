"""What modules keep besides tensors: looked at, and put back."""

import torch
from torch import nn

from lockstep.parallel.calls.state import StateSnapshot
from lockstep.parallel.cudagraph.variants import ModelAttributes, same_objects


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.share, self.seen, self.by_name, self.table = nn.Dropout(0.5), 0.25, [1, 2], {"a": 1}, None


def test_plain_values_of_all_parts_make_a_difference():
    model = Keeping()
    held = ModelAttributes(model.modules())
    first = held.settings()
    assert held.settings() == first
    for module, name, value in ((model, "share", 0.5), (model.drop, "p", 0.1), (model, "table", torch.ones(2))):
        before = getattr(module, name)
        setattr(module, name, value)
        assert held.settings() != first
        setattr(module, name, before)
        assert held.settings() == first
    assert hash(first)


def test_parts_are_told_apart():
    model = Keeping()
    held = ModelAttributes(model.modules())
    first = held.callables()
    assert same_objects(first, held.callables())
    for module, name, value in ((model, "drop", nn.Identity()), (model.drop, "forward", len)):
        before = vars(module).get(name, getattr(module, name, None))
        setattr(module, name, value)
        held.refresh()
        assert not same_objects(first, held.callables()), name
        delattr(module, name) if name == "forward" else setattr(module, name, before)
        held.refresh()
        assert same_objects(first, held.callables()), name
    model.seen = [3]  # a forward may have left it there, and another one may not care
    assert same_objects(first, held.callables())
    model.later = torch.ones(2)
    held.refresh()
    assert held.tensors() == [model.later]


def test_what_was_changed_is_named_and_put_back():
    model = Keeping()
    seen, by_name = model.seen, model.by_name
    before = StateSnapshot(model)
    model.share = 1 / 4  # another object, the same value
    assert before.changed_attributes() == []
    model.share, model.new = 0.3, 1
    model.seen.append(3)
    model.by_name["a"] = 2
    model.drop.p = 0.9
    assert sorted(before.changed_attributes()) == [
        "Dropout.p", "Keeping.by_name", "Keeping.new", "Keeping.seen", "Keeping.share",
    ]  # fmt: skip
    before.restore()
    assert before.changed_attributes() == []
    assert (model.seen is seen, model.by_name is by_name) == (True, True)
    assert (model.share, model.seen, model.by_name, model.drop.p) == (0.25, [1, 2], {"a": 1}, 0.5)
    assert not hasattr(model, "new")
