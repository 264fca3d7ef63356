"""Whether compiling pays: the rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.parallel.compiled import payoff
from lockstep.parallel.compiled.payoff import (
    COMPARED,
    MARGIN,
    SLOWER,
    SPEEDUPS,
    STEPS,
    STEPS_VARYING,
    Facts,
    Payoff,
    decide,
    expected,
    kernels_could_decide,
)
from lockstep.parallel.compiled.targets import BLOCKS, LOSS, MODEL

# About GPT-2 124M: 12 blocks of 6 layers.
GPT2 = Facts(steps_left=1000, step_s=0.1, sizes_vary=False, layers=76, blocks=12, block_layers=6)


def test_a_long_run_of_one_size_compiles_the_loss():
    decision = decide(replace(GPT2, steps_left=100_000))
    assert decision.targets == (LOSS, MODEL, BLOCKS)
    assert "100000 steps of 100 ms are left" in decision.reason


def test_a_shorter_run_compiles_only_what_is_cheap():
    """A model of many layers takes long as a whole, and its blocks do not."""
    many = replace(GPT2, steps_left=3000, layers=160)
    assert decide(many).targets == (BLOCKS,)


def test_the_first_compilation_of_a_machine_takes_longer():
    warm = expected(GPT2, LOSS).cost_s
    assert expected(replace(GPT2, cold=True), LOSS).cost_s == warm + payoff.COLD_S


def test_a_layer_that_is_called_in_a_loop_is_compiled_once_for_each_call():
    """Two layers in a loop of 1,000 calls: by its layers alone it would be expected to compile in 4 s, and be tried."""
    loop = Facts(2000, step_s=0.1, sizes_vary=False, layers=3)
    assert decide(loop).targets[0] == LOSS
    unrolled = replace(loop, operations=9000)
    assert expected(unrolled, LOSS).cost_s > 30 * loop.step_s
    assert decide(unrolled).targets == ()
    assert decide(replace(unrolled, steps_left=100_000)).targets[0] == LOSS

    # One block is a part of them.
    blocks = replace(GPT2, operations=12_000)
    assert payoff.OPERATION_S * 1000 < expected(blocks, BLOCKS).cost_s < expected(blocks, MODEL).cost_s / 5


def test_operations_of_known_models_change_nothing():
    """transformers' GPT-2 124M has about 11 for each layer with autocast; ResNet-50 has 3."""
    assert expected(replace(GPT2, operations=11 * GPT2.layers), LOSS) == expected(GPT2, LOSS)


def test_a_short_run_stays_eager_and_says_why():
    decision = decide(replace(GPT2, steps_left=200))
    assert decision.targets == ()
    assert decision.reason.startswith("it would not pay: 200 steps of 100 ms are left")


def test_a_try_that_may_be_in_vain_must_be_short():
    """It would save more than it costs, if the estimates are right."""
    decision = decide(replace(GPT2, steps_left=1000))
    assert decision.targets == ()
    assert decision.reason.endswith("it would save about 33 s for 26 s; a first try may take 7 s of them")


def test_sizes_that_vary_compile_blocks_alone():
    assert decide(replace(GPT2, steps_left=100_000, sizes_vary=True)).targets == (BLOCKS,)
    # Without repeated blocks there is nothing but the whole.
    assert decide(replace(GPT2, steps_left=100_000, sizes_vary=True, blocks=0)).targets[0] == LOSS


def test_without_a_function_the_model_is_compiled():
    assert decide(replace(GPT2, steps_left=100_000, possible=(MODEL, BLOCKS))).targets[0] == MODEL


def test_a_record_decides_for_and_against():
    short = replace(GPT2, steps_left=100)
    decision = decide(replace(short, records={LOSS: Payoff(2.0, 2.0)}))
    assert decision.targets == (LOSS,)
    assert decision.limit_s == MARGIN * 2.0
    slower = {target: Payoff(20.0, 0.9) for target in SPEEDUPS}
    assert decide(replace(GPT2, steps_left=10**9, records=slower)).targets == ()


