"""The messages between processes of a job, their sockets, and the check of connections."""
