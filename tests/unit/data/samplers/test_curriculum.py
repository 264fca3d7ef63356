import numpy as np
import pytest

from lockstep.data.samplers import CurriculumSampler
from lockstep.errors import UserError

DIFFICULTY = np.random.default_rng(0).permutation(1000)


def test_only_easy_samples_at_first_then_all():
    sampler = CurriculumSampler(DIFFICULTY, ramp=2, start=0.2, seed=0)
    for epoch, start in [(0, 0), (0, 900), (1, 500), (1, 990)]:
        drawn = DIFFICULTY[sampler.ids(epoch, start, start + 10)]
        limits = [np.ceil(1000 * (0.2 + 0.8 * (epoch + (start + i) / 1000) / 2)) for i in range(10)]
        assert np.all(drawn < limits)

    # Draws use all that is allowed: half of an epoch reaches the upper part of it.
    assert DIFFICULTY[sampler.ids(1, 500, 1000)].max() > 800


def test_after_the_ramp_every_sample_comes_once():
    sampler = CurriculumSampler(DIFFICULTY, ramp=2, seed=0)
    assert sorted(sampler.ids(2, 0, 1000)) == list(range(1000))
    assert len(set(sampler.ids(1, 0, 1000).tolist())) < 800


def test_a_schedule_of_ones_own():
    sampler = CurriculumSampler(DIFFICULTY, ramp=1, schedule=lambda progress: 0.01 if progress < 0.5 else 1.0, seed=0)
    assert DIFFICULTY[sampler.ids(0, 0, 500)].max() < 10
    assert DIFFICULTY[sampler.ids(0, 500, 1000)].max() > 900
    with pytest.raises(UserError, match="must return a share above 0 and at most 1; it returned 2"):
        CurriculumSampler(DIFFICULTY, schedule=lambda progress: 2, seed=0).ids(0, 0, 1)


@pytest.mark.parametrize("arguments", [{"start": 0}, {"start": 1.5}, {"ramp": 0}])
def test_what_is_refused(arguments):
    with pytest.raises(UserError, match="a curriculum cannot start with"):
        CurriculumSampler([1, 2], **arguments)