def test_a_record_is_no_promise_once_torchs_files_are_gone():
    """They lie in a folder that a restart of the machine may empty."""
    known = replace(GPT2, steps_left=100, records={LOSS: Payoff(2.0, 2.0)})
    assert decide(replace(known, cold=True)).targets == ()
    assert decide(replace(known, cold=True, steps_left=100_000)).targets[0] == LOSS


def test_a_cost_that_was_measured_without_torchs_files_holds_without_them():
    """As on a cluster whose jobs begin with an empty /tmp, and keep the home folder."""
    known = replace(GPT2, steps_left=400, cold=True, records={LOSS: Payoff(2.0, 2.0, cold_cost_s=9.0)})
    assert expected(known, LOSS) == Payoff(9.0, 2.0, cold_cost_s=9.0)
    assert decide(known).targets == (LOSS,)
    assert expected(replace(known, cold=False), LOSS).cost_s == 2.0


def test_what_did_not_end_is_tried_again_only_in_a_longer_run():
    tried = replace(GPT2, steps_left=4000, possible=(LOSS,))
    limit_s = decide(tried).limit_s
    assert limit_s > 0
    tried = replace(tried, records={LOSS: Payoff(limit_s, 1.5, measured=False)})
    assert decide(tried).targets == ()
    assert decide(replace(tried, steps_left=20_000)).targets == (LOSS,)


def test_a_gain_that_the_kernels_show_is_worth_a_longer_try():
    """Like LoRA of GPT-2, 2,000 steps: 8 % of the time that is left would not be enough."""
    lora = Facts(2000, step_s=0.0326, sizes_vary=False, layers=52, blocks=4, block_layers=12, cold=True)
    assert decide(lora).targets == ()
    assert kernels_could_decide(lora)
    decision = decide(replace(lora, saving_s=0.0168))
    assert decision.targets[0] == LOSS
    assert lora.most_s < decision.limit_s <= MARGIN * payoff.MOST_RISKED * lora.eager_s


def test_kernels_that_show_no_gain_decide_against():
    assert decide(replace(GPT2, steps_left=2000, saving_s=0.001)).targets == ()
    assert decide(replace(GPT2, steps_left=2000, saving_s=0.0)).targets == ()


def test_kernels_are_measured_only_if_they_could_change_the_decision():
    assert not kernels_could_decide(replace(GPT2, steps_left=20))  # too short, whatever they say
    assert not kernels_could_decide(replace(GPT2, steps_left=100_000))  # long enough in any case
    assert kernels_could_decide(replace(GPT2, steps_left=1000))
    assert not kernels_could_decide(replace(GPT2, steps_left=1000, saving_s=0.0))  # already measured


def test_what_was_spent_counts_against_a_second_time():
    assert decide(replace(GPT2, steps_left=3000, spent_s=20.0)).targets == ()


# ---- a run never loses more than a tenth -------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What compiling a target really costs and gains. `works`: without it all of the cost is in vain."""

    cost: float  # as a multiple of what is expected
    speedup: float
    works: bool


def simulated_s(facts: Facts, truth: dict[str, Truth]) -> float:
    """Return the seconds of the steps that are left, and of compiling, if the run follows the decision."""
    decision = decide(facts)
    total_s, steps, limit_s = 0.0, facts.steps_left, decision.limit_s
    for target in decision.targets:
        true = truth[target]
        cost_s = true.cost * expected(facts, target).cost_s
        total_s += min(cost_s, limit_s)
        works = true.works and cost_s <= limit_s
        limit_s -= min(cost_s, limit_s)
        if not works:
            continue

        # It is compared, timed, and given up if it is slower.
        total_s += COMPARED * facts.step_s
        timed = min(steps, sum(STEPS_VARYING if facts.sizes_vary else STEPS))
        kept = steps if true.speedup * SLOWER >= 1 else timed
        return total_s + kept * facts.step_s / true.speedup + (steps - kept) * facts.step_s

    return total_s + steps * facts.step_s


true_payoffs = st.builds(Truth, st.floats(0.05, 50.0), st.floats(0.67, 4.0), st.booleans())


def facts_of(rest: int, block_layers: int, **others: Any) -> Facts:
    """Layers of one block of each class, and all other layers."""
    return Facts(layers=rest + block_layers, block_layers=block_layers, **others)


