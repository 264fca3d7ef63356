"""What the launchers of several nodes say to each other, and the door at which a stranger is turned away."""
