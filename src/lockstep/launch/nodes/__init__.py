"""A job on several machines: which node coordinates it, and what the other nodes do."""
