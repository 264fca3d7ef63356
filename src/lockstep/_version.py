"""The version: the only place that states it."""

__version__ = "0.1.0"
