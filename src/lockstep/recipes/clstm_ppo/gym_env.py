"""The market as a Gymnasium environment, for other agents and tools. It needs the extra `rl`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch

from lockstep.recipes.clstm_ppo.market import REWARD_SCALE, Rules, VectorMarket
from lockstep.recipes.clstm_ppo.series import HELD_OUT, RegimeSeries, Series


class RegimeMarket(gymnasium.Env):
    """One episode at a time of the market that the recipe trains on.

    The seed of `reset` is the number of the environment. Without a seed, no environment for tests is chosen.
    """

    metadata = {"render_modes": []}

    def __init__(self, series: Series | None = None, rules: Rules = Rules()):
        self.series: Series = series or RegimeSeries(seed=0)
        self.rules = rules

        self.observation_space = gymnasium.spaces.Box(
            -np.inf, np.inf, (rules.window, rules.features(self.series.assets)), np.float32
        )
        self.action_space = gymnasium.spaces.MultiDiscrete([rules.choices] * self.series.assets)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        number = int(self.np_random.integers(HELD_OUT)) if seed is None else seed

        # A market of one environment: the tensors of the recipe, with n = 1.
        self.market = VectorMarket(self.series, self.rules, torch.tensor([number]))
        return self.market.windows()[0].numpy(), {"env": number}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        earned, ended = self.market.step(torch.as_tensor(np.asarray(action))[None])
        share = float(earned[0])

        # Every episode ends by the calendar, which Gymnasium calls termination; nothing is ever truncated.
        return self.market.windows()[0].numpy(), share * REWARD_SCALE, bool(ended[0]), False, {"earned": share}
