"""The rule that decides what to compile: a pure function of measured facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.parallel.compiled.decision import (
    BLOCKS,
    LOSS,
    MODEL,
    SPEEDUPS,
    Facts,
    Record,
    decide,
    expected,
)

# About GPT-2 124M: 12 blocks of 6 layers.
GPT2 = Facts(steps_left=1000, step_s=0.1, sizes_vary=False, layers=76, blocks=12, block_layers=6, all_block_layers=72)


def test_a_long_run_of_one_size_compiles_the_loss():
    decision = decide(replace(GPT2, steps_left=100_000))
    assert decision.targets == (LOSS, MODEL, BLOCKS)
    assert "100000 steps of 100 ms are left" in decision.reason


def test_a_shorter_run_compiles_only_what_is_cheap():
    """Without blocks that share kernels, the whole takes long."""
    many = replace(GPT2, steps_left=1500, layers=160, all_block_layers=6)
    assert decide(many).targets == (BLOCKS,)


def test_the_first_compilation_of_a_machine_takes_longer():
    warm = expected(GPT2, LOSS)[0]
    assert expected(replace(GPT2, cold=True), LOSS)[0] > warm + 5


def test_a_short_run_stays_eager_and_says_why():
    decision = decide(replace(GPT2, steps_left=200))
    assert decision.targets == ()
    assert decision.reason.startswith("it would not pay: 200 steps of 100 ms are left")


def test_sizes_that_vary_compile_blocks_alone():
    assert decide(replace(GPT2, steps_left=100_000, sizes_vary=True)).targets == (BLOCKS,)
    # Without repeated blocks there is nothing but the whole.
    assert decide(replace(GPT2, steps_left=100_000, sizes_vary=True, blocks=0)).targets[0] == LOSS


def test_without_a_function_the_model_is_compiled():
    assert decide(replace(GPT2, steps_left=100_000, possible=(MODEL, BLOCKS))).targets[0] == MODEL


def test_a_record_decides_for_and_against():
    short = replace(GPT2, steps_left=100)
    assert decide(replace(short, records={LOSS: Record(2.0, 2.0)})).targets == (LOSS,)
    slower = {target: Record(20.0, 0.9) for target in SPEEDUPS}
    assert decide(replace(GPT2, steps_left=10**9, records=slower)).targets == ()


@pytest.mark.parametrize("steps", [20, 100, 500, 2_000, 20_000])
@pytest.mark.parametrize("step_s", [0.003, 0.1, 5.0])
@pytest.mark.parametrize("layers", [10, 140, 800])
def test_a_gain_of_a_tenth_is_enough_not_to_lose(steps, step_s, layers):
    """The run never takes more than a tenth longer than eager if steps gain 1.1, or compiling costs half as much
    again."""
    facts = replace(GPT2, steps_left=steps, step_s=step_s, layers=layers, all_block_layers=6)
    eager_s = steps * step_s
    for target in decide(facts).targets:
        cost_s, speedup, _ = expected(facts, target)
        assert cost_s + eager_s / 1.1 <= 1.11 * eager_s
        assert 1.5 * cost_s + eager_s / speedup <= 1.1 * eager_s
