"""Ready-made tasks: each is a model, its data and its loss, never a loop."""
