"""What memory holds, what to type when it runs out, and how the next attempt goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from again import Again
from lockstep.config import RunConfig
from lockstep.config.sections import RestartConfig
from lockstep.engine.diagnose import explained
from lockstep.errors import SmallerMicroBatch, UserError
from lockstep.launch.decisions.recovery import End, Restart, Situation, after_failure
from lockstep.launch.failure import PROGRAM_ERROR, Failure
from lockstep.launch.job import LauncherSettings
from lockstep.launch.ranks import rank_record
from lockstep.optim.optimizers import Optimizers
from lockstep.parallel.calls.chain import CallChain
from lockstep.parallel.cudagraph.graphs import WARMUP_CALLS, GraphedCall
from lockstep.parallel.driver import RankRole
from lockstep.plan.memory import Footprint, amount, bytes_of, options
from lockstep.plan.plan import make_plan, smaller_micro_batch
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER

GIB = 2**30
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 512.00 MiB is "
    "free. Process 1 has 139.30 GiB memory in use."
)


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 B"), (2048, "2.0 KiB"), (3.4 * 2**20, "3.4 MiB"), (2048 * GIB, "2048.0 GiB")]
)
def test_amounts(count: float, text: str) -> None:
    assert amount(count) == text


def test_what_two_names_share_counts_once() -> None:
    weight, other = torch.zeros(10), torch.zeros(3, dtype=torch.float64)
    assert bytes_of([weight, weight.view(5, 2), other, torch.zeros(0)]) == 64


def typed(held: Footprint, world: int = 4, micro_batch: int = 8, blocks: int = 4, **values: Any) -> dict[str, Any]:
    found = options(held, RunConfig(**values), world, micro_batch, blocks)
    return {option.typed: option.saves for option in found}


HELD = Footprint(parameters=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, activations=8 * GIB)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {},
            {"micro_batch=4": 4, "remat=full": 6, "strategy=fsdp": 12, "strategy=fsdp fsdp.offload=true": 16},
        ),
        ({"micro_batch": 1, "remat": "full", "strategy": "fsdp"}, {"fsdp.offload=true": 16}),
        ({"blocks": 0, "strategy": "zero1"}, {"micro_batch=4": 4, "strategy=fsdp": 6}),
        ({"strategy": "fsdp", "fsdp": {"offload": True}, "blocks": 0, "micro_batch": 3}, {"micro_batch=2": 8 / 3}),
        ({"world": 1, "blocks": 0, "micro_batch": 1}, {"strategy=fsdp --nproc 2": 8}),
    ],
)
def test_options_and_what_they_save(values: dict[str, Any], expected: dict[str, float]) -> None:
    own = {key: values.pop(key) for key in ("world", "micro_batch", "blocks") if key in values}
    found = typed(HELD, **own, **values)
    assert {key: found[key] for key in expected} == {key: round(size * GIB) for key, size in expected.items()}
    if "strategy" in values and values["strategy"] == "fsdp":
        assert list(found) == list(expected)


def test_without_a_count_of_activations_nothing_is_promised() -> None:
    found = typed(Footprint(4, 4, 8))
    assert found["micro_batch=4"] is None
    assert "activations not known" in str(Footprint(4, 4, 8))


# ---- an error becomes advice ----------------------------------------------------------------------------


def a_builder(folder: Path, phase: str = "compute", **values: Any) -> Any:
    """As much of a RunBuilder, with its Run, as an explanation needs: after a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    config = RunConfig(**({"global_batch": 8, "steps": 5} | values))
    runtime = SimpleNamespace(
        world=SimpleNamespace(size=1, rank=0), device=torch.device("cpu"), heartbeat=SimpleNamespace(phase=phase)
    )
    run = SimpleNamespace(
        config=config,
        plan=make_plan(config, 1, 100),
        runtime=runtime,
        progress=SimpleNamespace(step=2),
        steps_done=3,
        folder=SimpleNamespace(path=folder),
    )
    return SimpleNamespace(
        config=config,
        runtime=runtime,
        driver=SimpleNamespace(model=model, role=RankRole(), compiler=None),
        trained_model=SimpleNamespace(optimizers=Optimizers(optimizer, model)),
        run=run,
    )


