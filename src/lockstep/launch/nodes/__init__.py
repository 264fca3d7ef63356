"""A job on several nodes: which node coordinates it, and what the other nodes do."""
