"""init=meta: construct a model that is too large for any single rank."""
