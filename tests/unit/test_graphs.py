"""Recorded calls: which are, how they are told apart, and that training does not notice. Without a GPU: the device here
records nothing, and replays by doing the work again. tests/gpu/test_gpu_graphs.py has the real one."""

import copy
import gc
import random
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lockstep
from again import Again
from lockstep.errors import UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.cudagraph import graphs
from lockstep.parallel.cudagraph.graphs import MOST_PATTERNS, WATCHED, Graphs, forget_recordings
from lockstep.parallel.cudagraph.rehearsal import difference
from lockstep.parallel.trees import Opaque, put_together, take_apart
from lockstep.recipes.hrm import HRM

STEPS = WATCHED + 6


class Said(list):
    def __call__(self, event, **fields):
        self.append((fields["call"], fields["reason"]))


def graphed(model, device=None, required=False):
    device, said = device or Again(), Said()
    found = Graphs(model, model._call_impl, device, required, said)
    model._compiled_call_impl = found
    return found, device, said


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None
    factor: float = 2.0


class Seen(NamedTuple):
    y: torch.Tensor
    more: dict


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x)


class Recurrent(nn.Module):
    """The state is passed in and comes out without a gradient; the second head is never used."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.idle = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, state=None, *, twice=False):
        y, (h, c) = self.cell(self.frozen(x)[:, None], state)
        y = self.head(y[:, 0]) * (2 if twice else 1)
        return Seen(y, {"state": (h.detach(), c.detach()), "idle": self.idle(y), "pair": Pair(y.detach(), None)})


def train(model, steps=STEPS, seed=0):
    """Two micro-batches a step, an evaluation now and then, and a carry from step to step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, state = [], None
    data = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(6, 4, generator=data)
            torch.manual_seed(1000 * step + micro)
            if isinstance(model, Recurrent):
                found = model(x, state, twice=True)
                y, state = found.y, found.more["state"]
                assert found.more["pair"].factor == 2.0
            else:
                y = model(x)
            loss = (y**2).sum()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                x = torch.ones(5, 4)
                y = model(x, state and tuple(s[:, :5] for s in state)).y if isinstance(model, Recurrent) else model(x)
            losses.append(y.sum().item())
            model.train()
    return losses


@pytest.mark.parametrize("kind", [Dropping, Recurrent])
def test_training_does_not_notice(kind):
    plain = kind()
    model = copy.deepcopy(plain)
    _found, device, said = graphed(model)
    assert train(model) == train(plain)
    assert device.replayed > STEPS
    for (name, one), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name  # also what no used result reaches
    assert all(reason.startswith("recorded") for _, reason in said)
    assert copy.deepcopy(model)._compiled_call_impl is None  # a copy is a plain model


def test_a_run_of_a_recipe(tmp_path, monkeypatch):
    """Six micro-batches a step, states that go from step to step, and evaluations: to the last bit."""
    values = {"preset": "tiny", "steps": 6, "evaluate.every": 3, "device": "cpu", "log.progress": "off"}
    plain = lockstep.fit(HRM, values, run_dir=tmp_path / "plain")
    monkeypatch.setattr(graphs, "wants_graph", lambda config, runtime: True)
    monkeypatch.setattr(graphs, "CudaDevice", lambda device: Again())
    made, init = [], Graphs.__init__
    monkeypatch.setattr(Graphs, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    found = lockstep.fit(HRM, values, run_dir=tmp_path / "graph")
    assert all(torch.equal(plain.weights[name], found.weights[name]) for name in plain.weights)
    events = [event for event in read_jsonl(tmp_path / "graph" / "events.jsonl") if event["event"] == "graph"]
    assert [event["reason"].split(",")[0] for event in events] == ["recorded"]
    assert plain.summary["eval_loss"] == found.summary["eval_loss"]
    assert len(made) == 1
    assert not made[0].ways  # the run has freed them


def test_every_way_of_calling_has_its_own_recording():
    model = Dropping()
    found, _device, _said = graphed(model)
    for size in (2, 3):
        train_once = [model(torch.ones(size, 4)).sum().backward() for _ in range(WATCHED + 2)]
        assert len(train_once) == WATCHED + 2
    with torch.no_grad():
        for _ in range(WATCHED + 2):
            model(torch.ones(2, 4))
    model.net[2].eval()  # a part of it
    model(torch.ones(2, 4))
    assert [way.ready for way in found.ways.values()] == [True, True, True, False]


def warmed(model, device=None, calls=WATCHED + 3, inputs=None, required=False):
    """After `calls` calls with a backward each."""
    found, device, said = graphed(model, device, required)
    for _ in range(calls):
        y = model(*(inputs() if inputs else [torch.randn(3, 4)]))
        (y if isinstance(y, torch.Tensor) else y.y).sum().backward()
    return found, device, said


def test_two_forwards_before_a_backward():
    model = Dropping()
    _found, device, said = warmed(model)
    plain = copy.deepcopy(model)
    for other in (model, plain):
        other.zero_grad()
        torch.manual_seed(0)
        (other(torch.ones(3, 4)) * other(2 * torch.ones(3, 4))).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert "before the backward of the first" in said[-1][1]
    model(torch.ones(3, 4))  # nobody goes backward: forgotten with its results
    replayed = device.replayed
    model(torch.ones(3, 4))
    assert device.replayed > replayed


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        seen = self.trunk(x)
        return self.left(seen), self.right(seen)


def test_losses_that_take_turns():
    """The head whose turn it is not has no gradient, and its optimizer leaves it alone."""
    plain = TwoHeads()
    model = copy.deepcopy(plain)
    _found, device, _said = graphed(model)
    optimizers = [torch.optim.AdamW(each.parameters(), weight_decay=0.5) for each in (model, plain)]
    for step in range(WATCHED + 6):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.ones(3, 4))[step % 2].sum().backward()
            optimizer.step()
    assert device.replayed > 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class ManyHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 1) for _ in range(8))

    def forward(self, x):
        seen = self.trunk(x)
        return [head(seen) for head in self.heads]


