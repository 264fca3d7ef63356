"""Choose before spending."""
