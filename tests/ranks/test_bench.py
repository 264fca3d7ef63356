"""What benchmarks measure on real ranks, by counters and time stamps: overlap, bytes, leaks, and the trace of a run."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep import cli
from lockstep.bench.kinds.memory import judge
from lockstep.bench.kinds.recovery import EVERY
from lockstep.bench.ranks import data, memory
from lockstep.bench.ranks.scaling import measure_apart, trace
from lockstep.bench.ranks.turns import by_lockstep, opened
from lockstep.bench.ranks.workload import GPTTask, load, settings_of
from lockstep.bench.results import read
from lockstep.config import resolve_for
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.parallel.ddp.driver import bucket_mb_for
from lockstep.runtime import context, environments
from lockstep.runtime.world import World
from pool import Pool

STEPS = 6


def traced(world: World, store: dist.Store, folder: str, values: dict[str, Any]) -> dict[str, Any]:
    task = GPTTask(width=128, layers=3, context=32, samples=256)
    given = {"local_batch": 4, "log.every": STEPS, "run_dir": f"{folder}/run", "threads": 1, "device": "cpu", **values}
    resolved = settings_of(GPTTask, [], given)
    with context.start(world, resolved.config, store) as runtime:
        steps = by_lockstep(task, resolved, runtime, STEPS)
        run = next(steps)
        found = trace(run, steps, Path(folder) / f"trace-{world.rank}.json")
        found["gradient_bytes"] = sum(p.numel() * 4 for p in run.driver.model.parameters())
        steps.close()
    return found


def test_buckets_overlap_with_the_backward_and_one_flat_bucket_does_not(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "flat").mkdir()
    many = pool.run(traced, str(tmp_path / "many"), {}, world=2)
    flat = pool.run(traced, str(tmp_path / "flat"), {"ddp.bucket_mb": 1e5}, world=2)
    for rank in many:
        assert len(rank["collectives"]) > 1
        assert rank["overlap_fraction"] > 0
        assert rank["kinds"]["exposed communication"] < rank["communication"]
    for rank in flat:
        assert len(rank["collectives"]) == 1
        assert rank["communication"] > 0
        assert rank["overlap_fraction"] == 0

    # Both send the same bytes: the gradients, and the control word.
    for rank in (*many, *flat):
        assert 0 < rank["bytes_per_step"] - rank["gradient_bytes"] < 200
        assert rank["steps"] == STEPS
        assert abs(sum(rank["kinds"].values()) - rank["seconds"]) < 1e-6
        assert all(rank["kinds"][kind] > 0 for kind in ("data wait", "forward", "backward", "optimizer", "framework"))


def test_a_rank_that_exchanges_nothing_says_how_long_each_step_took(tmp_path: Path) -> None:
    layers = [("test", {"device": "cpu", "checks.loss": "off"})]
    arguments = {"target": "mlp", "layers": layers, "mode": "weak", "batch": 4, "threads": 1, "folder": str(tmp_path)}
    rank = measure_apart({**arguments, "block": 3})
    next(rank)
    for _ in range(2):
        turn = rank.send("turn")
        assert len(turn["step_seconds"]) == 3
        assert all(seconds > 0 for seconds in turn["step_seconds"])
        # The turn has nothing else in it but the clock.
        assert sum(turn["step_seconds"]) <= turn["seconds"] < sum(turn["step_seconds"]) + 0.5
    rank.close()


@pytest.mark.parametrize(("block", "every"), [(1, 10), (40, 40)])
def test_turns_of_one_step_have_no_log_line_each(block: int, every: int) -> None:
    """A line is one more collective."""
    given = {"target": "mlp", "layers": [("test", {"device": "cpu"})], "block": block, "threads": 1}
    with opened(given, {}) as rank:
        assert rank.settings.config.log.every == every


def test_a_model_of_any_size_has_about_four_buckets() -> None:
    sizes = {megabytes: bucket_mb_for([nn.Parameter(torch.empty(megabytes, 2**18))]) for megabytes in (1, 4, 8, 100)}
    assert sizes == {1: 1.0, 4: 1.0, 8: 2.0, 100: 25.0}
    assert bucket_mb_for([nn.Parameter(torch.empty(2**18, 1000, device="meta"))]) == 25.0


LEAKING = """
from lockstep.bench.ranks.workload import MLPTask


