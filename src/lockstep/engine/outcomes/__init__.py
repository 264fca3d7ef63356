"""The outcomes of steps: whether each is applied, when the host knows it, and what follows."""
