"""init=meta: a model that no single rank could hold."""
