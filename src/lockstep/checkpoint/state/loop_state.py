"""What the objects of the loop keep between two steps: the clock, the log line, a requested stop, early stopping.

These objects are made after all other state is restored, because they need the plan.
"""

from __future__ import annotations

from lockstep.checkpoint.state.encoding import JsonDict
from lockstep.checkpoint.state.stateful import Stateful


class LoopState:
    """The state of the objects of the loop, by name. It consists of plain values, without tensors.

    A resume restores the state before these objects exist, so `add_and_restore` restores each of them.
    `load_state_dict` restores the objects that are there at a rewind.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._kept_in_rewinds: set[str] = set()

        # Their state in the checkpoint from which the run was resumed; None: the run was not resumed.
        self._saved: JsonDict | None = None

    def add_and_restore(self, name: str, stateful: Stateful, rewinds: bool = True) -> None:
        """Save the state of an object from now on, and restore it at once if the run was resumed.

        An older version may not have saved the object, so each value of its state has a default. `rewinds`: whether a
        rewind restores it, too.
        """
        assert name not in self._objects, name
        self._objects[name] = stateful
        if not rewinds:
            self._kept_in_rewinds.add(name)

        if self._saved is not None:
            stateful.load_state_dict(self._saved.get(name, {}))

    def state_dict(self) -> JsonDict:
        """Return the state of all objects. Collective."""
        return {name: stateful.state_dict() for name, stateful in self._objects.items()}

    def load_state_dict(self, saved: JsonDict) -> None:
        """Restore the objects that a rewind restores. At a resume there are none yet."""
        self._saved = saved
        for name, stateful in self._objects.items():
            if name not in self._kept_in_rewinds:
                stateful.load_state_dict(saved.get(name, {}))
