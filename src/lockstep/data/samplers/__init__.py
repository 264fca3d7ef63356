"""Samplers: the sample at each offset of an epoch is a pure function of (seed, epoch, offset).

A sampler has no state and does not depend on the rank. Any offset of any epoch can be computed directly, so the state
of a run's data is one integer, resuming costs nothing, and every offset is trained exactly once on any number of ranks.
"""

from lockstep.data.samplers.bucketed import BucketedSampler
from lockstep.data.samplers.curriculum import CurriculumSampler
from lockstep.data.samplers.mixture import Mixture
from lockstep.data.samplers.sampler import Sampled, Sampler
from lockstep.data.samplers.shuffled import BLOCK, SequentialSampler, ShuffledSampler, make_sampler
from lockstep.data.samplers.weighted import WeightedSampler

__all__ = [
    "BLOCK",
    "BucketedSampler",
    "CurriculumSampler",
    "Mixture",
    "Sampled",
    "Sampler",
    "SequentialSampler",
    "ShuffledSampler",
    "WeightedSampler",
    "make_sampler",
]
