"""What processes of a job say to each other over sockets, and which connections are accepted."""
