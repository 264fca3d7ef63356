"""The set-up of a run: `open_run` returns a `RunBuilder`, and its `setup_model` and `setup_run` make the rest."""

from lockstep.engine.setup.builder import RunBuilder, open_run

__all__ = ["RunBuilder", "open_run"]
