"""What an agent plays: many environments side by side, as tensors. Two games are here: the market, and `CueRecall`.

Shapes in comments: n environments, W days of window, F features, K choices to make each day.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import noise


class Environments(Protocol):
    """Each plays one episode after another, for itself. Its whole state is `episode`, `day` and `position`; what else
    it needs is drawn again from them. Nothing in `windows` and `step` makes the host wait for the device."""

    envs: Tensor  # (n,) their numbers
    episode: Tensor  # (n,)
    day: Tensor  # (n,)
    position: Tensor  # (n, K), float64
    held: Tensor  # (n, K) the position of the last day
    gains: Tensor  # (n, K) what the last day earned with each of them, float64; their mean is what it earned
    moved: Tensor  # (n, K) what the last day brought, in usual sizes: what an agent may be taught to foresee

    def draw(self) -> None:
        """After `episode` was set."""

    def renew(self) -> None:
        """Between two rollouts: make room for the episodes to come."""

    def windows(self) -> Tensor:
        """What is seen before the day begins (n, W, F)."""
        ...

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        """Act (n, K). What it earned (n,) float64, with `costs` times the usual costs, and whether the episode has
        ended; then the next one has begun."""
        ...


class Game(Protocol):
    """The rules, from which environments are made."""

    @property
    def assets(self) -> int:
        """Choices to make each day: K."""
        ...

    @property
    def choices(self) -> int:
        """Possibilities of each."""
        ...

    @property
    def window(self) -> int: ...

    @property
    def features(self) -> int: ...

    @property
    def days(self) -> int:
        """Of an episode."""
        ...

    def open(self, seed: int, envs: Tensor, stagger: bool = False) -> Environments:
        """`stagger`: first episodes begin on different days, so that not all of them end together."""
        ...


@dataclass(frozen=True)
class CueRecall:
    """A cue is shown on the first day, and on the last it must be named: worth 1 if right. Nothing in between tells
    it, so whoever remembers earns 1, and whoever does not 0.5."""

    days: int = 10
    assets: int = 1
    choices: int = 2
    window: int = 1
    features: int = 2  # the cue, -1 or +1, on the first day; and 1 on the last

    def open(self, seed: int, envs: Tensor, stagger: bool = False) -> VectorCueRecall:
        return VectorCueRecall(self, seed, envs, stagger)


class VectorCueRecall:
    def __init__(self, game: CueRecall, seed: int, envs: Tensor, stagger: bool):
        self.game, self.seed, self.envs = game, seed, envs
        self.episode = torch.zeros_like(envs)
        late = noise.uniform(seed, noise.OFFSET, envs) * game.days
        self.day = late.long() if stagger else torch.zeros_like(envs)
        self.position = torch.zeros(len(envs), 1, dtype=torch.float64, device=envs.device)  # there is none
        self.moved = self.held = self.gains = self.position

    def draw(self) -> None:
        pass

    def renew(self) -> None:
        pass

    def cue(self) -> Tensor:
        """0 or 1 (n,): of the current episodes."""
        return noise.hashed(self.seed, noise.CUE, self.envs, self.episode) & 1

    def windows(self) -> Tensor:
        shown = (2 * self.cue() - 1) * (self.day == 0)
        return torch.stack([shown, self.day == self.game.days - 1], dim=1).float()[:, None]

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        ended = self.day == self.game.days - 1
        earned = ((actions[:, 0] == self.cue()) & ended).double()
        self.episode, self.day = self.episode + ended, (self.day + 1) * ~ended
        self.gains = earned[:, None]
        return earned, ended
