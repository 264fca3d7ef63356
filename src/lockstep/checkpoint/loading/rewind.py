"""Rewinds: a run goes back to its last checkpoint while it trains, and then skips the samples of the bad step.

`nonfinite.policy` and `spike.policy` may ask for it. All ranks call these methods together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lockstep.checkpoint.loading.resume import Resumer
from lockstep.errors import UserError, plural
from lockstep.run_folder.start_from import StartFrom
from lockstep.task import BatchSource, StepResult


class Rewinder:
    """Takes a run back to its last checkpoint, and counts how often it has done so."""

    def __init__(self, resumer: Resumer):
        self._resumer = resumer
        self._source = resumer.state.source
        self._pending = resumer.pending
        self._config = config = resumer.config

        # The key of the setting that is "rewind"; None if there is none.
        policies = {"nonfinite.policy": config.nonfinite.policy, "spike.policy": config.spike.policy}
        self._setting = next((key for key, value in policies.items() if value == "rewind"), None)

        # How many times the run has returned to each of its checkpoints, by step.
        self._rewinds: Counter[int] = Counter()

    def ensure_checkpoint(self, save: Callable[[], None]) -> None:
        """Call `save` if a policy is rewind and the run has no checkpoint to which it could rewind. Collective."""
        if self._setting is None:
            return

        self._check_can_skip(self._setting)
        if self._pending.last_committed is not None:
            return

        # The run rewinds to this checkpoint if a step before the next save is not applied.
        save()
        if self._pending.settle():
            raise UserError(
                f"{self._setting}=rewind needs a checkpoint of the start, which could not be written",
                "",
                f"make room on the disk, or set {self._setting}=skip",
            )

    def _check_can_skip(self, setting: str) -> None:
        """Raise if the data source cannot leave out the samples of a step, as `setting`=rewind requires."""
        source = type(self._source)
        if source.skip is BatchSource.skip:
            raise UserError(
                f"{setting}=rewind cannot be used with this data, which cannot skip samples",
                f"the data is read by a {source.__name__}, which has no method skip",
                f"set {setting}=skip, or {setting}=stop",
            )

    def rewind(self, result: StepResult, span: tuple[int, int] | None) -> None:
        """Rewind to the last checkpoint. From now on skip the samples of the step that was not applied. Collective.

        `span`: their positions in the order of the data, as (start, stop).
        """
        # The save in flight may become the last checkpoint.
        self._pending.settle()

        reader = self._resumer.find(StartFrom(newest=True))
        if reader is None:
            raise UserError(
                f"step {result.step + 1} was not applied, and the run cannot rewind: it has no checkpoint",
                result.skip_reason or "",
                "make room on the disk, or choose the policy skip or stop",
            )

        self._count(result, reader.manifest.step)

        # The load resets the source, but samples that were skipped since the checkpoint must stay skipped.
        assert span is not None
        skipped_spans = [*self._source.skipped_spans, span]

        resumed = self._resumer.load(reader, is_rewind=True)
        for skipped_span in skipped_spans:
            self._source.skip(skipped_span)

        start, stop = span
        skipped = f"{plural(stop - start, 'sample')} at positions {start} to {stop - 1}"
        log_event = self._resumer.log_event
        log_event("rewind", step=result.step + 1, to=resumed.step, reason=result.skip_reason, skipped=skipped)

        # The checkpoint may be of an earlier attempt, with other objects.
        for change in resumed.other_changes:
            log_event("warning", reason=f"the rewind did not restore everything: {change}")

    def _count(self, result: StepResult, to: int) -> None:
        """Count a rewind to the checkpoint of step `to`, and raise if there were too many without a new one."""
        # Without a limit, a run whose steps fail for some reason other than their samples would rewind forever.
        self._rewinds[to] += 1
        limit = self._config.nonfinite.max_in_a_row
        if self._rewinds[to] > limit:
            raise UserError(
                f"step {result.step + 1} was not applied, and the run has rewound {limit} times without a new "
                f"checkpoint (nonfinite.max_in_a_row={limit})",
                result.skip_reason or "",
                "lower lr.peak, set clip.norm, or look at the samples that the events name",
            )