class Tidy(MLPTask):
    def __init__(self):
        super().__init__(samples=512)


class Leaking(Tidy):
    kept = []

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.kept.append(batch[0].clone())
        return loss
"""


def held(target: str, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    arguments = {
        "target": target,
        "layers": [("test", {"device": "cpu", "checks.loss": "off"})],
        "batch": 32,
        "accumulation": 1,
        "block": 8,
        "threads": 1,
        "folder": str(folder),
    }
    rank = memory.measure(arguments)
    next(rank)
    rows = [rank.send("leak") for _ in range(12)]
    rank.close()
    return [
        {"step": row["step"], "tensors": row["tensors"], "tensor_mb": row["tensor_bytes"] / 1e6}
        | {"resident_mb": row["resident"] / 1e6, "device_mb": 0.0}
        for row in rows
    ]


def test_the_leak_check_fails_on_a_task_that_leaks(tmp_path: Path) -> None:
    file = tmp_path / "tasks.py"
    file.write_text(LEAKING)
    tidy, leaking = (judge(held(f"{file}:{name}", tmp_path / name)) for name in ("Tidy", "Leaking"))
    assert [verdict.passed for verdict in tidy[:2]] == [True, True], tidy
    assert [verdict.passed for verdict in leaking[:2]] == [False, False], leaking
    # One batch of 32 x 64 floats in each step.
    assert leaking[0].value >= 1.0


@pytest.mark.long
def test_starts_and_recoveries_are_measured(tmp_path: Path) -> None:
    for kind, rows in (("start", 2), ("recovery", 1)):
        assert cli.main(["bench", kind, "--worlds", "2", "--repeats", "2", "--out", str(tmp_path)]) == 0
        (section,) = [found for found in read(tmp_path).sections if found.name == kind]
        assert len(section.rows) == rows

    # A rank that is killed is noticed, and fewer steps are repeated than lie between two checkpoints.
    (found,) = section.rows
    assert 0 < found["noticed_s"]["median"] < found["again_s"]["median"]
    assert 0 <= found["repeated"]["high"] <= EVERY + 1
    assert {path.name for path in tmp_path.glob("*.png")} == {"start.png", "recovery.png"}


HOOKED = """
import torch
from lockstep.bench.ranks.workload import MLPTask


class Hooked(MLPTask):
    calls = {"before_batch": 0, "after_step": 0, "scheduler": 0}

    def __init__(self):
        super().__init__(samples=64)

    def before_batch(self, run, micro):
        self.calls["before_batch"] += 1

    def after_step(self, run, result):
        self.calls["after_step"] += 1

    def scheduler(self, optimizer):
        self.calls["scheduler"] += 1
        return torch.optim.lr_scheduler.ConstantLR(optimizer)
"""


def test_what_is_measured_are_the_steps_of_fit_with_the_hooks_of_the_task(tmp_path: Path) -> None:
    file = tmp_path / "hooked.py"
    file.write_text(HOOKED)
    kind: Any = load(f"{file}:Hooked")
    given = {"local_batch": 4, "run_dir": str(tmp_path / "run"), "threads": 1, "device": "cpu"}
    resolved = settings_of(kind, [], given)
    with context.start(environments.detect(), resolved.config) as runtime:
        steps = by_lockstep(kind(), resolved, runtime, 3)
        next(steps)
        next(steps)
        steps.close()
    assert kind.calls == {"before_batch": 6, "after_step": 6, "scheduler": 1}


SLOW_DATA = """
import time
from lockstep.bench.ranks.workload import MLPTask


class Samples:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.inner[index]


class SlowData(MLPTask):
    def __init__(self):
        super().__init__(samples=512)

    def data(self):
        return Samples(super().data())
