"""Which samples a step was made of: logged on request (`log.samples`), and named when they spoiled the step."""

from __future__ import annotations

import math
import time
from pathlib import Path

from lockstep.engine.step import Piece
from lockstep.observe.sinks import JsonlSink

MAX_NAMED_IDS = 8  # of one micro-batch, in a message

Span = tuple[int, int]  # first and last + 1 position in the endless order of samples


class SampleHistory:
    """The samples of this rank's newest steps, and, with `log.samples`, a file with those of all steps.

    The file has one line per step. A step that was repeated after a restart has several; the last attempt's counts.
    """

    def __init__(self, path: Path | None, attempt: int):
        """`path` is that of the file, or None; `attempt` counts the restarts of the run."""
        self._sink: JsonlSink | None = None
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            self._sink = JsonlSink(path)
        self._attempt = attempt
        # On a GPU the outcome of a step is read one step late, so two steps may still be asked about.
        self._spans: list[tuple[int, Span | None]] = []

    def begin_step(self, step: int, span: Span | None) -> None:
        self._spans = [*self._spans[-1:], (step, span)]

    def span_of(self, step: int) -> Span | None:
        """Return the positions of the samples of `step`, which must be one of the last two."""
        return next(span for number, span in self._spans if number == step)

    def end_step(self, step: int, pieces: list[Piece]) -> None:
        """Log the samples of `step`."""
        if self._sink is None:
            return
        ids = [[piece.epoch, *(int(i) for i in piece.ids)] for piece in pieces]
        self._sink.write({"step": step, "attempt": self._attempt, "time": time.time(), "epoch_and_ids": ids})

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def blame(pieces: list[Piece], losses: list[float], rank: int, spike: bool) -> list[str]:
    """Describe the micro-batches of this rank that may have spoiled a step.

    Those are the ones whose loss is not finite; for a loss spike, the one with the largest loss.
    """
    # A spike is judged on the global mean, which every micro-batch contributes to: name the largest contribution.
    pairs = list(zip(pieces, losses, strict=True))
    if spike:
        worst = [max(pairs, key=lambda pair: pair[1])] if pairs else []
    else:
        worst = [(piece, loss) for piece, loss in pairs if not math.isfinite(loss)]
    return [f"rank {rank}, micro-batch {piece.index}: loss {loss:.4g}{_name_samples(piece)}" for piece, loss in worst]


def _name_samples(piece: Piece) -> str:
    if len(piece.ids) == 0:
        return ""
    named = ", ".join(str(int(i)) for i in piece.ids[:MAX_NAMED_IDS])
    more = len(piece.ids) - MAX_NAMED_IDS
    rest = f" and {more} more" if more > 0 else ""
    return f", samples {named}{rest}"
