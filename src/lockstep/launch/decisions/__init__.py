"""What the coordinator decides: phases, attempts and restarts. Nothing here starts a process or waits."""