"""


def test_a_loader_is_not_faster_than_its_workers_after_a_pause_in_which_they_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    take = data.CachedSource.take
    monkeypatch.setattr(data.CachedSource, "take", lambda self: taken.append(1) or take(self))
    file = tmp_path / "slow_data.py"
    file.write_text(SLOW_DATA)
    layers = [("test", {"device": "cpu", "checks.loss": "off"})]
    arguments = {"target": f"{file}:SlowData", "layers": layers, "batch": 4, "block": 2, "threads": 1, "workers": 1}
    rank = data.measure({**arguments, "folder": str(tmp_path)})
    next(rank)
    rank.send("turn")
    time.sleep(0.1)  # others take their turns
    found = rank.send("turn")
    rank.close()
    # Four samples of 2 ms each, by one worker. If this process has to wait for a core before it begins to time, the
    # worker fills its queue again meanwhile: a fifth of what is timed.
    assert found["ours"] >= 0.75 * 4 * 0.002
    assert found["torch"] >= 0.75 * 4 * 0.002
    # Training reads none of them: each of two turns has two steps, all of them on batches that are there.
    assert len(taken) == 4


def test_a_profile_that_no_step_reaches_is_a_warning(tmp_path: Path) -> None:
    values = {"steps": 2, "global_batch": 8, "device": "cpu", "log.progress": "off", "run_dir": str(tmp_path / "run")}
    values |= {"threads": 1, "profile.count": 1, "profile.after": 5, "checks.loss": "off"}
    resolved = resolve_for({}, {}, [("test", values)])
    with context.start(environments.detect(), resolved.config) as runtime:
        loop.fit(GPTTask(width=32, layers=1, context=8, samples=16), open_run(resolved, runtime, "late"))
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "no step is profiled: the run ends at step 2, and profile.after=5" in events


def profiled(world: World, store: dist.Store, folder: str, steps: int | None) -> dict[str, Any]:
    values = {"steps": 5, "global_batch": 8, "device": "cpu", "log.progress": "off", "run_dir": folder, "threads": 1}
    values |= {"profile.count": steps, "profile.after": 2, "evaluate.at_end": False}
    resolved = resolve_for({}, {}, [("test", values)])
    with context.start(world, resolved.config, store) as runtime:
        torch.manual_seed(0)
        return loop.fit(GPTTask(width=64, layers=1, context=16, samples=64), open_run(resolved, runtime, "profiled"))


def test_a_profiled_run_trains_the_same_and_says_where_its_time_goes(pool: Pool, tmp_path: Path) -> None:
    plain, with_profile = tmp_path / "plain", tmp_path / "profiled"
    pool.run(profiled, str(plain), None, world=2)
    pool.run(profiled, str(with_profile), 2, world=2)
    assert (plain / "model.safetensors").read_bytes() == (with_profile / "model.safetensors").read_bytes()
    assert not (plain / "profile").exists()

    found = json.loads((with_profile / "profile" / "breakdown.json").read_text())
    assert (found["steps"], found["step"], len(found["ranks"])) == (2, 4, 2)
    for rank in found["ranks"]:
        assert abs(sum(rank["kinds"].values()) - rank["seconds"]) < 1e-6
        assert 0 < rank["mfu"] < 1
        # Forward and backward: 6 x weights of its matrices x tokens, and attention where torch counts it.
        assert 1.0 <= rank["flops"] / (6 * (12 * 64 * 64 + 64 * 256) * 4 * 16) < 1.3

    events = json.loads(gzip.decompress((with_profile / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    for rank in range(2):
        mine = [event for event in events if event.get("pid") == rank]
        assert sum(event["name"] == "c10d::allreduce_" for event in mine) >= 2
        assert {"data wait", "forward", "backward", "optimizer"} <= {e["name"] for e in mine if e.get("cat") == "phase"}
    report = (with_profile / "report.html").read_text()
    assert "Where the time goes" in report
    assert "MFU" in report
    assert "Where the time goes" not in (plain / "report.html").read_text()
