"""Mean and variance of numbers that arrive in parts, added in the way of Chan, Golub and LeVeque."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # of the distances from the mean, summed

    def merged(self, other: Moments) -> Moments:
        if other.count == 0:
            return self
        count = self.count + other.count
        away = other.mean - self.mean
        return Moments(
            count,
            self.mean + away * other.count / count,
            self.squares + other.squares + away**2 * self.count * other.count / count,
        )

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 where nothing is known, so that dividing by it does no harm."""
        return (self.squares / self.count) ** 0.5 if self.count and self.squares > 0 else 1.0

    def as_list(self) -> list[float]:
        return list(astuple(self))


def moments_of(values: Tensor) -> Tensor:
    """(count, mean, squares) in float64, on the device."""
    exact = values.double().flatten()
    mean = exact.mean()
    return torch.stack([torch.full_like(mean, exact.numel()), mean, (exact - mean).square().sum()])


def merge_all(parts: Iterable[list[float]], begin: Moments = Moments()) -> Moments:
    """One after the other: the order decides the last bits, so it must not depend on the ranks."""
    for part in parts:
        begin = begin.merged(Moments(*part))
    return begin
