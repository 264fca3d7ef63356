"""Captured calls: which are, how they are told apart, and that training does not notice. Without a GPU: the device here
captures nothing, and replays by running the work again. tests/gpu/test_gpu_graphs.py has the real one."""

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
from lockstep.parallel.calls.arguments import OpaqueValue, flatten, unflatten
from lockstep.parallel.calls.chain import CallChain
from lockstep.parallel.cudagraph import graphs
from lockstep.parallel.cudagraph.checks import difference
from lockstep.parallel.cudagraph.graphs import MAX_PATTERNS, WARMUP_CALLS, GraphedCall, release_captures
from lockstep.parallel.cudagraph.variants import RunLength
from lockstep.recipes.hrm import HRM

STEPS = WARMUP_CALLS + 6


class Said(list):
    def __call__(self, event, **fields):
        self.append((fields["call"], fields["reason"]))


def graphed(model, device=None, required=False):
    device, said = device or Again(), Said()
    found = GraphedCall(model, device, required, said)
    CallChain.of(model).install("graph", found)
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
    torch.manual_seed(0)  # one in 250 first weights diverges in these few steps, and nan is not equal to itself
    plain = kind()
    model = copy.deepcopy(plain)
    _found, device, said = graphed(model)
    assert train(model) == train(plain)
    assert device.replayed > STEPS
    for (name, one), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name  # also what no used result reaches
    assert all(reason.startswith("captured") for _, reason in said)
    assert copy.deepcopy(model)._compiled_call_impl is None  # a copy is a plain model


def test_a_run_of_a_recipe(tmp_path, monkeypatch):
    """Six micro-batches a step, states that go from step to step, and evaluations: to the last bit."""
    values = {"preset": "tiny", "steps": 6, "evaluate.every": 3, "device": "cpu", "log.progress": "off"}
    plain = lockstep.fit(HRM, values, run_dir=tmp_path / "plain")
    monkeypatch.setattr(graphs, "wants_graph", lambda config, runtime: True)
    monkeypatch.setattr(graphs, "CudaDevice", lambda device: Again())
    made, init = [], GraphedCall.__init__
    monkeypatch.setattr(GraphedCall, "__init__", lambda self, *args: made.append(self) or init(self, *args))
    found = lockstep.fit(HRM, values, run_dir=tmp_path / "graph")
    assert all(torch.equal(plain.weights[name], found.weights[name]) for name in plain.weights)
    events = [event for event in read_jsonl(tmp_path / "graph" / "events.jsonl") if event["event"] == "graph"]
    assert [event["reason"].split(",")[0] for event in events] == ["captured"]
    assert plain.summary["eval_loss"] == found.summary["eval_loss"]
    assert len(made) == 1
    assert not made[0].variants  # the run has freed them


def test_every_variant_has_its_own_capture():
    model = Dropping()
    found, _device, _said = graphed(model)
    for size in (2, 3):
        train_once = [model(torch.ones(size, 4)).sum().backward() for _ in range(WARMUP_CALLS + 2)]
        assert len(train_once) == WARMUP_CALLS + 2
    with torch.no_grad():
        for _ in range(WARMUP_CALLS + 2):
            model(torch.ones(2, 4))
    model.net[2].eval()  # a part of it
    model(torch.ones(2, 4))
    assert [variant.ready for variant in found.variants.values()] == [True, True, True, False]


