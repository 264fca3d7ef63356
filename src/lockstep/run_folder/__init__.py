"""The folder of a run: what it holds, how it is chosen and locked, and where a run starts. Imports no torch."""
