"""Which sample, when, exactly once."""
