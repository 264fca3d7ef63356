"""What an agent plays: many environments at once, as tensors. The games are the market and `CueRecall`.

Shapes in comments: n environments, W days of window, F features, K choices to make each day, A options for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import counter_rng


@dataclass(frozen=True)
class GameShape:
    """What an agent sees of a game, and what it decides: W, F, K and A."""

    window: int
    features: int

    # Choices to make each day, and the options of each of them.
    assets: int
    choices: int

    # Days of an episode.
    episode: int


class Environments:
    """n environments. Each plays one episode after another, independently of the others.

    `episode`, `day` and `position` are their whole state; everything else is drawn again from these three. Neither
    `windows` nor `step` makes the host wait for the device.
    """

    def __init__(self, shape: GameShape, seed: int, envs: Tensor, stagger: bool):
        """Make the environments with the numbers `envs` (n,), int64.

        With `stagger` their first episodes begin on different days, so that they do not all end together.
        """
        # (n,) int64: the current episodes, and the days within them.
        self.envs = envs
        self.episode = torch.zeros_like(envs)
        self.day = torch.zeros_like(envs)
        if stagger:
            self.day = (counter_rng.uniform(seed, counter_rng.OFFSET, envs) * shape.episode).long()

        # (n, K) float64: the position for the coming day, and that of the last day.
        self.position = torch.zeros(len(envs), shape.assets, dtype=torch.float64, device=envs.device)
        self.held = self.position

        # (n, K) float64: what the last day earned with each choice. The mean over K is what the day earned.
        self.gains = self.position

        # (n, K): the last day's movement in units of a usual one, which an agent may be taught to foresee.
        self.moved = self.position

    def draw(self) -> None:
        """Rebuild everything that follows from `episode`, after it was set."""

    def renew(self) -> None:
        """Prepare the episodes to come. Call it between two rollouts: the host may wait for the device here."""

    def windows(self) -> Tensor:
        """Return what is seen before the day begins (n, W, F)."""
        raise NotImplementedError

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        """Play a day with `actions` (n, K), at `costs` times the usual costs.

        Return what the day earned (n,), float64, and whether the episode has ended (n,). If it has, the next episode
        has begun.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class CueRecall:
    """A cue is shown on the first day and must be named on the last one, for a reward of 1.

    Nothing in between repeats it: an agent with memory earns 1, an agent without memory 0.5 on average.
    """

    days: int = 10

    @property
    def shape(self) -> GameShape:
        # The features of a day: the cue, -1 or +1, if it is the first one; and whether it is the last one.
        return GameShape(window=1, features=2, assets=1, choices=2, episode=self.days)

    def open(self, seed: int, envs: Tensor, stagger: bool = False) -> VectorCueRecall:
        return VectorCueRecall(self, seed, envs, stagger)


class VectorCueRecall(Environments):
    """Environments of `CueRecall`. They have no positions: these tensors stay 0."""

    def __init__(self, game: CueRecall, seed: int, envs: Tensor, stagger: bool):
        super().__init__(game.shape, seed, envs, stagger)
        self.seed = seed
        self.last_day = game.days - 1

    def cue(self) -> Tensor:
        """Return the cues of the current episodes, 0 or 1 (n,)."""
        return counter_rng.random_bits(self.seed, counter_rng.CUE, self.envs, self.episode) & 1

    def windows(self) -> Tensor:
        shown = (2 * self.cue() - 1) * (self.day == 0)
        return torch.stack([shown, self.day == self.last_day], dim=1).float()[:, None]

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        # Only the last answer is paid; all others are ignored.
        ended = self.day == self.last_day
        earned = ((actions[:, 0] == self.cue()) & ended).double()
        self.gains = earned[:, None]

        self.episode = self.episode + ended
        self.day = (self.day + 1) * ~ended
        return earned, ended
