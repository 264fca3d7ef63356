"""The task: PPO's loss over days of trading, and test episodes to score the policy with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo.baselines import Greedy, Played, baseline_scores, play
from lockstep.recipes.clstm_ppo.game import CueRecall
from lockstep.recipes.clstm_ppo.market import Game, Rules, Trading
from lockstep.recipes.clstm_ppo.model import ATTENTION_HEADS, Agent, AgentOptions, AgentShape
from lockstep.recipes.clstm_ppo.rollout import log_probs
from lockstep.recipes.clstm_ppo.series import HELD_OUT, PriceSeries, RegimeSeries
from lockstep.recipes.clstm_ppo.source import RolloutOptions, Rollouts
from lockstep.recipes.options import OnlyWith, check_options, takes_options, warn_unused
from lockstep.task import Loss, Task

# The test episodes are the same in every run.
TEST_SEED = 0

# 120 updates: minutes on two CPU cores.
CPU: dict[str, Any] = {
    "steps": 1920,
    "global_batch": 8,
    "micro_batch": 4,
    "lr": {"peak": 1e-3},
    "evaluate": {"every": 320, "batch": 128},
    "log": {"every": 16},
    "checks": {"every": 16},
}

# Two days show so little that memory is needed; with a window of 20 days an MLP does equally well.
CPU_WINDOW = 2

# Takes seconds. An agent with memory names the cue; one without guesses.
CUE: dict[str, Any] = {
    "steps": 240,
    "global_batch": 64,
    "micro_batch": 32,
    "lr": {"peak": 1e-2},
    "evaluate": {"every": 80, "batch": 64},
    "log": {"every": 16},
}
CUE_TASK = {"game": "cue", "memory": 32, "rollout": 20, "test_episodes": 64}

PRESETS: dict[str, dict[str, Any]] = {
    # Seconds, for tests: it learns next to nothing.
    "tiny": {
        "steps": 24,
        "global_batch": 8,
        "micro_batch": 2,
        "lr": {"peak": 3e-3},
        "evaluate": {"every": 12, "batch": 8},
        "checks": {"every": 4},
        "task": {
            "hidden": 8,
            "width": 16,
            "memory": 16,
            "window": 6,
            "days": 30,
            "rollout": 12,
            "minibatches": 2,
            "epochs": 2,
            "test_episodes": 16,
        },
    },
    # Its goal is out of reach of the control, which sees the same windows and has no memory.
    "cpu": {**CPU, "task": {"window": CPU_WINDOW}, "goals": ["score >= 0.58"]},
    "cpu-control": {**CPU, "task": {"window": CPU_WINDOW, "variant": "mlp"}, "goals": ["score <= 0.56"]},
    # With remember=0 next to nothing of the cue would be left on the last day.
    "cue": {**CUE, "task": {**CUE_TASK, "hidden": 8, "width": 16, "remember": 3.0}, "goals": ["score >= 0.95"]},
    "cue-control": {**CUE, "task": {**CUE_TASK, "variant": "mlp"}, "goals": ["score <= 0.75"]},
    # Minutes on one large GPU: 240 updates of 2048 environments, 31 million days.
    "gpu": {
        "steps": 3840,
        "global_batch": 512,
        # As large as fits (256 on two GPUs), since a rollout is one small call after another.
        "micro_batch": 512,
        "lr": {"peak": 7e-4},
        "precision": "tf32",
        "compile": False,
        "evaluate": {"every": 320, "batch": 256},
        "log": {"every": 16},
        "checks": {"every": 320},
        # Whole updates: the days of a rollout need not be saved.
        "checkpoint": {"every": 320},
        "task": {
            "assets": 8,
            "hidden": 128,
            "width": 128,
            "linears": 3,
            "memory": 512,
            "window": 30,
            "rollout": 64,
            "entropy": 0.005,
            "credit": "each",
            "foresight": 24,
            "cost_warmup": 72,
        },
        "goals": ["of_bayes >= 0.85"],
    },
}

MARKET_OPTIONS = (
    "prices", "assets", "correlation", "lots", "window", "days", "cost", "cost_warmup", "indicators", "halt",
    "foresight", "credit",
)  # fmt: skip

# The smallest values of options that count something.
COUNTS = {
    "hidden": 1, "width": 1, "linears": 1, "cascade": 1, "memory": 1, "window": 1, "days": 1, "lots": 1, "rollout": 1,
    "minibatches": 1, "epochs": 1, "test_episodes": 1,
}  # fmt: skip

# Parts of a batch with the shape (n, T, ...).
DAILY = ("windows", "starts", "actions", "logp", "rewards", "advantages", "targets", "moved")


@dataclass(frozen=True)
class GameOptions:
    # `cue` is a test of memory in place of a market: its window is one day, and an episode has 10 of them.
    game: Literal["market", "cue"] = "market"

    # A CSV file to trade in, in place of the generated market.
    prices: str | None = None

    # Assets of the generated market.
    assets: int = 1

    # Correlation of the noise of any two of them.
    correlation: float = 0.0

    # Held-out episodes of an evaluation.
    test_episodes: int = 256

    def make(self, rules: Rules) -> Game:
        if self.game == "cue":
            return CueRecall()
        if self.prices:
            return Trading(PriceSeries(self.prices, TEST_SEED), rules)
        return Trading(RegimeSeries(TEST_SEED, self.assets, correlation=self.correlation), rules)


@dataclass(frozen=True)
class LossOptions:
    # How far the ratio of the new policy to the old one may move from 1 and still be rewarded.
    clip: float = 0.2

    # Weight of the squared error of the value.
    value_weight: float = 0.5

    # Weight of the entropy of the policy, which keeps it exploring.
    entropy: float = 0.02

    # With `each`, the choice for an asset is judged by what that asset earned. With `all`, every choice is judged by
    # what all assets earned together, which is mostly due to the other choices.
    credit: Literal["all", "each"] = "all"


class ClstmPpo(Task):
    """A trader with memory. `global_batch` counts environments; `task.minibatches` times as many trade at once.

    Set `micro_batch`: it decides which environments act together, so that the number of ranks makes no difference.
    """

    unit = "day"
    defaults = {
        "preset": "cpu",
        "clip": {"norm": 0.5},
        "lr": {"schedule": "linear"},
    }
    presets = PRESETS
    option_rules = (
        OnlyWith(MARKET_OPTIONS, "game", ("market",), found="a game without a market"),
        OnlyWith(("assets", "correlation"), "prices", (None,), found="a file, which says what is traded"),
        OnlyWith(("correlation",), "assets", never=(1,), found="one asset, and no other for it to follow"),
        OnlyWith(("cost_warmup",), "cost", never=(0,), found="no cost that could grow"),
        OnlyWith(("hidden", "cascade", "linears"), "variant", ("clstm",), found="an agent without that stage"),
        OnlyWith(("width", "remember"), "variant", ("clstm", "lstm_only"), found="an agent without memory"),
    )

    @takes_options(GameOptions, Rules, AgentOptions, RolloutOptions, LossOptions)
    def __init__(
        self, game: GameOptions, rules: Rules, agent: AgentOptions, rollouts: RolloutOptions, loss: LossOptions
    ):
        options = vars(game) | vars(rules) | vars(agent) | vars(rollouts) | vars(loss)
        warn_unused(ClstmPpo, self.option_rules, options)

        # Options of the market, which a preset may hold.
        if game.game != "market":
            rollouts = replace(rollouts, cost_warmup=0, foresight=0)
            loss = replace(loss, credit="all")

        self.loss_options = loss
        self.test_episodes = game.test_episodes

        # The game decides the sizes of what the agent sees and chooses.
        self.game = game.make(rules)
        self.shape = AgentShape(
            **vars(agent),
            **vars(self.game.shape),
            value_per_asset=loss.credit == "each",
            foresight=rollouts.foresight > 0,
        )
        check_options(options, self._problems(rules), smallest=COUNTS)
        self.source = Rollouts(self.game, rollouts)

    def model(self) -> Agent:
        return Agent(self.shape)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # The eps is the usual one of PPO: its gradients are small.
        return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5, fused=True)

    def data(self) -> Rollouts:
        return self.source

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        """Return PPO's loss of `batch`: n environments with T days each, (n, T, ...)."""
        options, per_asset = self.loss_options, self.shape.value_per_asset

        # The model wants the days first: (T, n, ...).
        days = {name: part.transpose(0, 1) for name, part in batch.items() if name in DAILY}
        logits, values, _, *predicted = model(days["windows"], (batch["hidden"], batch["cell"]), days["starts"])

        # The clipped objective, (T, n), or (T, n, K) with credit for each asset.
        logp = log_probs(logits, days["actions"])
        change = (logp if per_asset else logp.sum(-1)) - days["logp"]
        ratio = change.exp()
        gained = days["advantages"]
        gain = torch.minimum(ratio * gained, ratio.clamp(1 - options.clip, 1 + options.clip) * gained)

        error = (values.float() - days["targets"]).square()
        spread = entropy(logits.unsqueeze(-2) if per_asset else logits)

        # A day weighs 1, however many assets have terms of their own.
        weight = days["starts"].numel()
        assets = ratio.numel() // weight
        total = (options.value_weight * error - gain - options.entropy * spread).sum() / assets
        kl = ((ratio - 1) - change).detach().sum() / assets

        if predicted:
            # Only one of the two losses counts. The other stays in the graph, so that every parameter has a gradient.
            taught = foresight_loss(predicted[0], days["moved"])
            total = 0 * (logits.sum() + values.sum()) + taught if batch["teaching"] else total + 0 * taught

        if not batch["teaching"]:
            # Teaching also moves the policy and must not be cut short by that.
            self.source.note_kl(batch["cohort"], kl, weight)

        metrics = {
            "kl": kl,
            "clipped": ((ratio - 1).abs() > options.clip).sum() / assets,
            "entropy": spread.detach().sum() / assets,
            "value_loss": error.detach().sum() / assets,
            "reward": days["rewards"].sum() / assets,
        }
        return Loss(total, weight, metrics)

    def eval_data(self) -> TensorDataset:
        return TensorDataset(torch.arange(self.test_episodes))

    def eval_loss(self, model: Any, batch: list[Tensor]) -> Loss:
        """Return minus the score. The greedy policy plays every episode from its first day."""
        played = self.play_test_episodes(model, batch[0])
        score = played.scores.sum()
        metrics: dict[str, Any] = {"score": score}
        if isinstance(self.game, Trading):
            metrics["trades"] = played.trades.sum()
            metrics |= {name: part.sum() for name, part in played.report().items()}

        # Only a generated market has a best policy to compare with.
        if best := self._baselines.get("bayes"):
            metrics["of_bayes"] = score / best

        return Loss(-score, len(batch[0]), metrics)

    def play_test_episodes(self, agent: Agent, episodes: Tensor) -> Played:
        return play(Greedy(agent), self.game.open(TEST_SEED, HELD_OUT + episodes), self.shape.episode)

    def show(self, model: nn.Module) -> str:
        return "per test episode: " + ", ".join(f"{name} {score:.3f}" for name, score in self._baselines.items())

    @cached_property
    def _baselines(self) -> dict[str, float]:
        if isinstance(self.game, Trading):
            return baseline_scores(self.game.series, self.game.rules, self.test_episodes)
        return {"guessing": 1 / self.shape.choices, "remembering": 1.0}

    def _problems(self, rules: Rules) -> Iterator[UserError]:
        shape, heads = self.shape, ATTENTION_HEADS
        if shape.cascade > 1 and shape.hidden % heads:
            yield UserError(
                f"task.hidden={shape.hidden} is not a multiple of {heads}",
                f"attention with {heads} heads lies between the LSTMs (task.cascade={shape.cascade})",
                f"set task.hidden={-(-shape.hidden // heads) * heads}",
            )

        if rules.halt is not None and not 0 < rules.halt < 1:
            yield UserError(f"task.halt={rules.halt} is not between 0 and 1", "", "set task.halt=0.9")
        if shape.value_per_asset and shape.assets == 1:
            yield UserError("task.credit=each needs several assets; there is one asset", "", "set task.credit=all")
        if isinstance(self.game, Trading) and isinstance(self.game.series, PriceSeries):
            yield from self.game.series.too_short(rules.window, rules.days)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the choice for all assets together, (..., K, A) -> (...)."""
    chances = logits.float().log_softmax(-1)
    return -(chances.exp() * chances).sum((-1, -2))


def foresight_loss(predicted: Tensor, moved: Tensor) -> Tensor:
    """Return the summed loss of predictions (..., K, 2) of the movements `moved` (..., K).

    A prediction is the logit of a rise, and how far the asset moves.
    """
    rose, size = predicted.float().unbind(-1)
    wrong = nn.functional.binary_cross_entropy_with_logits(rose, (moved > 0).float(), reduction="sum")
    return wrong + (size - moved.abs().float()).square().sum()