def explain(builder: Any, error: Exception) -> Exception:
    with pytest.raises(Exception) as caught, explained(builder):  # noqa: PT011
        raise error
    return caught.value


def test_a_step_that_does_not_fit(tmp_path: Path) -> None:
    found = explain(a_builder(tmp_path), torch.OutOfMemoryError(TORCH_SAYS))
    assert isinstance(found, UserError)
    assert str(found).startswith("step 3 with micro-batches of 8 does not fit into memory\n")
    assert found.found.startswith("out of memory: 2.0 GiB wanted, 512.0 MiB free; it holds parameters 160 B, ")
    assert "gradients 160 B, optimizer 336 B" in found.found  # two moments, and four step counters
    order = [found.fix.index(word) for word in ("micro_batch=4", "remat=full", "strategy=fsdp", "fsdp.offload=true")]
    assert order == sorted(order)


def test_batches_that_do_not_fit_belong_to_the_next_step(tmp_path: Path) -> None:
    found = explain(a_builder(tmp_path, phase="data"), torch.OutOfMemoryError(TORCH_SAYS))
    assert str(found).startswith("step 4 with micro-batches of 8 does not fit into memory\n")


def test_what_is_enough_by_itself_is_said(tmp_path: Path) -> None:
    message = TORCH_SAYS.replace("2.00 GiB", "600 bytes").replace("512.00 MiB", "300 bytes")
    found = str(explain(a_builder(tmp_path), torch.OutOfMemoryError(message)))
    assert "in order: strategy=fsdp --nproc 2 (about 328 B less, enough by itself); " in found
    message = message.replace("300 bytes", "200 bytes")
    assert "strategy=fsdp --nproc 2 (about 328 B less)" in str(
        explain(a_builder(tmp_path), torch.OutOfMemoryError(message))
    )


def test_a_limit_counts_and_so_does_what_the_optimizer_has_still_to_make(tmp_path: Path) -> None:
    message = (
        "CUDA out of memory. Tried to allocate 600 bytes. GPU 0 has a total capacity of 139.80 GiB of which 130.00 GiB "
        "is free. 2000 bytes allowed; Of the allocated memory 1700 bytes is allocated by PyTorch, and 0 bytes is "
        "reserved by PyTorch but unallocated."
    )
    builder = a_builder(tmp_path)
    model = builder.driver.model
    builder.trained_model.optimizers = Optimizers(torch.optim.AdamW(model.parameters()), model)
    found = str(explain(builder, torch.OutOfMemoryError(message)))
    assert "600 B wanted, 300 B free of the 2.0 KiB that gpu_memory allows" in found
    assert "optimizer 0 B (and 320 B from its first step on)" in found
    assert "strategy=fsdp --nproc 2 (about 320 B less)" in found  # 620 are missing
    assert "strategy=fsdp fsdp.offload=true --nproc 2 (about 640 B less, enough by itself)" in found


def test_host_memory_too(tmp_path: Path) -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")
    found = str(explain(a_builder(tmp_path), error))
    assert "64 B wanted" in found
    assert "offload" not in found


def test_captured_calls_hold_memory_of_their_own(tmp_path: Path) -> None:
    builder = a_builder(tmp_path)
    model = builder.driver.model
    CallChain.of(model).install("graph", GraphedCall(model, Again(), True, lambda *_, **__: None))
    assert "graph=false" not in str(explain(builder, torch.OutOfMemoryError(TORCH_SAYS)))
    for _ in range(WARMUP_CALLS + 2):
        model(torch.ones(1, 4)).sum().backward()
    found = explain(builder, torch.OutOfMemoryError(TORCH_SAYS))
    assert isinstance(found, UserError)
    assert found.fix.startswith("try these in order: graph=false; micro_batch=4")


