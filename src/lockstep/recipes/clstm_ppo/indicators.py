"""Four indicators that traders look at, from daily closing prices alone, each about between -1 and 1.

They sum up the past, so a policy that sees them needs no memory: with them an MLP does well too.
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNT = 4
FAST, SLOW, SPAN = 12, 26, 14  # days, as is usual


def indicators(returns: Tensor) -> list[Tensor]:
    """Of log-returns (n, days, K): MACD, RSI, CCI and ADX, each (n, days, K). Highs and lows are the closes."""
    log_price = returns.cumsum(dim=1)
    return [_macd(log_price), _rsi(returns), _cci(log_price), _adx(returns)]


def smoothed(values: Tensor, days: int) -> Tensor:
    """The moving average in which a value fades to 1/e in about `days` / 2, along dim 1."""
    keep, found = 1 - 2 / (days + 1), [values[:, 0]]
    for day in range(1, values.shape[1]):
        found.append(keep * found[-1] + (1 - keep) * values[:, day])
    return torch.stack(found, dim=1)


def _macd(log_price: Tensor) -> Tensor:
    """The quick average above the slow one, in tenths."""
    return (smoothed(log_price, FAST) - smoothed(log_price, SLOW)) * 10


def _rsi(returns: Tensor) -> Tensor:
    """Gains against losses: 1 if there were only gains."""
    gains, losses = smoothed(returns.clamp(min=0), SPAN), smoothed((-returns).clamp(min=0), SPAN)
    return (gains - losses) / (gains + losses + 1e-12)


def _cci(log_price: Tensor) -> Tensor:
    """The price above its average, in units of its usual distance from it."""
    away = log_price - smoothed(log_price, SPAN)
    return away / (smoothed(away.abs(), SPAN) + 1e-12) / 3


def _adx(returns: Tensor) -> Tensor:
    """How much of the movement goes one way, smoothed: the strength of a trend without its sign."""
    return smoothed(_rsi(returns).abs(), SPAN)
