import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.length_balance import divide_by_length

LENGTHS = st.lists(st.integers(0, 64), min_size=1, max_size=60)


def costs(lengths, groups):
    """The padded tokens of each group."""
    return [len(group) * lengths[group].max() for group in groups]


@given(lengths=LENGTHS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_sample_is_in_one_group_and_no_group_costs_more_than_before(lengths, data):
    lengths = np.array(lengths, dtype=np.float64)
    micro_batch = data.draw(st.integers(1, len(lengths)))
    count = -(-len(lengths) // micro_batch)
    groups = divide_by_length(lengths, count)
    assert len(groups) == count
    assert all(len(group) for group in groups)
    assert sorted(np.concatenate(groups)) == list(range(len(lengths)))

    # What fitted into memory before still does.
    assert max(costs(lengths, groups)) <= micro_batch * lengths.max()


def best_cost(descending, count):
    """The smallest possible largest cost of `count` contiguous groups, by trying all."""
    if count == 1:
        return len(descending) * descending[0]
    firsts = range(1, len(descending) - count + 2)
    return min(max(size * descending[0], best_cost(descending[size:], count - 1)) for size in firsts)


@given(lengths=st.lists(st.integers(1, 9), min_size=3, max_size=9), count=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_largest_cost_is_the_smallest_possible(lengths, count):
    lengths = np.array(lengths, dtype=np.float64)
    found = max(costs(lengths, divide_by_length(lengths, count)))
    assert found == best_cost(sorted(lengths, reverse=True), count)


@pytest.mark.parametrize(
    ("samples", "count", "ranks", "plain", "balanced"), [(32, 4, 4, 1.8, 1.35), (32, 16, 2, 1.3, 1.1)]
)
def test_the_slowest_rank_has_less_to_do(samples, count, ranks, plain, balanced):
    """Padded tokens of the slowest rank, relative to an equal share of the real ones; 200 steps."""
    generator = np.random.default_rng(0)

    def slowest(groups):
        cost = costs(lengths, groups)
        return (
            max(sum(cost[count * r // ranks : count * (r + 1) // ranks]) for r in range(ranks)) * ranks / lengths.sum()
        )

    found = []
    for _ in range(200):
        lengths = generator.integers(3, 65, samples).astype(np.float64)
        found.append((slowest(np.array_split(np.arange(samples), count)), slowest(divide_by_length(lengths, count))))

    before, after = np.mean(found, axis=0)
    assert before > plain
    assert after < balanced
