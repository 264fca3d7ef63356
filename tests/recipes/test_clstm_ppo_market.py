"""The markets of the trading recipe: the generated one, and prices from a file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from gymnasium.utils.env_checker import check_env
from small_trader import attached, tiny

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo.baselines import baseline_scores
from lockstep.recipes.clstm_ppo.gym_env import RegimeMarket
from lockstep.recipes.clstm_ppo.market import REWARD_SCALE, Rules, VectorMarket, indicators
from lockstep.recipes.clstm_ppo.series import HELD_OUT, PriceSeries, RegimeSeries, read_prices

# ---- the market -----------------------------------------------------------------------------------------


def test_a_day_earns_its_return_less_the_cost_of_turning():
    market = VectorMarket(RegimeSeries(0, assets=2), Rules(window=3, days=5, cost=0.01), torch.arange(4))
    before = market.returns.clone()
    first, _ = market.step(torch.tensor([[2, 0]] * 4))
    torch.testing.assert_close(first, (before[:, 3, 0] - before[:, 3, 1] - 2 * 0.01) / 2)
    second, _ = market.step(torch.tensor([[0, 0]] * 4))
    torch.testing.assert_close(second, (-before[:, 4, 0] - before[:, 4, 1] - 2 * 0.01) / 2)
    seen = market.windows()
    torch.testing.assert_close(seen[:, :, :2].double(), before[:, 2:5] / 0.01, rtol=1e-5, atol=1e-5)
    assert (seen[:, :, 2:] == -1).all()


def test_after_the_last_day_a_new_episode_begins():
    market = VectorMarket(RegimeSeries(0), Rules(window=3, days=2), torch.arange(3))
    before = market.returns.clone()
    ended = [market.step(torch.full((3, 1), 2))[1].tolist() for _ in range(3)]
    assert ended == [[False] * 3, [True] * 3, [False] * 3]
    assert market.episode.tolist() == [1] * 3
    assert market.day.tolist() == [1] * 3
    assert not (market.returns == before).any()


def test_episodes_end_without_synchronisation():
    """Over more than two staggered episodes, every day has the returns of each environment's own series."""
    series, rules = RegimeSeries(0, assets=2), Rules(window=3, days=5, cost=0.0)
    market = VectorMarket(series, rules, torch.arange(8), stagger=True)
    for number in range(14):
        if number == 7:
            market.renew()
        episode, day = market.episode.clone(), market.day.clone()
        earned, ended = market.step(torch.full((8, 2), 2))
        own = series.draw(market.envs, episode, 8)[torch.arange(8), 3 + day]
        torch.testing.assert_close(earned, own.mean(dim=1))
        assert torch.equal(ended, day == 4)
        assert torch.equal(market.episode, episode + ended)
        assert torch.equal(market.position == 0, ended[:, None].expand(-1, 2))
    assert market.episode.min() >= 2


def test_trading_halts_after_a_turbulent_day():
    series, rules = RegimeSeries(0, assets=4, correlation=0.3), Rules(window=3, days=60, halt=0.9)
    market = VectorMarket(series, rules, torch.arange(200))
    returns = market.returns
    halts = series.turbulence(0.9).halted(returns)
    assert abs(halts[:, 1:].double().mean() - 0.1) < 0.02  # on other days than those the limit was fitted to
    wild = torch.linalg.vector_norm(returns, dim=-1)
    assert wild[:, :-1][halts[:, 1:]].mean() > 1.3 * wild[:, :-1][~halts[:, 1:]].mean()
    for day in range(6):
        before, actions = market.position.clone(), torch.full((200, 4), 2 * (day % 2))
        market.step(actions)
        stopped = halts[:, 3 + day]
        assert torch.equal(market.position[stopped], before[stopped])
        assert torch.equal(market.position[~stopped], rules.positions(actions)[~stopped])


def test_assets_move_together_by_their_correlation():
    envs = torch.arange(200)
    for wanted in (0.0, 0.5):
        series = RegimeSeries(0, assets=2, drift=0.0, correlation=wanted)
        drawn = series.draw(envs, torch.zeros_like(envs), 50).flatten(0, 1)
        assert abs(torch.corrcoef(drawn.T)[0, 1] - wanted) < 0.05
        assert abs(drawn.std() / series.volatility - 1) < 0.05


def test_policies_rank_as_they_should():
    found = baseline_scores(RegimeSeries(0), Rules(), 32)
    assert found["oracle"] > found["bayes"] + 0.2 > 0.6
    assert found["bayes"] > max(found["hold"], found["random"]) + 0.3