def warmed(model, device=None, calls=WARMUP_CALLS + 3, inputs=None, required=False):
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
    for step in range(WARMUP_CALLS + 6):
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
    """Seven of eight losses come late, one after the other: the call stays a captured one, and what must be captured is
    not refused in the midst of a run."""
    plain = ManyHeads()
    model = copy.deepcopy(plain)
    found, device, _said = graphed(model, required=True)
    for step in range(60):
        for each in (model, plain):
            each.zero_grad()
            each(torch.ones(3, 4))[max(0, step // 5 - 3) % 8].sum().backward()
        assert all(_same(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    (variant,) = found.variants.values()
    assert (variant.ready, len(variant.patterns)) == (True, MAX_PATTERNS)
    assert device.replayed > 60


def _same(one, other):
    return (one is None and other is None) or torch.equal(one, other)


class StaleOnce(Again):
    """Of what was captured, one piece is not done again."""

    def __init__(self, which):
        super().__init__()
        self._which = which

    def capture(self, works):
        replays = super().capture(works)
        replays[self._which] = lambda: None
        return replays


@pytest.mark.parametrize("which", [1, 2, 3], ids=["the first loss", "the second", "both"])
def test_every_backward_is_compared(which):
    model = TwoHeads()
    _, _, said = graphed(model, StaleOnce(which))
    for step in range(WARMUP_CALLS + 4):
        model(torch.randn(3, 4))[step % 2].sum().backward()
    assert ["not captured: a gradient of a replay differs" in reason for _, reason in said] == [True]


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
    """0 x inf is nan: no gradient is something other than a gradient of zeros."""
    plain = Rooted()
    model = copy.deepcopy(plain)
    found, device, said = graphed(model)
    for step in range(WARMUP_CALLS + 12):
        x = torch.zeros(3, 4) if step % 3 != 2 else torch.ones(3, 4)
        for each in (model, plain):
            left, right = each(x)
            (right if also and step % 3 == 2 and step > WARMUP_CALLS + 1 else left).sum().backward()
        assert torch.isfinite(plain.layer.weight.grad).all()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad), step
    (variant,) = found.variants.values()
    assert (variant.ready, variant.patterns) == (True, [(True, False), (False, True)][: 1 + also])
    assert device.replayed > 4
    assert any("other results than before" in reason for _, reason in said) == also


class Lenient(Again):
    """Under a dispatch mode torch would not compile."""

    def forbid_sync(self):
        return nullcontext()


def test_a_compiled_model_with_a_result_that_nobody_uses():
    """Its backward can be gone through once only, whatever is captured of it."""
    plain = Rooted()
    model = copy.deepcopy(plain)
    model.compile(backend="aot_eager")
    found = GraphedCall(model, Lenient(), True, Said())
    CallChain.of(model).install("graph", found)
    for step in range(WARMUP_CALLS + 4):
        for each in (model, plain):
            seen = each(torch.ones(3, 4))[step == WARMUP_CALLS + 2]
            seen.sum().backward()
        assert "CompiledFunction" in type(found.inner(torch.ones(3, 4))[0].grad_fn).__name__
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
    assert [variant.ready for variant in found.variants.values()] == [True]


def test_captures_are_freed_at_the_end_of_a_run():
    """Not when Python next looks for things that hold each other: until then the GPU's memory would be taken."""
    model = Dropping()
    found, device, _said = warmed(model)
    (variant,) = found.variants.values()
    capture, gone = weakref.ref(variant.capture), weakref.ref(model)
    del variant, found
    gc.disable()
    try:
        release_captures(model)
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


def penalised(model, x):
    """A gradient penalty: the loss depends on a gradient."""
    x.requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    return y.sum() + (slope.norm(dim=1) - 1).square().sum()


def kept_for_later(model, x):
    """Two backwards through one forward."""
    y = model(x)
    y.sum().backward(retain_graph=True)
    return y.square().sum()


@pytest.mark.parametrize(("loss", "why"), [(penalised, "differentiated again"), (kept_for_later, "runs twice")])
def test_what_a_replayed_backward_cannot_do_runs_plainly(loss, why):
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = copy.deepcopy(plain)
    _found, device, said = graphed(model)
    for step in range(STEPS):
        for one in (model, plain):
            one.zero_grad()
            loss(one, torch.full((3, 4), 0.1 * step)).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
    assert device.replayed == 0
    assert [why in reason for _, reason in said] == [True]


def test_a_penalty_that_begins_late_is_an_error():
    """Torch's `once_differentiable` would let the penalty count as zero."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    _found, device, _said = graphed(model)
    for _ in range(STEPS):
        model(torch.ones(3, 4).requires_grad_()).sum().backward()
    assert device.replayed > 0
    with pytest.raises(UserError, match="create_graph=True") as caught:
        penalised(model, torch.ones(3, 4))
    assert "graph=false" in str(caught.value)


def test_parameters_that_move_are_captured_again():
    model = Dropping()
    found, _device, said = warmed(model)
    (variant,) = found.variants.values()
    model.net[0].weight.data = model.net[0].weight.data.clone() + 1
    model(torch.ones(3, 4)).sum().backward()
    assert not variant.ready
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert variant.ready
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
def test_what_cannot_be_captured_runs_as_it_is(body, words):
    model = Body(body)
    _, device, said = warmed(model)
    assert device.replayed == 0
    assert [words in reason for _, reason in said] == [True]
    assert int(model.count) == (WARMUP_CALLS + 3 if body is replaces else 0)  # whatever was tried left no trace
    assert len(getattr(model, "seen", [])) == (WARMUP_CALLS + 3 if body is collects else 0)
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
    for _ in range(WARMUP_CALLS + 3):
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
            for _ in range(WARMUP_CALLS + 3):
                memory = Memory([])
                results += [call(x * word, memory) for word in range(3)] + [torch.tensor(memory.length)]
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert {reason for _, reason in said} == {
        "not captured: it changes the content of its arguments (a cache, for example), which a replay would not"
    }


def test_attributes_are_part_of_a_call():
    """A schedule may change them between two calls; what was captured would know nothing of it."""
    model = Body(lambda m, x: x * m.weight * m.factor * m.table)
    model.factor, model.table = 1.0, torch.ones(4)
    found, _device, said = warmed(model)
    assert [variant.ready for variant in found.variants.values()] == [True]
    model.factor = 2.0
    assert torch.equal(model(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    assert [variant.ready for variant in found.variants.values()] == [True, False]
    model.factor, model.table = 1.0, torch.full((4,), 3.0)
    model(torch.ones(3, 4))
    assert not any(variant.ready for variant in found.variants.values())
    assert "has moved in memory" in said[-1][1]


def doubled(x):
    return 2 * x[:, :4]


@pytest.mark.parametrize("often", [1, 20])
def test_parts_that_are_replaced(often):
    """What was captured would go on with the old ones."""
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
    (variant,) = found.variants.values()
    assert variant.ready == (often == 1)
    assert device.replayed > replayed
    assert "was replaced" + ("" if often == 1 else ", again and again") in said[-1 if often > 1 else -2][1]


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
    assert not any("was replaced" in reason for _, reason in said)


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


class Asking(nn.Module):
    """Waits for the device unless it is captured, as models of transformers do with their masks."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        if not torch.cuda.is_current_stream_capturing() and bool(x.isnan().all()):
            raise ValueError("no numbers")
        return self.net(x)


def test_a_model_may_ask_whether_it_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a build for CPUs cannot answer
    _, device, said = warmed(Asking())
    assert device.replayed > 0
    assert said[0][1].startswith("captured")
    assert not torch.cuda.is_current_stream_capturing()


def test_a_few_ways_at_most(monkeypatch):
    monkeypatch.setattr(graphs, "FEW_CAPTURES", 1)
    monkeypatch.setattr(graphs, "MAX_VARIANTS", 2)
    model = Dropping()
    found, _, said = graphed(model)
    for size in (2, 3, 4):
        for _ in range(WARMUP_CALLS + 2):
            model(torch.ones(size, 4)).sum().backward()
    assert len(found.variants) == 2
    assert "1 captures of other variants take 25% of the device's memory" in said[1][1]
    assert "in 2 different ways" in said[2][1]


def test_more_than_a_few_captures_where_memory_allows(monkeypatch):
    monkeypatch.setattr(graphs, "FEW_CAPTURES", 1)
    model = Dropping()
    found, device, _ = graphed(model)
    device.memory = 100.0
    for size in (2, 3, 4):
        for _ in range(WARMUP_CALLS + 2):
            model(torch.ones(size, 4)).sum().backward()
    assert sum(variant.ready for variant in found.variants.values()) == 3


def test_a_capture_must_pay_in_the_rest_of_the_run():
    """With two steps left it does not. Then the run is made longer, and it does."""
    model, length = Dropping(), RunLength(steps_left=10**6)
    found = GraphedCall(model, Again(), False, Said(), length)
    CallChain.of(model).install("graph", found)
    for step in range(3 * WARMUP_CALLS):
        length.steps_done += 1
        length.steps_left = 2 if step < 2 * WARMUP_CALLS else 10**6
        model(torch.ones(3, 4)).sum().backward()
        ready = [variant.ready for variant in found.variants.values()]
        assert ready == [step > 2 * WARMUP_CALLS], step


def test_a_call_that_was_replayed_often_is_captured_again_at_once():
    model, length = Dropping(), RunLength(steps_left=10**6)
    found = GraphedCall(model, Again(), False, Said(), length)
    CallChain.of(model).install("graph", found)

    def train(steps: int) -> bool:
        for _ in range(steps):
            length.steps_done += 1
            model(torch.ones(3, 4)).sum().backward()
        (variant,) = found.variants.values()
        return variant.ready

    assert train(200)
    length.steps_left = 100
    found._capture_s = None  # what a capture takes is estimated, not measured
    model.net[0].weight.data = model.net[0].weight.data.clone()
    assert not train(1)
    assert train(2)


def test_trees():
    x, y = torch.ones(2), torch.zeros(3)
    value = Seen(x, {"a": [Pair(y, None), (1, "b")], "size": x.shape})
    tensors, rest = flatten(value)
    assert tensors == [x, y]
    back = unflatten(tensors, rest)
    assert back.more["a"][0] == Pair(y, None)
    assert (back.more["a"][1], back.more["size"]) == ((1, "b"), torch.Size([2]))
    assert flatten([1])[1] != flatten([True])[1]
    with pytest.raises(OpaqueValue, match="set"):
        flatten([{1}])


class Forces(nn.Module):
    """Energies and their derivative: the forward makes its argument require a gradient."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        x.requires_grad_()
        energy = self.net(x).square().sum(-1)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


def test_an_argument_that_the_forward_makes_differentiable():
    plain = Forces()
    model = copy.deepcopy(plain)
    _, device, _ = graphed(model, required=True)
    for step in range(STEPS):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for each in (plain, model):
            each.zero_grad()
            energy, force = each(x.clone())
            (energy.sum() + force.square().sum()).backward()
        assert torch.equal(plain.net.weight.grad, model.net.weight.grad)
    assert device.replayed
