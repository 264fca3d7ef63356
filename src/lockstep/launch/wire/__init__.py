"""What processes of a job say to each other over sockets, and the door at which a stranger is turned away."""
