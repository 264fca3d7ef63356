"""Trading on the device: the ways that are quick there give what the plain ones give, and the host never waits."""

import pytest
import torch

from lockstep.recipes.clstm_ppo.market import Rules, VectorMarket
from lockstep.recipes.clstm_ppo.model import Agent, AgentShape, read_daily
from lockstep.recipes.clstm_ppo.rollout import sampled
from lockstep.recipes.clstm_ppo.series import RegimeSeries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def agent(episode=50):
    torch.manual_seed(0)
    return Agent(
        AgentShape(features=16, window=30, assets=8, choices=3, episode=episode, hidden=32, width=64, memory=128)
    ).cuda()


def test_days_at_once_are_the_days_one_by_one():
    it = agent(episode=50)
    seen = torch.randn(128, 16, 64, device="cuda", requires_grad=True)
    state = torch.randn(2, 16, 128, device="cuda").unbind(0)
    begun = torch.arange(16, device="cuda") * 3
    starts = torch.stack([(begun + day) % 50 == 0 for day in range(128)])
    found = []
    for way in (it.recall_daily, it.recall_at_once):
        out, _ = way(seen, state, starts)
        found.append([out, *torch.autograd.grad(out.square().sum(), [seen, *it.recall.parameters()])])
    for one_by_one, at_once in zip(*found, strict=True):
        assert (at_once - one_by_one).abs().max() < 1e-5 * one_by_one.abs().max()


def test_windows_are_read_as_cudnn_reads_them():
    lstm, windows = agent().look.lstms[0], torch.randn(64, 30, 16, device="cuda")
    torch.testing.assert_close(torch.stack(read_daily(lstm, windows), dim=1), lstm(windows)[0], rtol=0, atol=1e-5)


def test_a_day_of_trading_never_waits_for_the_device():
    it, envs = agent(), torch.arange(64, device="cuda")
    market = VectorMarket(RegimeSeries(0, assets=8), Rules(window=30, days=20), envs, stagger=True)
    drawn, state = torch.rand(64, 8, dtype=torch.float64, device="cuda"), it.initial_state(64, envs.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            with torch.no_grad():
                logits, _, state = it(market.windows()[None], state, (market.day == 0)[None])
            market.step(sampled(logits[0], drawn))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert market.episode.tolist() == [1] * 64
