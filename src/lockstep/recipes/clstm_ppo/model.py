"""The agent: an LSTM over the window of days, an LSTM across the days of an episode, and two heads.

Shapes in comments: T days, n environments, W days of window, F features, K assets, A positions to choose from.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo.game import GameShape

# Hidden state and cell of the LSTM across days, (n, memory) each.
State = tuple[Tensor, Tensor]

# `recall_at_once` needs one more input; matrix units want their number to be a multiple of 8.
EXTRA_INPUTS = 8

# A gate with this input is closed: its sigmoid is 0 in any number format.
CLOSED = -1e4

# Heads of the attention between the LSTMs of a cascade.
ATTENTION_HEADS = 4


@dataclass(frozen=True)
class AgentOptions:
    # `clstm` is the whole cascade; `lstm_only` sees one day at a time and remembers; `mlp` sees the window and
    # remembers nothing, as a control.
    variant: Literal["clstm", "lstm_only", "mlp"] = "clstm"

    # Width of the LSTM over the window.
    hidden: int = 32

    # Width of the tanh layers between the two LSTMs.
    width: int = 64

    # Number of tanh layers.
    linears: int = 1

    # LSTMs over the window, stacked; if there are several, attention follows each.
    cascade: int = 1

    # Width of the LSTM across days.
    memory: int = 64

    # Added to the initial bias of the forget gate: with 0 the memory keeps half of its content from day to day, with 3
    # nineteen twentieths.
    remember: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AgentShape(AgentOptions, GameShape):
    """The options of an agent, and what the game asks of it: F, W, K and A."""

    # A value for every asset, in place of one for all together.
    value_per_asset: bool = False

    # A head that predicts the coming day, to teach the first stage.
    foresight: bool = False


class Agent(nn.Module):
    """Policy and value from a window of days and a memory of the days before; see `AgentOptions.variant`."""

    def __init__(self, shape: AgentShape):
        super().__init__()
        self.shape = shape
        memory = shape.memory

        # The first stage: the window of a day to one vector.
        if shape.variant == "clstm":
            self.look: nn.Module = WindowReader(shape)
        elif shape.variant == "lstm_only":
            self.look = nn.Sequential(LastDay(), nn.Linear(shape.features, shape.width), nn.Tanh())
        else:
            self.look = nn.Sequential(
                nn.Flatten(),
                nn.Linear(shape.window * shape.features, memory),
                nn.Tanh(),
                nn.Linear(memory, memory),
                nn.Tanh(),
            )

        # The second stage: the memory from day to day.
        self.recall: Any = None if shape.variant == "mlp" else nn.LSTMCell(shape.width, memory)
        if self.recall is not None and shape.remember:
            with torch.no_grad():
                # torch orders the gates: input, forget, cell, output.
                self.recall.bias_hh[memory : 2 * memory] += shape.remember

        # The small gain lets the policy begin with nearly equal probabilities.
        self.policy = nn.Linear(memory, shape.assets * shape.choices)
        self.value = nn.Linear(memory, shape.assets if shape.value_per_asset else 1)
        for head, gain in ((self.policy, 0.01), (self.value, 1.0)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)

        # The head that predicts the coming day reads what the first stage saw.
        seen = memory if shape.variant == "mlp" else shape.width
        self.foresee = nn.Linear(seen, 2 * shape.assets) if shape.foresight else None

    def forward(self, windows: Tensor, state: State, starts: Tensor) -> tuple[Any, ...]:
        """Run T days of n environments.

        `windows` is (T, n, W, F), `state` the memory before the first day. Where `starts` (T, n) is true an episode
        begins, and the memory is cleared. Return logits (T, n, K, A), values (T, n) or (T, n, K), and the state after
        the last day; with foresight also the first stage's prediction of the coming day (T, n, K, 2).
        """
        T, n = starts.shape
        seen = self.look(windows.flatten(0, 1)).unflatten(0, (T, n))
        predicted = () if self.foresee is None else (self.foresee(seen).unflatten(-1, (-1, 2)),)

        if self.recall is not None:
            # On a GPU a rollout's days, one at a time, are thousands of small kernels; cuDNN runs them in one call.
            # It does not give the state after the last day, which only the day-by-day rollout needs.
            recall = self.recall_at_once if seen.is_cuda and T > 1 else self.recall_daily
            seen, state = recall(seen, state, starts)

        logits = self.policy(seen).unflatten(-1, (self.shape.assets, self.shape.choices))
        values = self.value(seen) if self.shape.value_per_asset else self.value(seen).squeeze(-1)
        return logits, values, state, *predicted

    def initial_state(self, n: int, device: torch.device) -> State:
        shape = (n, self.shape.memory)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def recall_daily(self, seen: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Run the LSTM across days over `seen` (T, n, width), day by day; returns (T, n, memory) and the last state."""
        keep = (~starts)[..., None].to(seen.dtype)
        outputs = []
        for day in range(len(seen)):
            state = self.recall(seen[day], (state[0] * keep[day], state[1] * keep[day]))
            outputs.append(state[0])

        return torch.stack(outputs), state

    def recall_at_once(self, seen: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return the outputs of `recall_daily` from one call over all days, and `state` unchanged.

        Such a call cannot clear its memory on the way. So before each start we insert a day that closes the gates for
        input, memory and output, after which nothing is left. The number of starts differs between environments; there
        is room for one every `episode` days, and unused days stay at the end.
        """
        cell = self.recall
        (T, n), width = starts.shape, seen.shape[-1]
        days = T + 1 + (T - 1) // self.shape.episode

        # rows (T, n): the row of each real day among the inserted ones.
        rows = torch.arange(T, device=seen.device)[:, None] + starts.cumsum(dim=0)
        closing = seen.new_zeros(days, n, width + EXTRA_INPUTS)
        closing[..., width] = 1.0
        inputs = nn.functional.pad(seen, (0, EXTRA_INPUTS))
        inputs = closing.scatter(0, rows[..., None].expand(-1, -1, width + EXTRA_INPUTS), inputs)

        # Weights of the extra inputs. The first input closes the gates for input, memory and output.
        memory = self.shape.memory
        columns = cell.weight_ih.new_zeros(4 * memory, EXTRA_INPUTS)
        columns[: 2 * memory, 0] = CLOSED
        columns[3 * memory :, 0] = CLOSED

        # After the weights: has biases, layers, dropout, training, bidirectional, batch first.
        outputs, _, _ = torch._VF.lstm(  # pyrefly: ignore[missing-attribute]
            inputs,
            (state[0][None].to(seen.dtype), state[1][None].to(seen.dtype)),
            contiguous([torch.cat([cell.weight_ih, columns], dim=1), cell.weight_hh, cell.bias_ih, cell.bias_hh]),
            True, 1, 0.0, torch.is_grad_enabled(), False, False,
        )  # fmt: skip
        return outputs.gather(0, rows[..., None].expand(-1, -1, outputs.shape[-1])), state


def contiguous(weights: list[Tensor]) -> list[Tensor]:
    """Return the weights as views of one block of memory, as cuDNN wants them; it would warn and copy them itself."""
    copies = torch.cat([weight.flatten() for weight in weights]).split([weight.numel() for weight in weights])
    return [copy.view_as(weight) for copy, weight in zip(copies, weights, strict=True)]


class WindowReader(nn.Module):
    """Windows (n, W, F) to vectors (n, width): the last output of the LSTMs over the window, through tanh layers."""

    def __init__(self, shape: AgentShape):
        super().__init__()
        hidden = shape.hidden
        inputs = [shape.features, *[hidden] * (shape.cascade - 1)]
        self.lstms = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in inputs)

        # Attention between the LSTMs makes sense only if there are several.
        several = shape.cascade if shape.cascade > 1 else 0
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(hidden, ATTENTION_HEADS, batch_first=True) for _ in range(several)
        )

        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([hidden, *[shape.width] * shape.linears]):
            layers += [nn.Linear(before, after), nn.Tanh()]

        self.out = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and not self.attentions:
            return self.out(read_daily(self.lstms[0], x)[-1])
        if not x.is_cuda and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            raise no_half_lstm()

        for number, lstm in enumerate(self.lstms):
            # (n, W, hidden)
            x = torch.stack(read_daily(lstm, x), dim=1) if x.is_cuda else lstm(x)[0]
            if self.attentions:
                x = x + self.attentions[number](x, x, x, need_weights=False)[0]

        return self.out(x[:, -1])


def no_half_lstm() -> UserError:
    return UserError(
        "precision=fp16 cannot be used on a CPU for this agent: torch has no fp16 LSTM there",
        "",
        "set precision=bf16 or precision=fp32 (--precision bf16 for the script), or train on a GPU",
    )


def read_daily(lstm: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the outputs (n, hidden) of a one-layer LSTM for each day of `x` (n, W, F).

    cuDNN has a special kernel for LSTMs this small, which does not use the matrix units. With many windows this loop
    is several times as fast.
    """
    weights = [getattr(lstm, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    hidden = cell = x.new_zeros(len(x), weights[1].shape[1])
    outputs = []
    for day in x.unbind(dim=1):
        hidden, cell = torch._VF.lstm_cell(day, (hidden, cell), *weights)  # pyrefly: ignore[missing-attribute]
        outputs.append(hidden)

    return outputs


class LastDay(nn.Module):
    """Windows (n, W, F) to their last days (n, F)."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]
