"""Rounding at random: right on average, the same for an element wherever it lies; and what it is good for."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.optim.bf16_masters import MasterWeights, round_stochastically, rounding_key

STEP = 2.0**-7  # from 1 to the next bfloat16


def rounded(value: float, count: int, step: int = 0) -> torch.Tensor:
    places = torch.arange(count, dtype=torch.int32)
    return round_stochastically(torch.full((count,), value), places, rounding_key(0, step, "weight")).float()


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_of_many_roundings_is_the_number(share, sign):
    count = 100_000
    found = rounded(sign * (1 + share * STEP), count)
    assert set(found.tolist()) == {sign, sign * (1 + STEP)}
    deviation = STEP * (share * (1 - share) / count) ** 0.5
    assert abs(found.double().mean().item() - sign * (1 + share * STEP)) < 4 * deviation
    nearest = torch.full((count,), sign * (1 + share * STEP)).bfloat16().double().mean().item()
    assert abs(nearest - sign * (1 + share * STEP)) > 4 * deviation  # all of them fall on one side


def test_neighbours_and_steps_are_independent():
    one, two = rounded(1 + STEP / 2, 100_000) > 1, rounded(1 + STEP / 2, 100_000, step=1) > 1
    other = round_stochastically(
        torch.full((100_000,), 1 + STEP / 2), torch.arange(100_000, dtype=torch.int32), rounding_key(0, 0, "bias")
    )
    for first, second in ((one[1:], one[:-1]), (one, two), (one, other.float() > 1)):
        assert (first & second).double().mean().item() == pytest.approx(0.25, abs=0.01)


def test_what_needs_no_rounding_stays():
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), -float("inf"), 2.0**-120])
    for step in range(20):
        found = round_stochastically(exact, torch.arange(7, dtype=torch.int32), rounding_key(0, step, "x"))
        assert torch.equal(found.float(), exact)
    assert round_stochastically(torch.tensor([float("nan")]), torch.zeros(1, dtype=torch.int32), 5).isnan().all()


def small_updates(way: str | None) -> torch.Tensor:
    """Weights of 1 in bfloat16 after 200 updates by -1e-4, which is far below what bfloat16 can add to 1."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    masters = MasterWeights([optimizer], model, way, seed=0) if way else None
    for step in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        masters.step_optimizer(optimizer, None, step) if masters else optimizer.step()
    return model.weight.detach().double()


@pytest.mark.parametrize("way", ["master", "stochastic", "compensated"])
def test_small_updates_are_not_lost(way):
    assert torch.equal(small_updates(None), torch.ones(64, 64).double()), "the control must stall"
    found = small_updates(way)
    assert found.mean().item() == pytest.approx(1 - 200 * 1e-4, abs=5e-4 if way == "stochastic" else STEP / 2)
    assert found.max() < 1.0 if way != "stochastic" else found.std() > 0


def test_masters_give_their_memory_back():
    model = nn.Linear(64, 64).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = MasterWeights([optimizer], model, "stochastic", seed=0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    masters.step_optimizer(optimizer, torch.tensor(2.0), 0)
    for master in optimizer.param_groups[0]["params"]:
        assert master.untyped_storage().nbytes() == 0
        assert master.grad is None


def test_every_step_draws_other_random_bits(tmp_path, monkeypatch):
    """The same bits in every step would round an element up always or never, and small updates would be lost."""
    drawn = []

    def recorded(seed, number, name):
        drawn.append(number)
        return rounding_key(seed, number, name)

    monkeypatch.setattr("lockstep.optim.bf16_masters.rounding_key", recorded)
    values = {"precision": "bf16-pure-stochastic", "device": "cpu", "log": {"progress": "off"}}
    lockstep.fit(Line(), steps=3, run_dir=tmp_path / "run", **values)
    assert sorted(set(drawn)) == [1, 2, 3]


class Line(lockstep.Task):
    defaults = {"global_batch": 4}

    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self):
        return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))

    def loss(self, model, batch):
        x, y = batch
        return lockstep.Loss(((model(x) - y) ** 2).sum(), len(x))
