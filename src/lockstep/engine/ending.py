"""How a run ends: done, failed, or asked to leave."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.engine.announce import summary_of
from lockstep.engine.folder import write_summary
from lockstep.errors import Preempted
from lockstep.observe.report import write_report
from lockstep.parallel.graphs import forget_recordings

if TYPE_CHECKING:
    from lockstep.engine.run import Run

LAST_SAVE = 5.0  # seconds that a save in flight gets when the run fails


def close(run: Run, text: str | None) -> dict[str, Any]:
    """Write the summary and the report."""
    run.runtime.pulse.beat("end")
    run.optimizers.release()
    forget_recordings(run.driver.model)
    run.keeper.close()
    summary = summary_of(run)
    if text:
        run.recorder.event("sample", text=text)
    for goal in summary.get("goals", ()):
        run.recorder.event("goal", **goal)
    run.recorder.event("end", **summary)
    run.recorder.close()
    if run.runtime.is_main:
        report = _write_end(run, summary)
        if report and run.config.log.progress != "off":
            print(f"report   {Path(run.folder.shown) / report.name}")
    run.runtime.collectives.farewell()  # nobody leaves before the folder is complete
    run.folder.let_go()
    return summary


def fail(run: Run, error: BaseException) -> None:
    """Leave what is known on disk; the error itself goes on its way, whatever happens here."""
    with contextlib.suppress(Exception):
        run.end_loaders()
        if hasattr(run, "driver"):
            forget_recordings(run.driver.model)
        if hasattr(run, "optimizers"):
            run.optimizers.release()
        if hasattr(run, "keeper"):
            run.keeper.close(patience=LAST_SAVE)
        run.recorder.hide()  # whoever started us shows the error, once; a launcher the first, which caused the others
        if not isinstance(error, Preempted):
            run.recorder.event("error", type=type(error).__name__, message=str(error))
        run.recorder.close()
        if run.runtime.is_main:
            write_report(run.run_dir)
    run.folder.let_go()


def leave(run: Run, step: int) -> NoReturn:
    """All ranks have saved at the same step."""
    run.end_loaders()
    safe = run.keeper.settle()
    newest = run.keeper.newest_path() if safe else None
    path = run.folder.as_shown(newest) if newest else None
    signals = [name for name in run.runtime.collectives.gather_json(run.runtime.notice.signal) if name]
    signal = signals[0] if signals else "SIGTERM"
    run.recorder.event("leave", step=step, signal=signal, checkpoint=path)
    run.runtime.collectives.farewell()
    raise Preempted(step, signal, path)


def _write_end(run: Run, summary: dict[str, Any]) -> Path | None:
    """The weights are safe: what cannot be written about them is said, and does not spoil the run."""
    try:
        write_summary(run.run_dir, summary)
        return write_report(run.run_dir)
    except OSError as error:
        print(f"lockstep: the summary and the report cannot be written: {error}", file=sys.stderr)
        return None
