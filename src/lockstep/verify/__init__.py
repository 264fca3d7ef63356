"""N ranks against one, on the user's own task: the same training in several layouts, compared."""