all_facts = st.builds(
    facts_of,
    steps_left=st.integers(20, 10**6),
    step_s=st.floats(1e-4, 20.0),
    sizes_vary=st.booleans(),
    rest=st.integers(0, 1000),
    block_layers=st.integers(1, 10),
    blocks=st.integers(0, 100),
    cold=st.booleans(),
    possible=st.sampled_from([(LOSS, MODEL, BLOCKS), (MODEL, BLOCKS), (MODEL,)]),
    spent_s=st.floats(0.0, 50.0),
    operations=st.integers(0, 10**5),
)


@settings(max_examples=300, deadline=None)
@given(all_facts, st.fixed_dictionaries(dict.fromkeys(SPEEDUPS, true_payoffs)))
@example(replace(GPT2, steps_left=3000), dict.fromkeys(SPEEDUPS, Truth(1.0, 1.0, works=True)))
@example(replace(GPT2, steps_left=3000), dict.fromkeys(SPEEDUPS, Truth(50.0, 4.0, works=True)))
@example(replace(GPT2, steps_left=3000), dict.fromkeys(SPEEDUPS, Truth(1.0, 4.0, works=False)))
@example(replace(GPT2, steps_left=3000), dict.fromkeys(SPEEDUPS, Truth(1.0, 0.67, works=True)))
def test_a_wrong_estimate_costs_at_most_a_tenth(facts: Facts, truth: dict[str, Truth]):
    """Whatever compiling really costs and gains: up to 50 times as much, up to half as slow again, or in vain."""
    assert simulated_s(facts, truth) <= 1.1 * facts.eager_s + 1e-9


@settings(max_examples=300, deadline=None)
@given(
    all_facts,
    st.floats(0.0, 0.7),
    st.floats(0.05, 1.25),
    st.floats(1.0, 1.5),
)
@example(Facts(34, step_s=1.0, sizes_vary=False, layers=5, block_layers=5), 0.5, 1.25, 1.0)
def test_a_gain_that_was_estimated_about_right_costs_nothing(facts: Facts, share: float, cost: float, more: float):
    """If compiling works, takes at most a quarter longer than expected and saves what the kernels have shown."""
    facts = replace(facts, saving_s=share * facts.step_s)
    truth = {target: Truth(cost, more * expected(facts, target).speedup, works=True) for target in SPEEDUPS}
    assert simulated_s(facts, truth) <= facts.eager_s + COMPARED * facts.step_s + 1e-9


@settings(max_examples=300, deadline=None)
@given(all_facts, st.floats(0.0, 0.7), st.fixed_dictionaries(dict.fromkeys(SPEEDUPS, true_payoffs)))
def test_a_gain_that_does_not_come_costs_at_most_a_half(facts: Facts, share: float, truth: dict[str, Truth]):
    """Code is in vain although kernels have shown a gain, or takes up to 50 times as long to generate."""
    facts = replace(facts, saving_s=share * facts.step_s)
    assert simulated_s(facts, truth) <= 1.5 * facts.eager_s + 1e-9


@settings(max_examples=300, deadline=None)
@given(
    all_facts,
    st.floats(0.1, 1000.0),
    st.floats(0.5, 4.0),
    st.floats(0.2, 1.25),
    st.floats(0.91, 1.5),
)
def test_a_record_that_is_about_right_costs_at_most_a_tenth(facts, cost_s, speedup, cost, gain):
    """Compiling takes up to a quarter longer than before, and gains up to a tenth less."""
    facts = replace(facts, cold=False, possible=(MODEL,), records={MODEL: Payoff(cost_s, speedup)})
    compared_s = COMPARED * facts.step_s  # is part of a measured cost
    total_s = simulated_s(facts, {MODEL: Truth(cost, speedup * gain, works=True)})
    assert total_s - compared_s <= 1.1 * facts.eager_s + 1e-9


@pytest.mark.parametrize("steps", [20, 100, 2_000])
def test_a_gain_is_taken(steps):
    """The rule is no excuse to compile nothing: a record of a cheap compilation is used even in a short run."""
    facts = replace(GPT2, steps_left=steps, records={LOSS: Payoff(0.1, 1.5)})
    assert simulated_s(facts, {LOSS: Truth(1.0, 1.5, works=True)}) < 0.97 * facts.eager_s
