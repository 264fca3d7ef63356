"""What an agent plays: many environments at once, as tensors. The games are the market and `CueRecall`.

Shapes in comments: n environments, W days of window, F features, K choices to make each day, A
possibilities for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import counter_rng


class Environments(Protocol):
    """n environments, each of which plays one episode after another, independently of the others.

    `episode`, `day` and `position` are their whole state; everything else is drawn again from these three. Neither
    `windows` nor `step` makes the host wait for the device.
    """

    # (n,) int64: the numbers of the environments, their current episodes and the days within these.
    envs: Tensor
    episode: Tensor
    day: Tensor

    # (n, K) float64: the position for the coming day, and that of the last day.
    position: Tensor
    held: Tensor

    # (n, K) float64: what the last day earned with each choice. The mean over K is what the day earned.
    gains: Tensor

    # (n, K): the last day's movement in units of a usual one, which an agent may be taught to foresee.
    moved: Tensor

    def draw(self) -> None:
        """Rebuild everything that follows from `episode`, after it was set."""

    def renew(self) -> None:
        """Prepare the episodes to come. Call it between two rollouts: the host may wait for the device here."""

    def windows(self) -> Tensor:
        """Return what is seen before the day begins (n, W, F)."""
        ...

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        """Play a day with `actions` (n, K), at `costs` times the usual costs.

        Returns what the day earned (n,), float64, and whether the episode has ended (n,). If it has, the next episode
        has begun.
        """
        ...


@dataclass(frozen=True)
class GameShape:
    """What an agent sees of a game, and what it decides: W, F, K and A."""

    window: int
    features: int

    # Choices to make each day, and the possibilities of each of them.
    assets: int
    choices: int

    # Days of an episode.
    episode: int


class Game(Protocol):
    """The rules of a game, from which environments are made."""

    @property
    def shape(self) -> GameShape: ...

    def open(self, seed: int, envs: Tensor, stagger: bool = False) -> Environments:
        """Make the environments with the numbers `envs` (n,).

        With `stagger` their first episodes begin on different days, so that they do not all end together.
        """
        ...


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


class VectorCueRecall:
    """Environments of `CueRecall`."""

    def __init__(self, game: CueRecall, seed: int, envs: Tensor, stagger: bool):
        self.game = game
        self.seed = seed
        self.envs = envs
        self.episode = torch.zeros_like(envs)
        self.day = first_days(seed, envs, game.days, stagger)

        # The game has no positions; the protocol's (n, K) tensors stay 0.
        self.position = torch.zeros(len(envs), 1, dtype=torch.float64, device=envs.device)
        self.moved = self.held = self.gains = self.position

    def draw(self) -> None:
        pass

    def renew(self) -> None:
        pass

    def cue(self) -> Tensor:
        """Return the cues of the current episodes, 0 or 1 (n,)."""
        return counter_rng.random_bits(self.seed, counter_rng.CUE, self.envs, self.episode) & 1

    def windows(self) -> Tensor:
        shown = (2 * self.cue() - 1) * (self.day == 0)
        last_day = self.day == self.game.days - 1
        return torch.stack([shown, last_day], dim=1).float()[:, None]

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        # Only the last answer is paid; all others are ignored.
        ended = self.day == self.game.days - 1
        earned = ((actions[:, 0] == self.cue()) & ended).double()
        self.episode = self.episode + ended
        self.day = (self.day + 1) * ~ended
        self.gains = earned[:, None]
        return earned, ended


def first_days(seed: int, envs: Tensor, days: int, stagger: bool) -> Tensor:
    """Return the day (n,) on which the first episode of every environment begins."""
    if not stagger:
        return torch.zeros_like(envs)
    return (counter_rng.uniform(seed, counter_rng.OFFSET, envs) * days).long()
