"""The end of a run: `end_training` saves its state and its weights, `close` writes the summary and the report.

A run that is preempted ends with `end_preempted` instead. All functions are collective.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from lockstep.checkpoint.export import Weights, read_weights
from lockstep.checkpoint.state.digests import digest
from lockstep.checkpoint.state.tensor_names import aliases_in, frozen_names, is_extra
from lockstep.config.settings import nested
from lockstep.engine.log.summary import summary_of
from lockstep.errors import Preempted, UserError
from lockstep.observe.head import write_summary
from lockstep.observe.report import write_report
from lockstep.observe.weights import save_weights
from lockstep.parallel.cudagraph.graphs import release_captures
from lockstep.parallel.driver import Driver
from lockstep.run_folder.names import AVERAGED_WEIGHTS, WEIGHTS

if TYPE_CHECKING:
    from lockstep.engine.run import Run  # which calls `end_preempted`


def end_training(run: Run) -> None:
    """Log the last step, write the last checkpoint, then the weights. Raise if no step was applied."""
    run.source.close()

    # After a `break` in a custom loop, the last steps are not logged yet.
    last = run.requests.accept_late()

    run.log.write_rest(last)
    _log_stop(run)

    run.stepper.check_something_learned()
    run.check_replicas()

    # The last evaluation may be the best one. A save that has failed is tried again now, since no later step will.
    pending = run.checkpoints.pending
    pending.note_end(saves_again=True)
    if run.checkpoints.decision.is_due_at_end(run.steps_done):
        run.save_checkpoint()

    # The weights are written while the checkpoint is being committed, unless they may come from it.
    if run.config.checkpoint.final == "best":
        _finish_last_save(run)

    # Write the log lines whose numbers are still on the device.
    run.recorder.poll(wait=True)
    try:
        _save_final_weights(run)
    except UserError:
        # Raised on all ranks. If the weights cannot be written, they can still be exported from this checkpoint.
        pending.note_end(saves_again=False)
        if not pending.settle():
            raise

        # The save has failed as well, and left room: its files are deleted by now.
        _save_final_weights(run)

    _finish_last_save(run)


def _finish_last_save(run: Run) -> None:
    """Wait for the save in flight, and try once more if it fails: there is time, and no later step does it.

    A run whose last checkpoint cannot be written still ends as planned, because its weights are saved. The
    summary says why the checkpoint is missing.
    """
    pending = run.checkpoints.pending
    if pending.settle():
        pending.note_end(saves_again=False)
        run.save_checkpoint()
        pending.settle()


def _log_stop(run: Run) -> None:
    """Log why the run ends before its last step, if it does."""
    # Only the rank that requested a stop knows why.
    reasons = run.runtime.collectives.all_gather_json(run.requests.stop_reason)
    reason = next(filter(None, reasons), None)
    run.requests.stop_reason = reason
    if reason:
        run.recorder.event("stop", step=run.steps_done, reason=reason)


# ---- the weights ----


def _save_final_weights(run: Run) -> None:
    """Write `model.safetensors` and, with `ema.decay`, `ema.safetensors`."""
    # Averages are exchanged with the weights below, and a save may still be copying them.
    run.stepper.update.wait_for_copy()

    trained = run.trained_model
    trained.driver.sync_buffers()
    with trained.optimizers_in_eval():
        _save_weights(run, WEIGHTS)

    if trained.average:
        with trained.averaged_weights():
            _save_weights(run, AVERAGED_WEIGHTS, ema=True)


def _save_weights(run: Run, file: str, ema: bool = False) -> None:
    """Write the current weights of the model to a file of the run folder. Collective."""
    # Gathering sharded parameters is collective: all ranks take part, and only rank 0 gets the result.
    weights, aliases = full_state(run.driver, run.runtime.is_main, run.config.checkpoint.frozen)
    run.runtime.collectives.run_on_rank0(lambda: _write_weights(run, file, weights, aliases, ema))


def full_state(driver: Driver, keep: bool, frozen: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Gather the model's full tensors and the aliases of tied tensors. Collective: every rank must call it.

    Ranks without `keep` get no tensors. `frozen`: whether frozen parameters are gathered.
    """
    # In the order of the state dict, which is the same on every rank: `full_tensor` may be a collective.
    left_out = set() if frozen else frozen_names(driver.model)
    state = {name: value for name, value in driver.model.state_dict().items() if name not in left_out}
    aliases = aliases_in(state)
    tensors = {}

    for name, value in state.items():
        if is_extra(name) or name in aliases:
            continue

        full = driver.full_tensor(name, value)
        if keep:
            tensors[name] = (full if full is value else full.cpu()).contiguous()

    return tensors, aliases


