"""What a process is and has: its rank, its device, its process group, its heartbeat."""