def test_it_is_a_gymnasium_environment_that_pays_what_the_market_pays():
    rules = Rules(window=4, days=6)
    env = RegimeMarket(RegimeSeries(0, assets=2), rules)
    with pytest.warns(UserWarning, match="infinity"):  # returns have no bounds; there is no other warning
        check_env(env, skip_render_check=True)
    seen, _ = env.reset(seed=5)
    market = VectorMarket(RegimeSeries(0, assets=2), rules, torch.tensor([5]))
    assert (torch.as_tensor(seen) == market.windows()[0]).all()
    assert all(env.reset()[1]["env"] < HELD_OUT for _ in range(20))  # half of all numbers would be for tests
    env.reset(seed=5)
    _, reward, ended, _, _ = env.step([2, 1])
    assert reward == float(market.step(torch.tensor([[2, 1]]))[0][0]) * REWARD_SCALE
    for _ in range(5):
        *_, ended, _, _ = env.step([0, 0])
    assert ended


def test_indicators_distinguish_a_rise_from_a_fall():
    rise = torch.full((1, 60, 1), 0.01) + 0.001 * torch.randn(1, 60, 1, generator=torch.Generator().manual_seed(0))
    for up, down in zip(indicators(rise)[:3], indicators(-rise)[:3], strict=True):
        assert up[0, -1, 0] > 0.1 > -0.1 > down[0, -1, 0]
    assert Rules(indicators=True).features(2) == 2 * 6
    task = tiny(indicators=True)
    assert attached(task, task.model()).take().num_micro_batches == 4


# ---- prices from a file ---------------------------------------------------------------------------------


def write_prices(path: Path, days: int) -> torch.Tensor:
    """Write two symbols of the generated market, of which the second lacks a day. Returns the closes."""
    series = RegimeSeries(3, assets=2).draw(torch.tensor([0]), torch.tensor([0]), days)[0]
    closes = 50 * series.cumsum(dim=0).exp()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["date", "symbol", "open", "high", "low", "close", "volume"])
        for day, prices in enumerate(closes.tolist()):
            for symbol, close in zip(("AAA", "BBB"), prices, strict=True):
                if (symbol, day) != ("BBB", 7):
                    writer.writerow(
                        [f"2020-{day // 28 + 1:02}-{day % 28 + 1:02}", symbol, close, close, close, close, 9]
                    )
    return closes


def test_prices_from_a_file(tmp_path):
    path = tmp_path / "prices.csv"
    closes = write_prices(path, 300)
    complete = torch.cat([closes[:7], closes[8:]])
    torch.testing.assert_close(read_prices(path), complete)
    task = tiny(prices=str(path))
    assert attached(task, task.model()).take().num_micro_batches == 4
    envs = torch.tensor([0, 1, 2, HELD_OUT, HELD_OUT + 1])
    returns = complete.log().diff(dim=0)
    for env, drawn in zip(envs.tolist(), PriceSeries(str(path)).draw(envs, torch.zeros_like(envs), 36), strict=True):
        first = next(day for day in range(len(returns)) if torch.allclose(returns[day : day + 1], drawn[:1]))
        torch.testing.assert_close(returns[first : first + 36], drawn)
        split = round(len(returns) * 0.8)
        assert first >= split if env >= HELD_OUT else first + 36 <= split


def test_the_scale_of_prices_does_not_depend_on_the_days_for_tests(tmp_path):
    path = tmp_path / "prices.csv"
    closes = write_prices(path, 100)
    before = PriceSeries(str(path)).scale
    lines = path.read_text().splitlines()
    late = [line.split(",") for line in lines[-6:]]
    path.write_text("\n".join(lines[:-6] + [",".join([*row[:5], str(float(row[5]) * 9), "9"]) for row in late]))
    assert not torch.allclose(read_prices(path)[-3:], closes[-3:])
    assert PriceSeries(str(path)).scale == before


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("date,price\n2020-01-01,3\n", "no column 'close'"),
        ("date,symbol,close\n2020-01-01,A,-3\n", "'-3' in line 2"),
        ("date,symbol,close\n2020-01-01,A,3\n", "1 days"),
        ("date,symbol,close\n2020-01-01,A,3\n2020-01-01,B,5\n2020-01-01,A,4\n", "close 4.0 in line 4, after 3.0"),
    ],
)
def test_a_file_without_valid_prices_is_refused(tmp_path, text, word):
    (tmp_path / "prices.csv").write_text(text)
    with pytest.raises(UserError, match=word):
        read_prices(tmp_path / "prices.csv")


def test_prices_that_are_too_few_or_missing_are_reported_with_a_fix(tmp_path):
    write_prices(tmp_path / "prices.csv", 100)
    with pytest.raises(UserError, match=r"task.window=6, task.days=30.*\n.*\n.*set task.days=14 or less"):
        tiny(prices=str(tmp_path / "prices.csv"))
    tiny(prices=str(tmp_path / "prices.csv"), days=14)
    with pytest.raises(UserError, match="does not exist"):
        tiny(prices=str(tmp_path / "none.csv"))
