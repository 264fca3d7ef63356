"""The agent: an LSTM over the window of days, an LSTM across the days of an episode, and two heads.

Shapes in comments: T days, n environments, W days of window, F features, K assets, A positions to choose from.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Variant = Literal["clstm", "lstm_only", "mlp"]
State = tuple[Tensor, Tensor]
PADDING = 8  # inputs, of which one is needed: matrix units want multiples of 8
SHUT = -1e4  # what closes a gate for good: its sigmoid is 0, in any number format


@dataclass(frozen=True)
class AgentShape:
    """What an agent sees and decides, and how large it is."""

    features: int  # of a day: F
    window: int  # W
    assets: int  # K
    choices: int  # A
    episode: int  # days: no two episodes begin within fewer
    variant: Variant = "clstm"
    hidden: int = 32  # of the LSTM over the window
    width: int = 64  # of what it tells
    linears: int = 1  # layers between the two
    cascade: int = 1  # LSTMs over the window
    memory: int = 64  # of the LSTM across days
    remember: float = 0.0  # added to the bias of its forget gate, at the start
    each: bool = False  # a value for every asset, not one for all together
    foresight: bool = False  # a head that says what the coming day brings, to teach the first stage


class Agent(nn.Module):
    """`clstm` is the whole cascade. `lstm_only` sees one day at a time, and remembers. `mlp` sees the window, and
    remembers nothing: the control."""

    def __init__(self, shape: AgentShape):
        super().__init__()
        self.shape, memory, width = shape, shape.memory, shape.width
        if shape.variant == "clstm":
            self.look: nn.Module = WindowReader(shape)
        elif shape.variant == "lstm_only":
            self.look = nn.Sequential(LastDay(), nn.Linear(shape.features, width), nn.Tanh())
        else:
            wide = nn.Linear(shape.window * shape.features, memory)
            self.look = nn.Sequential(nn.Flatten(), wide, nn.Tanh(), nn.Linear(memory, memory), nn.Tanh())
        self.recall = None if shape.variant == "mlp" else nn.LSTMCell(width, memory)
        if self.recall is not None and shape.remember:
            with torch.no_grad():
                self.recall.bias_hh[memory : 2 * memory] += shape.remember  # gates are: in, forget, cell, out
        self.policy = nn.Linear(memory, shape.assets * shape.choices)
        self.value = nn.Linear(memory, shape.assets if shape.each else 1)
        for head, gain in ((self.policy, 0.01), (self.value, 1.0)):  # begins by choosing everything equally often
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)
        seen = memory if shape.variant == "mlp" else width
        self.foresee = nn.Linear(seen, 2 * shape.assets) if shape.foresight else None

    def forward(self, windows: Tensor, state: State, starts: Tensor) -> tuple[Any, ...]:
        """`windows` (T, n, W, F); `state` is what was remembered before the first of the T days; where `starts` (T, n)
        an episode begins, and everything is forgotten. -> logits (T, n, K, A), values (T, n), or (T, n, K) if there
        is one for each asset, the state after; and with foresight what the first stage alone expects of the coming
        day (T, n, K, 2)."""
        T, n = starts.shape
        seen = self.look(windows.flatten(0, 1)).unflatten(0, (T, n))
        expected = () if self.foresee is None else (self.foresee(seen).unflatten(-1, (-1, 2)),)
        if self.recall is not None:
            # On a GPU a rollout's worth of days, one at a time, is thousands of small kernels: the library takes them
            # in one call. It does not say what is remembered afterwards, which only trading asks for, day by day.
            at_once = seen.is_cuda and T > 1
            seen, state = (self.recall_at_once if at_once else self.recall_daily)(seen, state, starts)
        shape = self.shape
        logits = self.policy(seen).unflatten(-1, (shape.assets, shape.choices))
        values = self.value(seen)
        return logits, values if shape.each else values.squeeze(-1), state, *expected

    def blank(self, n: int, device: torch.device) -> State:
        """Nothing remembered."""
        memory = self.shape.memory
        return torch.zeros(n, memory, device=device), torch.zeros(n, memory, device=device)

    def recall_daily(self, seen: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        assert self.recall is not None
        kept, found = (~starts)[..., None].to(seen.dtype), []
        for day in range(len(seen)):
            state = self.recall(seen[day], (state[0] * kept[day], state[1] * kept[day]))
            found.append(state[0])
        return torch.stack(found), state

    def recall_at_once(self, seen: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """The same outputs from one LSTM over all days. It cannot forget on the way; so before each start a day is put
        in that shuts the gates for input, memory and output, after which nothing is left. How many starts there are
        differs; room is made for as many as there can be, and what is not needed stays at the end. Gives the state
        as it was: the one after the last day is not known."""
        cell, (T, n), width = self.recall, starts.shape, seen.shape[-1]
        assert cell is not None
        days = T + 1 + (T - 1) // self.shape.episode
        places = torch.arange(T, device=seen.device)[:, None] + starts.cumsum(dim=0)  # (T, n): where each day goes
        shutters = seen.new_zeros(days, n, width + PADDING)
        shutters[..., width] = 1.0
        given = nn.functional.pad(seen, (0, PADDING))
        given = shutters.scatter(0, places[..., None].expand(-1, -1, width + PADDING), given)
        found, _, _ = torch._VF.lstm(  # pyrefly: ignore[missing-attribute]
            given,
            (state[0][None].to(seen.dtype), state[1][None].to(seen.dtype)),
            in_one_piece([self._with_shutters(cell.weight_ih), cell.weight_hh, cell.bias_ih, cell.bias_hh]),
            True, 1, 0.0, torch.is_grad_enabled(), False, False,  # biases, layers, dropout, train, ways, batch first
        )  # fmt: skip
        return found.gather(0, places[..., None].expand(-1, -1, found.shape[-1])), state

    def _with_shutters(self, weight: Tensor) -> Tensor:
        """Columns for `PADDING` more inputs, of which the first shuts three of the gates: in, forget, (cell), out."""
        columns, memory = weight.new_zeros(len(weight), PADDING), self.shape.memory
        columns[: 2 * memory, 0] = SHUT
        columns[3 * memory :, 0] = SHUT
        return torch.cat([weight, columns], dim=1)


def in_one_piece(weights: list[Tensor]) -> list[Tensor]:
    """The same, one after the other in memory, as cuDNN wants them: it would copy them itself, and complain."""
    flat = torch.cat([weight.flatten() for weight in weights]).split([weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(flat, weights, strict=True)]


class WindowReader(nn.Module):
    """The last output of LSTMs over the window, through tanh layers. With `cascade` above 1 the LSTMs stand on each
    other, each followed by attention over the days."""

    def __init__(self, shape: AgentShape):
        super().__init__()
        hidden, cascade = shape.hidden, shape.cascade
        sizes = [shape.features, *[hidden] * cascade]
        self.lstms = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in itertools.pairwise(sizes))
        several = range(cascade if cascade > 1 else 0)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(hidden, 4, batch_first=True) for _ in several)
        sizes = [hidden, *[shape.width] * shape.linears]
        pairs = itertools.pairwise(sizes)
        self.out = nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and not self.attentions:
            return self.out(read_daily(self.lstms[0], x)[-1])
        for number, lstm in enumerate(self.lstms):
            x = torch.stack(read_daily(lstm, x), dim=1) if x.is_cuda else lstm(x)[0]  # (n, W, hidden)
            if self.attentions:
                x = x + self.attentions[number](x, x, x, need_weights=False)[0]
        return self.out(x[:, -1])


def read_daily(lstm: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs (n, hidden) of an LSTM of one layer for each day of `x` (n, W, F). For LSTMs this small cuDNN has a
    kernel of its own, which leaves the matrix units alone: with many windows this is several times as fast."""
    weights = [getattr(lstm, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    hidden = cell = x.new_zeros(len(x), weights[1].shape[1])
    found = []
    for day in x.unbind(dim=1):
        hidden, cell = torch._VF.lstm_cell(day, (hidden, cell), *weights)  # pyrefly: ignore[missing-attribute]
        found.append(hidden)
    return found


class LastDay(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]
