"""The user's torch schedulers: how Lockstep steps them, their state in checkpoints, and their rates in advance."""
