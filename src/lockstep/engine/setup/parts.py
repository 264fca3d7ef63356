"""The parts of a run besides its model and its data that checkpoints hold."""

from __future__ import annotations

from lockstep.checkpoint.state.part import Part
from lockstep.errors import UserError


class Parts(dict[str, Part]):
    """Objects with `state_dict` and `load_state_dict`, by the names under which checkpoints hold their state."""

    is_open = True  # until the checkpoints are opened: a part that came later would be saved, and not restored

    def add(self, name: str, part: Part) -> None:
        """Save and restore `part` with every checkpoint. The name "data" is reserved for the data source."""
        if name in ("data", *self):
            raise UserError(f"{name!r} cannot be saved with the run: the name is taken", "", "use another name")

        if not hasattr(part, "load_state_dict"):
            raise UserError(
                f"{name!r} cannot be saved with the run: it has state_dict() and no load_state_dict()",
                "a resumed run could not restore it",
                "add load_state_dict(state), or remove state_dict()",
            )

        if not self.is_open:
            raise UserError(
                f"{name!r} cannot be saved with the run: its checkpoints are already open",
                "it would be saved, but a resumed run would not restore it",
                "add it before the first step: call run.register before run.steps",
            )

        self[name] = part
