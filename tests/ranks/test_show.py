"""What a task shows at the end: many small forwards, as a text that is written word by word needs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine import loop
from lockstep.engine.run import Run
from lockstep.parallel import fsdp, same_parts
from lockstep.pulse import Pulse
from lockstep.runtime import context
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import configured
from ranks.test_strategies import BASE, STRATEGIES, Ragged

WORDS = 20
PARTS = 5  # four blocks, and the rest: what is gathered as one


class Writing(Ragged):
    """Notes where the launcher would see it."""

    def __init__(self, pulse: Pulse, gathered: list[int]) -> None:
        self.pulse, self.gathered = pulse, gathered
        self.after_steps: set[str] = set()
        self.at_end: tuple[str, int] | None = None

    def after_step(self, model: nn.Module, step: int) -> None:
        self.after_steps.add(self.pulse.phase)

    def show(self, model: nn.Module) -> str:
        before = len(self.gathered)
        text = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        for _ in range(WORDS):
            text = torch.cat((text, model(text)[:, -1:].argmax(-1)), dim=1)
        self.at_end = self.pulse.phase, len(self.gathered) - before
        return " ".join(map(str, text[0].tolist()))


def written(world: World, store: Any, values: dict[str, Any], room: bool) -> dict[str, Any]:
    """A job."""
    resolved = configured(BASE | values | {"steps": 3, "evaluate.at_end": False})
    gathered: list[int] = []
    original, has_room = same_parts._ComparedGather.__call__, fsdp._has_room

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        gathered.append(self._number)
        return original(self, *args, **kwargs)

    same_parts._ComparedGather.__call__ = counted  # type: ignore[method-assign]
    fsdp._has_room = lambda *_: room  # type: ignore[assignment]
    try:
        with context.start(world, resolved.config, store=store) as runtime:
            task = Writing(runtime.pulse, gathered)
            run = Run(resolved, runtime, "test")
            loop.fit(task, run)
            cut = [p.to_local().numel() < p.numel() for p in run.driver.model.parameters() if hasattr(p, "to_local")]
            return {
                "after_steps": task.after_steps,
                "at_end": task.at_end,
                "cut": any(cut),
            }
    finally:
        same_parts._ComparedGather.__call__, fsdp._has_room = original, has_room  # type: ignore[method-assign]


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("name", ["fsdp", "fsdp-grads", "hsdp"])
def test_a_text_gathers_the_model_once_if_there_is_room(pool: Pool, name: str, room: bool) -> None:
    world = 4 if name == "hsdp" else 2
    for found in pool.run(written, STRATEGIES[name], room, world=world):
        phase, gathered = found["at_end"]
        assert phase == "yours"  # which may take its time
        assert found["after_steps"] == {"yours"}
        assert gathered == (PARTS if room or name == "fsdp-grads" else PARTS * WORDS)
        assert found["cut"]  # again


def test_one_rank_shows_where_every_rank_holds_all(pool: Pool) -> None:
    first, second = pool.run(written, STRATEGIES["ddp"], True, world=2)
    assert first["at_end"] == ("yours", 0)
    assert second["at_end"] is None
