"""The task: PPO's loss over days of trading, and test episodes to score the policy by."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError, UserError
from lockstep.recipes.clstm_ppo.game import CueRecall, Game
from lockstep.recipes.clstm_ppo.market import HELD_OUT, RegimeSeries, Rules, Series, Trading
from lockstep.recipes.clstm_ppo.model import Agent, AgentShape, Variant
from lockstep.recipes.clstm_ppo.prices import PriceSeries
from lockstep.recipes.clstm_ppo.rollout import log_chances
from lockstep.recipes.clstm_ppo.source import Rollouts, Settings
from lockstep.recipes.clstm_ppo.yardsticks import Greedy, play, yardsticks
from lockstep.recipes.options import OnlyWith, warn_unused
from lockstep.task import Loss, Task

TEST_SEED = 0  # the test episodes are the same ones in every run


CPU: dict[str, Any] = {  # 120 updates: minutes on two CPU cores
    "steps": 1920,
    "global_batch": 8,
    "micro_batch": 4,
    "lr": {"peak": 1e-3},
    "evaluate": {"every": 320, "batch": 128},
    "log": {"every": 16},
    "checks": {"every": 16},
}
CUE: dict[str, Any] = {  # seconds: who remembers names the cue, who does not guesses
    "steps": 240,
    "global_batch": 64,
    "micro_batch": 32,
    "lr": {"peak": 1e-2},
    "evaluate": {"every": 80, "batch": 64},
    "log": {"every": 16},
}
CUE_TASK = {"game": "cue", "memory": 32, "rollout": 20, "test_episodes": 64}
CUE_READER = {"hidden": 8, "width": 16, "remember": 3.0}  # at 0 next to nothing of the cue is left on the last day
CPU_WINDOW = 2  # days: so few that memory is needed; with 20 of them an MLP does as well


OF_MARKET = (
    "prices", "assets", "correlation", "lots", "window", "days", "cost", "cost_warmup", "indicators", "halt",
    "foresight", "credit",
)  # fmt: skip
OF_GENERATED = ("assets", "correlation")
DAYS = ("windows", "starts", "actions", "logp", "rewards", "advantages", "targets", "moved")  # (n, T, ...) in a batch


class ClstmPpo(Task):
    """A trader with memory. `global_batch` counts environments: `task.minibatches` times as many trade at once.

    Set `micro_batch`: its size decides which environments act together, so that any number of ranks trades alike.
    """

    unit = "day"
    defaults = {
        "preset": "cpu",
        "clip": {"norm": 0.5},
        "lr": {"schedule": "linear"},
    }
    presets = {
        # Seconds, for tests: learns next to nothing.
        "tiny": {
            "steps": 24,
            "global_batch": 8,
            "micro_batch": 2,
            "lr": {"peak": 3e-3},
            "evaluate": {"every": 12, "batch": 8},
            "checks": {"every": 4},
            "task": {
                "hidden": 8, "width": 16, "memory": 16, "window": 6, "days": 30, "rollout": 12, "minibatches": 2,
                "epochs": 2, "test_episodes": 16,
            },
        },
        "cpu": {**CPU, "task": {"window": CPU_WINDOW}, "goals": ["score >= 0.58"]},  # which the control does not reach
        # The control: without memory the same windows are worth less.
        "cpu-control": {**CPU, "task": {"window": CPU_WINDOW, "variant": "mlp"}, "goals": ["score <= 0.56"]},
        "cue": {**CUE, "task": CUE_TASK | CUE_READER, "goals": ["score >= 0.95"]},
        "cue-control": {**CUE, "task": CUE_TASK | {"variant": "mlp"}, "goals": ["score <= 0.75"]},
        # Sized for minutes on one large GPU: 240 updates of 2048 environments, 31 million days.
        "gpu": {
            "steps": 3840,
            "global_batch": 512,
            "micro_batch": 512,  # with two GPUs 256: as large as fits, since a rollout is one small call after another
            "lr": {"peak": 7e-4},
            "precision": "tf32",
            "compile": False,
            "evaluate": {"every": 320, "batch": 256},
            "log": {"every": 16},
            "checks": {"every": 320},
            "checkpoint": {"every": 320},  # whole updates: the days of a rollout need not be saved
            "task": {
                "assets": 8, "hidden": 128, "width": 128, "linears": 3, "memory": 512, "window": 30, "rollout": 64,
                "entropy": 0.005, "credit": "each", "foresight": 24, "cost_warmup": 72,
            },
            "goals": ["of_bayes >= 0.85"],
        },
    }  # fmt: skip
    option_rules = (
        OnlyWith(OF_MARKET, "game", ("market",), found="a game without a market"),
        OnlyWith(OF_GENERATED, "prices", (None,), found="a file, which says what is traded"),
        OnlyWith(("correlation",), "assets", never=(1,), found="one asset, and no other for it to follow"),
        OnlyWith(("cost_warmup",), "cost", never=(0,), found="no cost that could grow"),
        OnlyWith(("hidden", "cascade", "linears"), "variant", ("clstm",), found="an agent without that stage"),
        OnlyWith(("width", "remember"), "variant", ("clstm", "lstm_only"), found="an agent without memory"),
    )

    def __init__(
        self,
        *,
        game: Literal["market", "cue"] = "market",
        variant: Variant = "clstm",
        hidden: int = 32,
        width: int = 64,
        linears: int = 1,
        cascade: int = 1,
        memory: int = 64,
        remember: float = 0.0,
        assets: int = 1,
        correlation: float = 0.0,
        lots: int = 1,
        prices: str | None = None,
        window: int = 20,
        days: int = 252,
        cost: float = 0.0005,
        cost_warmup: int = 0,
        indicators: bool = False,
        halt: float | None = None,
        rollout: int = 64,
        minibatches: int = 4,
        epochs: int = 4,
        discount: float = 0.99,
        trace: float = 0.95,
        clip: float = 0.2,
        value_weight: float = 0.5,
        entropy: float = 0.02,
        target_kl: float | None = None,
        normalise: bool = True,
        foresight: int = 0,
        credit: Literal["all", "each"] = "all",
        test_episodes: int = 256,
    ):
        """`prices` is a CSV file to trade in, in place of the generated market. `game=cue` is a test of memory in
        place of a market; its window is one day, and it has 10 of them. `credit=each` tells every asset's choice what
        that asset has earned, `all` what all have earned together: then most of what a choice hears is about others.
        `remember` is added to the bias of the gate that keeps what is remembered from day to day: at 0 it begins by
        keeping half, at 3 nineteen twentieths."""
        warn_unused(ClstmPpo, self.option_rules, locals())
        if game != "market":  # options of the market, which a preset may hold
            cost_warmup, foresight, credit = 0, 0, "all"
        self.clip, self.value_weight, self.entropy = clip, value_weight, entropy
        self.test_episodes = test_episodes
        rules = Rules(window, days, cost, lots, indicators, halt)
        series: Series = (
            PriceSeries(prices, TEST_SEED) if prices else RegimeSeries(TEST_SEED, assets, correlation=correlation)
        )
        self.game: Game = Trading(series, rules) if game == "market" else CueRecall()
        self.shape = AgentShape(
            self.game.features, self.game.window, self.game.assets, self.game.choices, self.game.days,
            variant, hidden, width, linears, cascade, memory, remember, credit == "each", foresight > 0,
        )  # fmt: skip
        settings = Settings(rollout, minibatches, epochs, discount, trace, target_kl, cost_warmup, normalise, foresight)
        self._check(settings, rules)
        self.source = Rollouts(self.game, settings)

    def model(self) -> Agent:
        return Agent(self.shape)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5, fused=True)

    def data(self) -> Rollouts:
        return self.source

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        """`batch` holds n environments, T days each: (n, T, ...). The model wants the days first."""
        days = {name: part.transpose(0, 1) for name, part in batch.items() if name in DAYS}
        logits, values, _, *expected = model(days["windows"], (batch["hidden"], batch["cell"]), days["starts"])
        chances = log_chances(logits, days["actions"])
        change = (chances if self.shape.each else chances.sum(-1)) - days["logp"]  # (T, n) or (T, n, K)
        ratio, gained = change.exp(), days["advantages"]
        gain = torch.minimum(ratio * gained, ratio.clamp(1 - self.clip, 1 + self.clip) * gained)
        off = (values.float() - days["targets"]).square()
        spread = entropy_of(logits.unsqueeze(-2) if self.shape.each else logits)
        weight = days["starts"].numel()
        assets = ratio.numel() // weight  # 1 if all are one
        total = (self.value_weight * off - gain - self.entropy * spread).sum() / assets
        if expected:  # one of the two counts, and the other is in the graph: every parameter gets a gradient
            taught = surprise(expected[0], days["moved"])
            total = 0 * (logits.sum() + values.sum()) + taught if batch["teaching"] else total + 0 * taught
        kl = ((ratio - 1) - change).detach().sum() / assets
        if not batch["teaching"]:  # which moves the policy too, and is not to be cut short by that
            self.source.note_kl(batch["block"], kl, weight)
        metrics = {
            "kl": kl,
            "clipped": ((ratio - 1).abs() > self.clip).sum() / assets,
            "entropy": spread.detach().sum() / assets,
            "value_loss": off.detach().sum() / assets,
            "reward": days["rewards"].sum() / assets,
        }
        return Loss(total, weight, metrics)

    def eval_data(self) -> TensorDataset:
        return TensorDataset(torch.arange(self.test_episodes))

    def eval_loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """The loss is what an episode lost. Every episode is played by the greedy policy, from its first day."""
        assert isinstance(model, Agent)
        played = play(Greedy(model), self.game.open(TEST_SEED, HELD_OUT + batch[0]), self.game.days)
        score = played.scores.sum()
        found: dict[str, Any] = {"score": score}
        if isinstance(self.game, Trading):
            found |= {"trades": played.trades.sum()} | {name: part.sum() for name, part in played.report().items()}
        if best := self._yardsticks.get("bayes"):
            found["of_bayes"] = score / best
        return Loss(-score, len(batch[0]), found)

    def show(self, model: nn.Module) -> str:
        """What other policies earn in the test episodes."""
        return "per test episode: " + ", ".join(f"{name} {score:.3f}" for name, score in self._yardsticks.items())

    @cached_property
    def _yardsticks(self) -> dict[str, float]:
        if isinstance(self.game, Trading):
            return yardsticks(self.game.series, self.game.rules, self.test_episodes)
        return {"guessing": 1 / self.game.choices, "remembering": 1.0}

    def _check(self, settings: Settings, rules: Rules) -> None:
        """Every wrong option at once."""
        shape = self.shape
        counts = {name: getattr(shape, name) for name in ("hidden", "width", "linears", "cascade", "memory")}
        counts |= {"window": rules.window, "days": rules.days, "lots": rules.lots}
        counts |= {"rollout": settings.days, "minibatches": settings.minibatches, "epochs": settings.epochs}
        counts |= {"test_episodes": self.test_episodes}
        problems = [
            UserError(f"task.{name}={value}", "less than 1", f"type task.{name}=1 or more")
            for name, value in counts.items()
            if value < 1
        ]
        if shape.cascade > 1 and shape.hidden % 4:
            problems.append(
                UserError(
                    f"task.hidden={shape.hidden} with task.cascade={shape.cascade}",
                    "attention in 4 heads between the LSTMs, so the size must divide by 4",
                    f"type task.hidden={-(-shape.hidden // 4) * 4}",
                )
            )
        if rules.halt is not None and not 0 < rules.halt < 1:
            problems.append(
                UserError(f"task.halt={rules.halt}", "no share of days between 0 and 1", "type task.halt=0.9")
            )
        if shape.each and shape.assets == 1:
            problems.append(
                UserError(
                    "task.credit=each", "one asset, which earns all there is", "leave it out, or type task.credit=all"
                )
            )
        series = self.game.series if isinstance(self.game, Trading) else None
        if isinstance(series, PriceSeries):
            problems += series.too_short(rules.window, rules.days)
        if problems:
            raise ConfigError(problems)


def entropy_of(logits: Tensor) -> Tensor:
    """Of the choice for all assets together, (..., K, A) -> (...)."""
    chances = logits.float().log_softmax(-1)
    return -(chances.exp() * chances).sum((-1, -2))


def surprise(expected: Tensor, moved: Tensor) -> Tensor:
    """What foresight costs, summed: for each asset whether it rose (a logit) and how far it went, (..., K, 2)."""
    rose, far = expected.float().unbind(-1)
    wrong = nn.functional.binary_cross_entropy_with_logits(rose, (moved > 0).float(), reduction="sum")
    return wrong + (far - moved.abs().float()).square().sum()
