"""Which samples a step was made of: written down on request, and named when they have spoiled it."""

from __future__ import annotations

import math
import time
from pathlib import Path

from lockstep.engine.tally import Piece
from lockstep.observe.sinks import JsonlSink

MOST_IDS = 8  # named of one micro-batch


class SampleLog:
    """`samples/rank-N.jsonl`: one line per step. A step that was repeated has several; the last attempt's counts."""

    def __init__(self, run_dir: Path, rank: int, attempt: int):
        folder = run_dir / "samples"
        folder.mkdir(exist_ok=True)
        self._sink, self._attempt = JsonlSink(folder / f"rank-{rank}.jsonl"), attempt

    def write(self, step: int, pieces: list[Piece]) -> None:
        ids = [[piece.epoch, *(int(i) for i in piece.ids)] for piece in pieces]
        self._sink.write({"step": step, "attempt": self._attempt, "time": time.time(), "epoch_and_ids": ids})

    def close(self) -> None:
        self._sink.close()


def blame(pieces: list[Piece], losses: list[float], rank: int, spike: bool) -> list[str]:
    """This rank's micro-batches that look guilty: a loss that is not finite; for a spike, the largest loss."""
    pairs = list(zip(pieces, losses, strict=True))
    if spike:
        worst = [max(pairs, key=lambda pair: pair[1])] if pairs else []
    else:
        worst = [(piece, loss) for piece, loss in pairs if not math.isfinite(loss)]
    return [f"rank {rank}, micro-batch {piece.index}: loss {loss:.4g}{_samples(piece)}" for piece, loss in worst]


def _samples(piece: Piece) -> str:
    ids = [str(int(i)) for i in piece.ids[:MOST_IDS]]
    if not ids:
        return ""
    return f", samples {', '.join(ids)}" + (
        f" and {len(piece.ids) - MOST_IDS} more" if len(piece.ids) > MOST_IDS else ""
    )
