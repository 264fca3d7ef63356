"""Frozen language models that read a context through a few learned vectors instead of its text."""

from lockstep.recipes.latent_wire.task import LatentWire

TASK = LatentWire