def _write_weights(run: Run, file: str, weights: dict[str, Tensor], aliases: dict[str, str], ema: bool) -> None:
    """Write the weights, or the best checkpoint's, as `checkpoint.final` says, on rank 0."""
    # The files of the run belong to the attempt that continues it.
    run.checkpoints.check_owner()

    if run.config.checkpoint.final == "best":
        best = None
        why = "no checkpoint has a finite value"
        try:
            best = run.checkpoints.best()
        except OSError as error:
            why = f"the checkpoints cannot be listed ({error})"

        found = None
        if best is not None:
            found, why = _of_checkpoint(read_weights(best.checkpoint, ema), weights, aliases)
            why = f"{best.checkpoint.name} {why}"

        if found is None:
            reason = f"checkpoint.final=best: {why}, so {file} has the weights of the last step"
            run.recorder.event("warning", reason=reason)
        else:
            weights = found

    save_weights(run.folder.path / file, weights, aliases)


def _of_checkpoint(
    saved: Weights, weights: dict[str, Tensor], aliases: dict[str, str]
) -> tuple[dict[str, Tensor] | None, str]:
    """Return the values that a checkpoint has for all `weights`; None and the reason if it lacks one.

    It was perhaps saved with another `checkpoint.frozen`: it may have more than `weights`, or only the digests of some.
    """
    found = {}
    for name, now in weights.items():
        tensor = saved.tensors.get(saved.aliases.get(name, name))
        if tensor is not None:
            # A checkpoint may hold float32 masters of weights that the model stores in another format.
            found[name] = tensor.to(now.dtype)
            continue

        # The digest of a tied parameter may be under any of its names.
        names = [name, *(other for other, first in aliases.items() if first == name)]
        digests = {saved.frozen_digests[other] for other in names if other in saved.frozen_digests}
        if digests != {digest(now)}:
            return None, f"does not hold the present value of {name!r}"

        found[name] = now

    return found, ""


# ---- the summary ----


def close(run: Run, text: str | None = None) -> dict[str, Any]:
    """Write the summary and the report, and return the summary. `text` is what the task's `show` returned."""
    run.runtime.heartbeat.beat("end")
    run.recorder.write_late_metrics(run.log.interval.sums, run.steps_done)

    # While the checkpoints are still open: `_release` closes them.
    best = run.runtime.collectives.run_on_rank0(lambda: _describe_best(run))
    _release(run)

    summary = summary_of(run, best)
    if text:
        run.recorder.event("sample", text=text)

    for goal in summary.get("goals", ()):
        run.recorder.event("goal", **goal)

    run.recorder.event("end", **summary)

    run.recorder.close()

    if run.runtime.is_main:
        _write_report(run, summary)

    # No rank ends before the folder is complete.
    run.runtime.collectives.final_barrier()
    run.folder.release_lock()
    return summary


def _describe_best(run: Run) -> dict[str, Any] | None:
    """Return the best checkpoint for the summary, or None if there is none."""
    try:
        best = run.checkpoints.best()
    except OSError as error:
        # The run has trained and saved anyway.
        reason = f"the summary does not name the best checkpoint: the checkpoints cannot be listed ({error})"
        run.recorder.event("warning", reason=reason)
        return None

    if best is None:
        return None

    path = run.folder.as_shown(best.checkpoint.path)
    return {"step": best.checkpoint.step, "metric": best.metric, "value": best.value, "checkpoint": path}


def _release(run: Run) -> None:
    """Return the model and the optimizers to the user without our hooks, with the weights to use from now on."""
    trained = run.trained_model
    trained.optimizers.switch("eval", trained.driver.reshard)
    trained.optimizers.release()
    run.learning_rate.release()

    release_captures(trained.driver.model)
    trained.driver.parts.close()
    run.checkpoints.close()


def _write_report(run: Run, summary: dict[str, Any]) -> None:
    """Write the summary and the report on rank 0, and print where the report is."""
    # The weights are saved, so a failure only prints a message.
    try:
        write_summary(run.folder.path, summary)
        report = write_report(run.folder.path, nested(run.config))
    except OSError as error:
        print(f"lockstep: the summary and the report cannot be written: {error}", file=sys.stderr)
    else:
        if run.config.log.progress != "off":
            print(f"report   {Path(run.folder.shown) / report.name}")


# ---- a preemption ----


def end_preempted(run: Run) -> NoReturn:
    """Raise `Preempted`, which ends this process. All ranks have tried to save at the same step."""
    steps_done = run.steps_done
    run.source.close()

    # If the save failed, there is no checkpoint of this step to report.
    run.checkpoints.pending.note_end(saves_again=False)
    save_failed = run.checkpoints.pending.settle()
    saved = None if save_failed else run.checkpoints.pending.last_location()
    path = run.folder.as_shown(saved) if saved else None

    # Only some ranks may have received the signal.
    notice = run.runtime.notice
    received = run.runtime.collectives.all_gather_json([notice.signal, notice.original])
    signal, original = next((both for both in received if both[0]), ("SIGTERM", "SIGTERM"))

    run.recorder.event("preempted", step=steps_done, signal=original, checkpoint=path)
    run.runtime.collectives.final_barrier()
    raise Preempted(steps_done, signal, path, save_failed)
