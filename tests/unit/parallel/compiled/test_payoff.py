"""Whether compiling pays: the rule, the records of earlier runs on this machine, and the time of a step."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.parallel.compiled import payoff
from lockstep.parallel.compiled.payoff import (
    COMPARED,
    RECORD_MARGIN,
    SLOWER,
    SPEEDUPS,
    STEPS,
    STEPS_VARYING,
    Facts,
    Payoff,
    StepTimer,
    decide,
    expected,
    model_key,
    read_records,
    write_record,
)
from lockstep.parallel.compiled.targets import BLOCKS, LOSS, MODEL

# About GPT-2 124M: 12 blocks of 6 layers.
GPT2 = Facts(steps_left=1000, step_s=0.1, sizes_vary=False, layers=76, blocks=12, block_layers=6, all_block_layers=72)


def test_a_long_run_of_one_size_compiles_the_loss():
    decision = decide(replace(GPT2, steps_left=100_000))
    assert decision.targets == (LOSS, MODEL, BLOCKS)
    assert "100000 steps of 100 ms are left" in decision.reason


def test_a_shorter_run_compiles_only_what_is_cheap():
    """Without blocks that share kernels, the whole takes long."""
    many = replace(GPT2, steps_left=3000, layers=160, all_block_layers=6)
    assert decide(many).targets == (BLOCKS,)


def test_the_first_compilation_of_a_machine_takes_longer():
    warm = expected(GPT2, LOSS).cost_s
    assert expected(replace(GPT2, cold=True), LOSS).cost_s > warm + 5


def test_a_short_run_stays_eager_and_says_why():
    decision = decide(replace(GPT2, steps_left=200))
    assert decision.targets == ()
    assert decision.reason.startswith("it would not pay: 200 steps of 100 ms are left")


def test_a_try_that_may_be_in_vain_must_be_short():
    """It would save more than it costs, if the estimates are right."""
    decision = decide(replace(GPT2, steps_left=1000))
    assert decision.targets == ()
    assert decision.reason.endswith("it would save about 33 s for 12 s; a first try may take 7 s of them")


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
    assert decision.limit_s == RECORD_MARGIN * 2.0
    slower = {target: Payoff(20.0, 0.9) for target in SPEEDUPS}
    assert decide(replace(GPT2, steps_left=10**9, records=slower)).targets == ()


def test_a_record_is_no_promise_once_torchs_files_are_gone():
    """They lie in a folder that a restart of the machine may empty."""
    known = replace(GPT2, steps_left=100, records={LOSS: Payoff(2.0, 2.0)})
    assert decide(replace(known, cold=True)).targets == ()
    assert decide(replace(known, cold=True, steps_left=100_000)).targets[0] == LOSS


def test_what_did_not_end_is_tried_again_only_in_a_longer_run():
    tried = replace(GPT2, steps_left=3000, possible=(LOSS,))
    limit_s = decide(tried).limit_s
    assert limit_s > 0
    tried = replace(tried, records={LOSS: Payoff(limit_s, 1.5, measured=False)})
    assert decide(tried).targets == ()
    assert decide(replace(tried, steps_left=10_000)).targets == (LOSS,)


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


def facts_of(rest: int, repeated: int, block_layers: int, **others: Any) -> Facts:
    """Layers outside of blocks, layers of further blocks, and layers of one block of each class."""
    in_blocks = block_layers + repeated
    return Facts(layers=rest + in_blocks, block_layers=block_layers, all_block_layers=in_blocks, **others)


all_facts = st.builds(
    facts_of,
    steps_left=st.integers(20, 10**6),
    step_s=st.floats(1e-4, 20.0),
    sizes_vary=st.booleans(),
    rest=st.integers(0, 1000),
    repeated=st.integers(0, 1000),
    block_layers=st.integers(1, 10),
    blocks=st.integers(0, 100),
    cold=st.booleans(),
    possible=st.sampled_from([(LOSS, MODEL, BLOCKS), (MODEL, BLOCKS), (MODEL,)]),
    spent_s=st.floats(0.0, 50.0),
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


# ---- the history of this machine ----


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the history, in a cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep" / "compile.json"


def test_a_record_is_found_again(path):
    write_record("a", LOSS, Payoff(12.34, 1.5))
    write_record("a", MODEL, Payoff(9.0, 1.2))
    write_record("b", LOSS, Payoff(1.0, 1.1))
    assert read_records("a") == {LOSS: Payoff(12.34, 1.5), MODEL: Payoff(9.0, 1.2)}
    assert read_records("c") == {}
    assert [file.name for file in path.parent.iterdir()] == ["compile.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\x00\xff", '{"a": 3}', '{"a": {"x": {"cost_s": "much"}}}', '{"a": {"x": [1]}}']
)
def test_a_damaged_file_is_no_record_and_is_replaced(content, path):
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert read_records("a") == {}
    write_record("b", LOSS, Payoff(1.0, 2.0))
    assert read_records("b") == {LOSS: Payoff(1.0, 2.0)}


def test_a_folder_that_cannot_be_written(path, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    write_record("a", LOSS, Payoff(1.0, 2.0))
    assert read_records("a") == {}


def test_old_records_are_dropped(path):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({str(n): {} for n in range(payoff.MOST_MODELS)}))
    write_record("new", LOSS, Payoff(1.0, 2.0))
    kept = json.loads(path.read_text())
    assert len(kept) == payoff.MOST_MODELS
    assert "0" not in kept
    assert "new" in kept


def test_the_key_depends_on_the_model_and_its_batches():
    cpu = torch.device("cpu")
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    keys = {
        model_key(small, cpu, [[4]]),
        model_key(large, cpu, [[4]]),
        model_key(small, cpu, [[8]]),
    }
    assert len(keys) == 3
    assert model_key(nn.Linear(2, 2), cpu, [[4]]) in keys


# ---- the time of a step ----


class OneRank:
    """Stands in for a runtime."""

    device = SimpleNamespace(type="cpu")
    collectives = SimpleNamespace(gather_json=lambda mine: [mine])


def test_the_step_in_which_a_timer_is_made_does_not_count() -> None:
    timer = StepTimer(warm_up=1, timed=2)
    assert timer.end_step(OneRank()) is None  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        timer.begin_step()
        found.append(timer.end_step(OneRank()))  # type: ignore[arg-type]
    assert found[:2] == [None, None]
    assert found[2] > 0


def test_a_layer_that_blocks_share_counts_once():
    shared = nn.Linear(2, 2)
    blocks = [nn.Sequential(nn.Linear(2, 2), shared) for _ in range(4)]
    assert payoff._count_layers(nn.Sequential(*blocks)) == payoff._count_layers(*blocks) == 5
