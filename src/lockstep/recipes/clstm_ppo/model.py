"""The agent: an LSTM over the window of days, an LSTM across the days of an episode, and two heads.

Shapes in comments: T days, n environments, W days of window, F features, K assets, A positions to choose from.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor, nn

Variant = Literal["clstm", "lstm_only", "mlp"]
State = tuple[Tensor, Tensor]


class Agent(nn.Module):
    """`clstm` is the whole cascade. `lstm_only` sees one day at a time, and remembers. `mlp` sees the window, and
    remembers nothing: the control."""

    def __init__(
        self,
        features: int,
        window: int,
        assets: int,
        choices: int,
        variant: Variant = "clstm",
        hidden: int = 32,
        width: int = 64,
        linears: int = 1,
        cascade: int = 1,
        memory: int = 64,
    ):
        super().__init__()
        self.assets, self.choices, self.remembers = assets, choices, memory
        if variant == "clstm":
            self.look: nn.Module = WindowReader(features, hidden, width, linears, cascade)
        elif variant == "lstm_only":
            self.look = nn.Sequential(LastDay(), nn.Linear(features, width), nn.Tanh())
        else:
            wide = nn.Linear(window * features, memory)
            self.look = nn.Sequential(nn.Flatten(), wide, nn.Tanh(), nn.Linear(memory, memory), nn.Tanh())
        self.recall = None if variant == "mlp" else nn.LSTMCell(width, memory)
        self.policy, self.value = nn.Linear(memory, assets * choices), nn.Linear(memory, 1)
        for head, gain in ((self.policy, 0.01), (self.value, 1.0)):  # begins by choosing everything equally often
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)

    def forward(self, windows: Tensor, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """`windows` (T, n, W, F); `state` is what was remembered before the first of the T days; where `starts` (T, n)
        an episode begins, and everything is forgotten. -> logits (T, n, K, A), values (T, n), the state after."""
        T, n = starts.shape
        seen = self.look(windows.flatten(0, 1)).unflatten(0, (T, n))
        if self.recall is not None:
            seen, state = self._recall(seen, state, starts)
        return self.policy(seen).unflatten(-1, (self.assets, self.choices)), self.value(seen).squeeze(-1), state

    def blank(self, n: int, device: torch.device) -> State:
        """Nothing remembered."""
        return torch.zeros(n, self.remembers, device=device), torch.zeros(n, self.remembers, device=device)

    def _recall(self, seen: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        assert self.recall is not None
        kept, found = (~starts)[..., None].to(seen.dtype), []
        for day in range(len(seen)):
            state = self.recall(seen[day], (state[0] * kept[day], state[1] * kept[day]))
            found.append(state[0])
        return torch.stack(found), state


class WindowReader(nn.Module):
    """The last output of LSTMs over the window, through tanh layers. With `cascade` above 1 the LSTMs stand on each
    other, each followed by attention over the days."""

    def __init__(self, features: int, hidden: int, width: int, linears: int, cascade: int):
        super().__init__()
        sizes = [features, *[hidden] * cascade]
        self.lstms = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in itertools.pairwise(sizes))
        several = range(cascade if cascade > 1 else 0)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(hidden, 4, batch_first=True) for _ in several)
        sizes = [hidden, *[width] * linears]
        pairs = itertools.pairwise(sizes)
        self.out = nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        for number, lstm in enumerate(self.lstms):
            x, _ = lstm(x)  # (n, W, hidden)
            if self.attentions:
                x = x + self.attentions[number](x, x, x, need_weights=False)[0]
        return self.out(x[:, -1])


class LastDay(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]
