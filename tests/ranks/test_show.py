"""What a task shows at the end: many small forwards, as a text that is written word by word needs them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.fsdp import collective_check, driver
from lockstep.runtime import context
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import ALL_PAIRS, configured
from ranks.test_strategies import BASE, STRATEGIES, Ragged

WORDS = 20
PARTS = 5  # four blocks, and the rest: what is gathered as one


class Writing(Ragged):
    """Notes where the launcher would see it."""

    def __init__(self, heartbeat: Heartbeat, gathered: list[int], fails_after: int | None) -> None:
        self.heartbeat, self.gathered, self.fails_after = heartbeat, gathered, fails_after
        self.after_steps: list[tuple[str, int]] = []
        self.at_end: tuple[str, int] | None = None

    def after_step(self, run: Any, result: Any) -> None:
        self.after_steps.append((self.heartbeat.phase, self.heartbeat.step))

    def show(self, model: nn.Module) -> str:
        before = len(self.gathered)
        text = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        for word in range(WORDS):
            if word == self.fails_after:
                raise ValueError("no more words")
            text = torch.cat((text, model(text)[:, -1:].argmax(-1)), dim=1)
        self.at_end = self.heartbeat.phase, len(self.gathered) - before
        return " ".join(map(str, text[0].tolist()))


def written(
    world: World, store: Any, values: dict[str, Any], roomy: int = 9, fails: tuple[int, int] | None = None
) -> dict[str, Any]:
    """A job. `roomy`: that many ranks have room for the whole model; `fails`: a rank, and after how many words."""
    resolved = configured(BASE | values | {"steps": 3, "evaluate.at_end": False})
    gathered: list[int] = []
    original, memory = collective_check._ComparedGather.__call__, driver._free_memory

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        gathered.append(self._number)
        return original(self, *args, **kwargs)

    collective_check._ComparedGather.__call__ = counted  # type: ignore[method-assign]
    driver._free_memory = lambda *_: (f"memory {world.rank}", 2**40 if world.rank < roomy else 100)  # type: ignore[assignment]
    try:
        with context.start(world, resolved.config, store=store) as runtime:
            task = Writing(runtime.heartbeat, gathered, fails[1] if fails and fails[0] == world.rank else None)
            builder = open_run(resolved, runtime, "test")
            loop.fit(task, builder)
            run = builder.run
            assert run is not None
            before = len(gathered)
            if run.driver.role.collective_forwards:
                for _ in range(2):  # as before it
                    run.driver.model(torch.zeros(1, 1, dtype=torch.int64, device=runtime.device))
            events = read_jsonl(run.folder.path / "events.jsonl")
            return {
                "after_steps": task.after_steps,
                "at_end": task.at_end,
                "afterwards": len(gathered) - before,
                "events": [event for event in events if event["event"] in ("warning", "sample", "end")],
            }
    finally:
        collective_check._ComparedGather.__call__, driver._free_memory = original, memory  # type: ignore[method-assign]


ROOM = [("fsdp", 9), ("fsdp", 1), ("fsdp-grads", 0), ("hsdp", 0)]
EVERY_ROOM = list(itertools.product(("fsdp", "fsdp-grads", "hsdp"), (9, 1, 0)))


@pytest.mark.parametrize(("name", "roomy"), EVERY_ROOM if ALL_PAIRS else ROOM)
def test_a_text_gathers_the_model_once_if_there_is_room(pool: Pool, name: str, roomy: int) -> None:
    world = 4 if name == "hsdp" else 2
    keeps = name == "fsdp-grads"
    for found in pool.run(written, STRATEGIES[name], roomy, world=world):
        phase, gathered = found["at_end"]
        assert phase == "user code"  # which may take its time
        assert found["after_steps"] == [("user code", step) for step in (1, 2, 3)]
        assert gathered == (PARTS if keeps or roomy == 9 else PARTS * WORDS)
        assert found["afterwards"] == (PARTS if keeps else 2 * PARTS)
        told = [event["event"] for event in found["events"]]
        assert told == [*(["warning"] if not keeps and roomy < 9 else []), "sample", "end"]


FAILURES = [("fsdp", (0, 0)), ("tp", (1, 3))]
EVERY_FAILURE = list(itertools.product(("fsdp", "tp"), ((0, 0), (1, 3))))


@pytest.mark.parametrize(("name", "fails"), EVERY_FAILURE if ALL_PAIRS else FAILURES)
def test_an_error_of_one_rank_ends_it_for_all(pool: Pool, name: str, fails: tuple[int, int]) -> None:
    """The others would wait for its forward, and the launcher would start the whole run again."""
    for found in pool.run(written, STRATEGIES[name], 9, fails, world=2):
        warning, end = found["events"]
        assert f"rank {fails[0]}: ValueError: no more words" in warning["reason"]
        assert re.search(r"test_show.py:\d+\)$", warning["reason"])
        assert "Traceback" in warning["traceback"]
        assert end["event"] == "end"


def test_one_rank_shows_where_every_rank_holds_all(pool: Pool) -> None:
    first, second = pool.run(written, STRATEGIES["ddp"], world=2)
    assert first["at_end"] == ("user code", 0)
    assert second["at_end"] is None


def test_how_much_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        device = torch.device("cpu")

        def __init__(self, *every: tuple[str, float]) -> None:
            self.collectives = self
            self.every = list(every)

        def all_gather_json(self, value: Any) -> list[Any]:
            return self.every

    model = nn.Linear(100, 100, bias=False)  # 40,000 bytes
    for every, expected in (
        ([("a", 80_000.0), ("b", 80_000.0)], True),
        ([("a", 80_000.0), ("b", 79_999.0)], False),
        ([("a", 159_999.0), ("a", 159_999.0)], False),  # one device, two ranks
        ([("a", 160_000.0), ("a", 160_000.0), ("b", 80_000.0)], True),
    ):
        assert driver._has_room(model, Told(*every)) == expected, every  # type: ignore[arg-type]
    _, free = driver._free_memory(torch.device("cpu"))
    assert 2**20 < free < 2**60
    torchs = {"mem_get_info": (70, 100), "memory_reserved": 20, "memory_allocated": 5}
    for name, value in torchs.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(driver, "device_name", lambda device: "GPU-1")
    for fraction, expected in ((1.0, 85.0), (0.5, 45.0)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, f=fraction: f)
        assert driver._free_memory(torch.device("cuda", 0)) == ("GPU-1", expected)
