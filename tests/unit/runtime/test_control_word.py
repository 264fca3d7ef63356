"""The arithmetic of the control word: its integers are exact on up to 16,384 ranks, in any order of additions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.parallel.ddp.driver import word_dtype
from lockstep.runtime.control_word import (
    BASE,
    FLAGS,
    LENGTH,
    MOST_RANKS,
    STEP,
    ControlWord,
    ControlWordCodec,
    SummedWord,
    mean_is_exact,
    step_mark,
)

CPU = torch.device("cpu")
RANKS = (1, 2, 3, 7, 8, 127, 128, 129, 1000, 4096, 16384)
LARGEST = BASE**3 - 1  # the largest weight of which 16,384 ranks can have as many as they like


# ---- orders in which an all-reduce may add --------------------------------------------------------------


def in_a_ring(words: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One rank after the other, beginning with any of them."""
    return np.cumsum(np.roll(words, random.integers(len(words)), axis=0), axis=0, dtype=words.dtype)[-1]


def in_any_chain(words: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.cumsum(random.permutation(words), axis=0, dtype=words.dtype)[-1]


def in_a_tree(words: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Neighbours first; each level of the tree is one addition for every pair."""
    while len(words) > 1:
        half = len(words) // 2
        words = np.concatenate([words[:half] + words[half : 2 * half], words[2 * half :]])
    return words[0]


ORDERS = (in_a_ring, in_any_chain, in_a_tree)
Order = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def packed_words(words: list[ControlWord], dtype: torch.dtype, factor: float) -> np.ndarray:
    codec = ControlWordCodec(CPU, dtype)
    return np.stack([codec.pack(word, factor).numpy() for word in words])


def all_reduced(rows: np.ndarray, order: Order, seed: int, mean_of: int = 0) -> SummedWord:
    """Add packed words; with `mean_of` as DDP does, which multiplies each by a rounded 1 / `mean_of` before."""
    if mean_of:
        rows = rows * np.asarray(1.0 / mean_of, rows.dtype)
    summed = order(rows, np.random.default_rng(seed))
    assert summed.dtype == rows.dtype
    return ControlWordCodec(CPU, torch.float32).unpack(summed.tolist())


weights = st.one_of(st.sampled_from([0, 1, BASE - 1, BASE, BASE**2 - 1, LARGEST]), st.integers(0, LARGEST))
flags = st.fixed_dictionaries({name: st.integers(0, 1) for name in FLAGS})
contents = st.lists(st.tuples(weights, flags), min_size=1, max_size=5)


@pytest.mark.parametrize("way", ["sum", "mean"])
@pytest.mark.parametrize("ranks", RANKS)
@settings(max_examples=12)
@given(contents=contents, step=st.one_of(st.integers(0, 3 * BASE), st.just(BASE - 1)), seed=st.integers(0, 99))
def test_the_sum_is_exact(ranks: int, way: str, contents: list, step: int, seed: int) -> None:
    """Each of the ranks has one of a few words; in float32 wherever a driver sends float32."""
    mark = step_mark(step)
    few = [ControlWord(weight=float(weight), step=mark, **flags) for weight, flags in contents]
    who = np.random.default_rng(seed).integers(len(few), size=ranks)
    counts = np.bincount(who, minlength=len(few)).tolist()

    dtype = torch.float32 if way == "sum" or mean_is_exact(ranks) else torch.float64
    rows = packed_words(few, dtype, factor=ranks if way == "mean" else 1.0)[who]
    for order in ORDERS:
        found = all_reduced(rows, order, seed, mean_of=ranks if way == "mean" else 0)
        assert found.weight == sum(n * weight for n, (weight, _) in zip(counts, contents, strict=True))
        assert found.steps == ranks * mark
        for name in FLAGS:
            assert getattr(found, name) == sum(n * flags[name] for n, (_, flags) in zip(counts, contents, strict=True))


@pytest.mark.parametrize("way", ["sum", "mean"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_word_that_does_not_belong_is_always_noticed(ranks: int, way: str) -> None:
    """A word is missing or comes twice, or one rank is a step behind: in whatever step, the marks do not add up."""
    dtype = torch.float32 if way == "sum" or mean_is_exact(ranks) else torch.float64
    factor = ranks if way == "mean" else 1.0
    for step in (0, 1, 2, BASE // 2, BASE - 2, BASE - 1, BASE, 10 * BASE - 1):
        now, before = packed_words([ControlWord(step=step_mark(s)) for s in (step, step - 1)], dtype, factor)
        same = np.tile(now, (ranks - 1, 1))
        wrong = {"missing": same, "twice": np.stack([now, now, *same]), "behind": np.stack([before, *same])}
        for what, rows in wrong.items():
            for order in ORDERS if len(rows) else ():
                found = all_reduced(rows, order, step, mean_of=ranks if way == "mean" else 0)
                assert found.steps != ranks * step_mark(step), (what, step)


# ---- which means are exact ------------------------------------------------------------------------------


def largest_error_of_mean(ranks: int) -> float:
    """What rounding can change in the worst case, as the docstring of `mean_is_exact` derives it."""
    additions = sum(2.0 ** (math.floor(math.log2(BASE * i)) - 24) for i in range(2, ranks + 1))
    return additions + ranks * BASE * 2.0**-23


def test_the_bound_holds_for_every_mean_in_float32() -> None:
    for ranks in range(1, 2 * MOST_RANKS):
        power = math.log2(ranks).is_integer()
        if mean_is_exact(ranks):
            assert ranks <= MOST_RANKS if power else largest_error_of_mean(ranks) < 0.5
    assert round(largest_error_of_mean(127), 2) == 0.35
    assert largest_error_of_mean(146) < 0.5 < largest_error_of_mean(147)
    assert not mean_is_exact(129)
    assert mean_is_exact(MOST_RANKS)
    assert not mean_is_exact(2 * MOST_RANKS)


def test_a_mean_of_many_words_in_float32_does_go_wrong() -> None:
    """Or the word of such a job would not need a collective of its own."""
    ranks = 10_140
    rows = np.tile(packed_words([ControlWord(weight=LARGEST, step=BASE)], torch.float32, ranks), (ranks, 1))
    found = all_reduced(rows, in_a_ring, 0, mean_of=ranks)
    assert (found.weight, found.steps) != (ranks * LARGEST, ranks * BASE)


@pytest.mark.parametrize(
    ("ranks", "last", "expected"),
    [
        (8, torch.float32, torch.float32),
        (8, torch.float64, torch.float64),
        (8, torch.bfloat16, torch.float32),
        (8, torch.float16, torch.float32),
        (127, torch.float32, torch.float32),
        (129, torch.float32, torch.float64),
        (16384, torch.float32, torch.float32),
        (32768, torch.float32, torch.float64),
    ],
)
def test_ddp_sends_the_word_in_a_dtype_that_carries_it(ranks: int, last: torch.dtype, expected: torch.dtype) -> None:
    """DDP puts parameters of one dtype into a bucket: a word of another one travels in a collective of its own."""
    assert word_dtype({"last": nn.Parameter(torch.zeros(1, dtype=last))}, ranks, exact=False) == expected


# ---- on the device --------------------------------------------------------------------------------------


@given(weight=st.one_of(weights.map(float), st.floats(0, 2.0**40), st.floats(-1000, 0)), factor=st.sampled_from([1, 8]))
def test_a_weight_on_the_device_is_packed_and_read_as_on_the_host(weight: float, factor: int) -> None:
    codec = ControlWordCodec(CPU, torch.float64)
    host = codec.pack(ControlWord(weight=weight, step=3), factor)
    device = codec.pack(ControlWord(weight=torch.tensor(weight, dtype=torch.float64), step=3), factor)
    for packed in (host, device):
        assert codec.unpack((packed / factor).tolist()).weight == pytest.approx(weight, rel=1e-15, abs=1e-12)
        assert float(codec.weight(packed / factor)) == codec.unpack((packed / factor).tolist()).weight
    if weight >= 0:
        assert torch.equal(host, device)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_on_the_device_that_is_not_finite_is_nan(weight: float) -> None:
    codec = ControlWordCodec(CPU, torch.float32)
    values = codec.pack(ControlWord(weight=torch.tensor(weight), step=3, stop=1)).tolist()
    found = codec.unpack(values)
    assert math.isnan(found.weight)
    assert (found.steps, found.stop) == (3, 1)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("slot", range(LENGTH))
def test_a_word_with_a_number_that_is_not_finite_can_be_read(slot: int, number: float) -> None:
    """Another collective's tensor may come in place of the word: the step must then be able to say so."""
    values = ControlWordCodec(CPU, torch.float32).pack(ControlWord(weight=4.0, step=3, stop=1)).tolist()
    values[slot] = number
    found = ControlWordCodec(CPU, torch.float32).unpack(values)
    assert found.steps == (-1 if slot == STEP else 3)
    assert all(getattr(found, name) in (0, 1) for name in FLAGS)