def test_an_evaluation_that_does_not_fit(tmp_path: Path) -> None:
    found = explain(a_builder(tmp_path, "evaluate", micro_batch="auto"), torch.OutOfMemoryError(TORCH_SAYS))
    assert "an evaluation in batches of 8" in str(found)
    assert "evaluate.batch=4" in str(found)


def test_before_there_is_a_model(tmp_path: Path) -> None:
    builder = a_builder(tmp_path)
    builder.driver = builder.trained_model = builder.run = None
    assert "the model does not fit into the memory of this device" in str(
        explain(builder, torch.OutOfMemoryError(TORCH_SAYS))
    )


def test_other_errors_pass_as_they_are(tmp_path: Path) -> None:
    error = RuntimeError("size mismatch")
    assert explain(a_builder(tmp_path), error) is error


# ---- micro_batch=auto -----------------------------------------------------------------------------------


def test_auto_leaves_a_note_for_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT_FOLDER, str(tmp_path))
    found = explain(a_builder(tmp_path, micro_batch="auto"), torch.OutOfMemoryError(TORCH_SAYS))
    assert isinstance(found, SmallerMicroBatch)
    assert json.loads((tmp_path / "micro_batch.json").read_text()) == {"micro_batch": 4}


def test_auto_without_a_launcher_and_at_one_sample_gives_advice(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv(ATTEMPT_FOLDER, raising=False)
    assert isinstance(explain(a_builder(tmp_path, micro_batch="auto"), torch.OutOfMemoryError("")), UserError)
    monkeypatch.setenv(ATTEMPT_FOLDER, str(tmp_path))
    found = explain(a_builder(tmp_path, micro_batch="auto", global_batch=1), torch.OutOfMemoryError(""))
    assert isinstance(found, UserError)
    assert "micro_batch=" not in found.fix
    assert not (tmp_path / "micro_batch.json").exists()


def test_the_plan_heeds_the_note() -> None:
    config = RunConfig(global_batch=24, steps=1, micro_batch="auto")
    first, second = make_plan(config, 2, 100), make_plan(config, 2, 100, most=6)
    assert (first.micro_batch, second.micro_batch, second.global_batch, second.accumulation) == (12, 6, 24, 2)
    assert second.reasons["micro_batch"] == "12 did not fit into memory"
    assert make_plan(config, 8, 100, most=6).micro_batch == 3  # more ranks: less for each anyway


@pytest.mark.parametrize(("size", "samples", "smaller"), [(12, 100, 6), (5, 100, 2), (5, None, 1), (9, None, 3)])
def test_one_size_down(size: int, samples: int | None, smaller: int) -> None:
    config = RunConfig(global_batch=size, steps=1, micro_batch="auto")
    assert smaller_micro_batch(make_plan(config, 1, samples)) == smaller


def test_such_an_end_is_restarted_without_any_checkpoint_as_often_as_needed(tmp_path: Path) -> None:
    failure = rank_record.ended_by(SmallerMicroBatch("step 0 does not fit"), 1).failure
    assert failure.traits.asks_for_smaller_micro_batch
    assert "\n" not in failure.text()

    unsaved = Situation(settings=LauncherSettings())
    for settings in (LauncherSettings(), LauncherSettings(restart=RestartConfig(per_hour=0))):
        situation = replace(unsaved, settings=settings, recent_restarts=20, restarts_in_a_row=20)
        assert isinstance(after_failure(failure, situation), Restart)

    usual = Failure(1, "here", 0.0, "ValueError", "again", traits=PROGRAM_ERROR)
    assert isinstance(after_failure(usual, unsaved), End)


def test_auto_is_no_number_to_compare() -> None:
    assert RunConfig(global_batch=4, micro_batch="auto").micro_batch == "auto"