def test_losses_that_are_new_again_and_again():
    """Seven of eight losses come late, one after the other: the call stays a recorded one, and what must be recorded is
    not refused in the midst of a run."""
    plain = ManyHeads()
    model = copy.deepcopy(plain)
    found, device, _said = graphed(model, required=True)
    for step in range(60):
        for each in (model, plain):
            each.zero_grad()
            each(torch.ones(3, 4))[max(0, step // 5 - 3) % 8].sum().backward()
        assert all(_same(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    (way,) = found.ways.values()
    assert (way.ready, len(way.patterns)) == (True, MOST_PATTERNS)
    assert device.replayed > 60


def _same(one, other):
    return (one is None and other is None) or torch.equal(one, other)


class StaleOnce(Again):
    """Of what was recorded, one piece is not done again."""

    def __init__(self, which):
        super().__init__()
        self._which = which

    def record(self, works):
        replays = super().record(works)
        replays[self._which] = lambda: None
        return replays


@pytest.mark.parametrize("which", [1, 2, 3], ids=["the first loss", "the second", "both"])
def test_every_backward_is_compared(which):
    model = TwoHeads()
    _, _, said = graphed(model, StaleOnce(which))
    for step in range(WATCHED + 4):
        model(torch.randn(3, 4))[step % 2].sum().backward()
    assert ["not recorded: a gradient of a replay differs" in reason for _, reason in said] == [True]


class Rooted(nn.Module):
    """Two results that share a node; where x is 0 the slope of the second one is infinite."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        seen = self.layer(x)
        return seen, seen.abs().sqrt()


@pytest.mark.parametrize("also", [False, True], ids=["never used", "used later"])
def test_a_result_without_a_gradient_spoils_nothing(also):
    """0 x inf is nan: no gradient is something else than a gradient of zeros."""
    plain = Rooted()
    model = copy.deepcopy(plain)
    found, device, said = graphed(model)
    for step in range(WATCHED + 12):
        x = torch.zeros(3, 4) if step % 3 != 2 else torch.ones(3, 4)
        for each in (model, plain):
            left, right = each(x)
            (right if also and step % 3 == 2 and step > WATCHED + 1 else left).sum().backward()
        assert torch.isfinite(plain.layer.weight.grad).all()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad), step
    (way,) = found.ways.values()
    assert (way.ready, way.patterns) == (True, [(True, False), (False, True)][: 1 + also])
    assert device.replayed > 4
    assert any("to other results than before" in reason for _, reason in said) == also


class Lenient(Again):
    """Under a dispatch mode torch would not compile."""

    def strict(self):
        return nullcontext()


def test_a_compiled_model_with_a_result_that_nobody_uses():
    """Its backward can be gone through once only, whatever is recorded of it."""
    plain = Rooted()
    model = copy.deepcopy(plain)
    model.compile(backend="aot_eager")
    found = Graphs(model, model._compiled_call_impl, Lenient(), True, Said())
    model._compiled_call_impl = found
    for step in range(WATCHED + 4):
        for each in (model, plain):
            seen = each(torch.ones(3, 4))[step == WATCHED + 2]
            seen.sum().backward()
        assert "CompiledFunction" in type(found.call(torch.ones(3, 4))[0].grad_fn).__name__
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
    assert [way.ready for way in found.ways.values()] == [True]


def test_recordings_are_freed_at_the_end_of_a_run():
    """Not when Python next looks for things that hold each other: until then the GPU's memory would be taken."""
    model = Dropping()
    found, device, _said = warmed(model)
    (way,) = found.ways.values()
    capture, gone = weakref.ref(way.capture), weakref.ref(model)
    del way, found
    gc.disable()
    try:
        forget_recordings(model)
        assert capture() is None
        replayed = device.replayed
        model(torch.ones(3, 4)).sum().backward()  # as before the run
        assert device.replayed == replayed
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_second_backward_is_an_error():
    model = Dropping()
    warmed(model)
    y = model(torch.ones(3, 4)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(UserError, match="graph=false"):
        y.backward()


def test_parameters_that_move_are_recorded_anew():
    model = Dropping()
    found, _device, said = warmed(model)
    (way,) = found.ways.values()
    model.net[0].weight.data = model.net[0].weight.data.clone() + 1
    model(torch.ones(3, 4)).sum().backward()
    assert not way.ready
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert way.ready
    assert any("moved in memory" in reason for _, reason in said)


class Body(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.body, self.weight = forward, nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return self.body(self, x)


def replaces(model, x):
    model.count = model.count + 1
    return x * model.weight


def leaves(model, x):
    """A part of the loss, for the task to find."""
    model.aside = (x * model.weight).square().mean()
    return x * model.weight


def collects(model, x):
    if not hasattr(model, "seen"):
        model.seen = []
    model.seen.append(x)
    return x * model.weight


def hides(model, x):
    return {1, 2}, x * model.weight


UNFIT = {
    "Python that looks at the data": (lambda m, x: x * m.weight if x.sum() > 0 else m.weight + x, "synchronizing"),
    "random numbers of the host": (lambda m, x: x * m.weight * random.random(), "random numbers on the host"),
    "inputs that are changed": (lambda m, x: x.add_(1) * m.weight, "changes its inputs"),
    "a buffer that is replaced": (replaces, "replaces the buffer count"),
    "a result in an attribute": (leaves, "sets Body.aside"),
    "a result in a list": (collects, "sets Body.seen"),
    "a parameter as the result": (lambda m, x: m.weight, "one of its arguments or parameters"),
}


@pytest.mark.parametrize(("body", "words"), UNFIT.values(), ids=UNFIT.keys())
def test_what_cannot_be_recorded_runs_as_it_is(body, words):
    model = Body(body)
    _, device, said = warmed(model)
    assert device.replayed == 0
    assert [words in reason for _, reason in said] == [True]
    assert int(model.count) == (WATCHED + 3 if body is replaces else 0)  # whatever was tried left no trace
    assert len(getattr(model, "seen", [])) == (WATCHED + 3 if body is collects else 0)
    with pytest.raises(UserError, match=words):
        warmed(Body(body), required=True)


def test_hooks_and_hidden_values():
    model = Dropping()
    model.net[0].register_forward_hook(lambda *_: None)
    _, device, said = warmed(model)
    assert device.replayed == 0
    assert "has hooks" in said[0][1]
    model = Dropping()
    _, device, said = warmed(model)
    replayed, seen = device.replayed, []
    model.net[0].register_forward_hook(lambda *_: seen.append("called"))  # a replay would not
    model(torch.ones(3, 4))
    assert (seen, device.replayed) == (["called"], replayed)
    found, device, said = graphed(Body(hides))
    for _ in range(WATCHED + 3):
        found(torch.ones(2, 4))[1].sum().backward()
    assert device.replayed == 0
    assert "it returns a set" in said[0][1]
    found, device, said = graphed(Body(lambda m, x: m.weight * next(x)))
    found(iter([torch.ones(2, 4)]))
    assert "a list_iterator" in said[0][1]
    found, device, said = graphed(Body(lambda m, x: m.weight * next(x)), required=True)
    with pytest.raises(UserError, match="a list_iterator"):
        found(iter([torch.ones(2, 4)]))


@dataclass
class Memory:
    """What a model that writes word after word has read so far."""

    read: list
    length: int = 0


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x, memory):
        memory.read, memory.length = [*memory.read[-1:], x], memory.length + 1
        return self.net(sum(memory.read))


def test_a_cache_that_grows_is_not_replayed():
    """Equal results alone would not show it: what the call leaves in its arguments is missing after a replay."""
    model, x = Remembering().eval(), torch.ones(2, 4)
    _, _, said = graphed(model)
    plain, found = [], []
    with torch.no_grad():
        for results, call in ((plain, model._call_impl), (found, model)):
            for _ in range(WATCHED + 3):
                memory = Memory([])
                results += [call(x * word, memory) for word in range(3)] + [torch.tensor(memory.length)]
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert {reason for _, reason in said} == {
        "not recorded: it puts something else into its arguments (a cache, say), which a replay would not"
    }


def test_attributes_are_part_of_a_call():
    """A schedule may change them between two calls; what was recorded would know nothing of it."""
    model = Body(lambda m, x: x * m.weight * m.factor * m.table)
    model.factor, model.table = 1.0, torch.ones(4)
    found, _device, said = warmed(model)
    assert [way.ready for way in found.ways.values()] == [True]
    model.factor = 2.0
    assert torch.equal(model(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    assert [way.ready for way in found.ways.values()] == [True, False]
    model.factor, model.table = 1.0, torch.full((4,), 3.0)
    model(torch.ones(3, 4))
    assert not any(way.ready for way in found.ways.values())
    assert "has moved in memory" in said[-1][1]


def doubled(x):
    return 2 * x[:, :4]


@pytest.mark.parametrize("often", [1, 20])
def test_parts_that_are_replaced(often):
    """What was recorded would go on with the old ones."""
    plain = Dropping().eval()
    model = copy.deepcopy(plain)
    found, device, said = warmed(model)
    replayed = device.replayed
    for step in range(20):
        for each in (model, plain):
            each.zero_grad()
            if step < often:
                each.net[3].forward = doubled if step % 2 == 0 else type(each.net[3]).forward.__get__(each.net[3])
            each(torch.full((3, 4), 0.1 * step)).sum().backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), (step, name)
            assert one.grad is None or torch.equal(one.grad, other.grad), (step, name)
    (way,) = found.ways.values()
    assert way.ready == (often == 1)
    assert device.replayed > replayed
    assert "is another one" + ("" if often == 1 else ", again and again") in said[-1 if often > 1 else -2][1]


def test_what_an_evaluation_leaves_behind_spoils_nothing():
    class Noting(Dropping):
        def forward(self, x):
            if not self.training:
                self.maps = [x]
            return super().forward(x)

    model = Noting()
    _found, device, said = warmed(model)
    for _ in range(4):
        model.eval()
        with torch.no_grad():
            model(torch.ones(3, 4))
        model.train()
        replayed = device.replayed
        model(torch.ones(3, 4)).sum().backward()
        assert device.replayed > replayed
    assert not any("another one" in reason for _, reason in said)


def test_a_part_that_is_new_learns():
    plain = Dropping().eval()
    model = copy.deepcopy(plain)
    warmed(model)
    new = nn.Linear(*reversed(plain.net[0].weight.shape))
    for step in range(5):
        for each in (model, plain):
            if step == 0:
                each.net[0] = copy.deepcopy(new)
            each(torch.full((3, 4), 0.1 * step)).sum().backward()
        assert torch.equal(model.net[0].weight.grad, plain.net[0].weight.grad)


def test_a_wrong_replay_is_found_out():
    _, device, said = warmed(Body(lambda m, x: x * m.weight), Again(stale=True))
    assert "a result of a replay differs" in said[0][1]
    assert device.replayed == 2  # forward and backward, once


def test_differences():
    """Where both have no number there is none; a length is one of numbers."""
    nan, inf = float("nan"), float("inf")
    one = torch.tensor([nan, inf, 1.0, 2.0])
    assert difference([one], [one.clone()], False) is None
    assert difference([one], [torch.tensor([nan, inf, 1.0, 2.0 + 1e-6])], False) is None
    for other in (
        [0.0, inf, 1.0, 2.0],
        [nan, -inf, 1.0, 2.0],
        [nan, 1.0, 1.0, 2.0],
        [nan, inf, nan, 2.0],
        [nan, inf, 1.0, 2.1],
    ):
        assert "differs" in (difference([one], [torch.tensor(other)], False) or ""), other


def test_only_what_is_launch_bound():
    _, device, said = warmed(Dropping(), Again(seconds=1000.0))
    assert device.replayed == 0
    assert "not launch-bound" in said[0][1]
    _, device, said = warmed(Dropping(), Again(seconds=1000.0), required=True)
    assert device.replayed > 0


def test_a_few_ways_at_most(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_RECORDED", 1)
    monkeypatch.setattr(graphs, "MOST_KNOWN", 2)
    model = Dropping()
    found, _, said = graphed(model)
    for size in (2, 3, 4):
        for _ in range(WATCHED + 2):
            model(torch.ones(size, 4)).sum().backward()
    assert len(found.ways) == 2
    assert "1 ways of calling" in said[1][1]
    assert "in 2 different ways" in said[2][1]


def test_trees():
    x, y = torch.ones(2), torch.zeros(3)
    value = Seen(x, {"a": [Pair(y, None), (1, "b")], "size": x.shape})
    tensors, rest = take_apart(value)
    assert tensors == [x, y]
    back = put_together(tensors, rest)
    assert back.more["a"][0] == Pair(y, None)
    assert (back.more["a"][1], back.more["size"]) == ((1, "b"), torch.Size([2]))
    assert take_apart([1])[1] != take_apart([True])[1]
    with pytest.raises(Opaque, match="set"):
        take_apart([{1}])
