"""Turbulent days, after which trading is halted: returns that are far from what is usual, all assets together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Calm:
    """What usual days look like: mean (K,) and inverse covariance (K, K) of log-returns, and the distance that a
    given share of days does not pass."""

    mean: Tensor
    precision: Tensor
    limit: float

    @classmethod
    def of(cls, returns: Tensor, share: float) -> Calm:
        """From `returns` (days, K), of which `share` count as usual."""
        mean = returns.mean(dim=0)
        covariance = torch.atleast_2d(torch.cov(returns.T))
        precision = torch.linalg.pinv(covariance)
        return cls(mean, precision, float(distance(returns, mean, precision).quantile(share)))


def distance(returns: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    """The squared distance of Mahalanobis, (..., K) -> (...): the turbulence index of a day."""
    away = returns - mean
    return ((away @ precision) * away).sum(dim=-1)


def halted(returns: Tensor, calm: Calm) -> Tensor:
    """Of log-returns (n, days, K), the days (n, days) on which there is no trading: those after a turbulent one."""
    turbulent = distance(returns, calm.mean.to(returns.device), calm.precision.to(returns.device)) > calm.limit
    return torch.cat([torch.zeros_like(turbulent[:, :1]), turbulent[:, :-1]], dim=1)
