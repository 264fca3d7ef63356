"""What a rank uses of its machine: cores and threads, memory, network interfaces."""
