"""Trading with the current policy, and what PPO learns from it.

Tensors hold the environment first: (n, T, ...), for T days of n environments. With credit for each asset, what was
earned and what follows from it is (n, T, K), and (n, T) otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import noise
from lockstep.recipes.clstm_ppo.game import Environments
from lockstep.recipes.clstm_ppo.market import REWARD_SCALE
from lockstep.recipes.clstm_ppo.model import Agent, State

Days = dict[str, Tensor]
DAILY = ("windows", "starts", "actions", "logp", "values", "rewards", "moved")


@dataclass
class Block:
    """Environments that go through every forward together: those of a micro-batch's places. A block is the same on
    whichever rank holds it, so with a fixed `micro_batch` it trades the same to the last bit on any number of ranks."""

    market: Environments
    state: State  # what the agent remembers of each environment
    discounted: Tensor  # (n,) or (n, K): what each has earned lately, for the scale of rewards

    @torch.no_grad()
    def trade(self, agent: Agent, days: int, seed: int, update: int, costs: float) -> Days:
        """`days` steps in every environment; episodes that end are followed by new ones."""
        market, assets = self.market, self.market.position.shape[1]
        market.renew()
        device, (hidden, cell) = market.envs.device, self.state
        clock, kinds = torch.arange(days, device=device)[:, None], torch.arange(assets, device=device)
        drawn = noise.uniform(seed, noise.EXPLORE, update, market.envs[:, None, None], clock, kinds)  # (n, T, K)
        found: dict[str, list[Tensor]] = {name: [] for name in DAILY}
        for day in range(days):
            windows, starts = market.windows(), market.day == 0
            logits, value, self.state, *_ = agent(windows[None], self.state, starts[None])
            actions = sampled(logits[0], drawn[:, day])
            earned, _ = market.step(actions, costs)
            chances = log_chances(logits[0], actions)
            taken, reward = (chances, market.gains) if agent.shape.each else (chances.sum(-1), earned)
            parts = windows, starts, actions, taken, value[0], reward * REWARD_SCALE, market.moved
            for name, part in zip(DAILY, parts, strict=True):
                found[name].append(part)
        _, after, *_ = agent(market.windows()[None], self.state, (market.day == 0)[None])
        done = {name: torch.stack(parts, dim=1) for name, parts in found.items()}
        return done | {
            "hidden": hidden,
            "cell": cell,
            "after": after[0],  # the value of what comes next
            "over": market.day == 0,  # or nothing comes: the episode has ended
        }

    def running_sums(self, days: Days, discount: float) -> Tensor:
        """What was earned up to each day, discounted, in this episode."""
        found = []
        for day in range(days["rewards"].shape[1]):
            earned = days["rewards"][:, day]
            self.discounted = self.discounted * discount * _beside(~days["starts"][:, day], earned) + earned
            found.append(self.discounted)
        return torch.stack(found, dim=1)


def sampled(logits: Tensor, drawn: Tensor) -> Tensor:
    """Actions (n, K) from logits (n, K, A) and one uniform number for each."""
    *chances, _ = logits.double().softmax(-1).unbind(-1)  # one by one: a running sum of so few is slow on a GPU
    reached, actions = torch.zeros_like(drawn), torch.zeros_like(drawn, dtype=torch.int64)
    for chance in chances:
        reached = reached + chance
        actions = actions + (drawn >= reached)
    return actions


def log_chances(logits: Tensor, actions: Tensor) -> Tensor:
    """Of the action of every asset: (..., K, A) and (..., K) -> (..., K). Their sum is that of all together."""
    return logits.float().log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)


def advantages(rewards: Tensor, values: Tensor, days: Days, discount: float, trace: float) -> Tensor:
    """Generalised advantage estimation, as large as `rewards`. `values` reach one day beyond them."""
    ends = torch.cat([days["starts"][:, 1:], days["over"][:, None]], dim=1)  # a start ends the day before it
    found, later = [], torch.zeros_like(values[:, 0])
    for day in reversed(range(rewards.shape[1])):
        goes_on = _beside(~ends[:, day], later)
        surprise = rewards[:, day] + discount * values[:, day + 1] * goes_on - values[:, day]
        later = surprise + discount * trace * later * goes_on
        found.append(later)
    return torch.stack(found[::-1], dim=1)


def _beside(flags: Tensor, values: Tensor) -> Tensor:
    """Of environments (n,), to go with numbers of the same ones, (n,) or (n, K)."""
    return flags if values.dim() == 1 else flags[:, None]
