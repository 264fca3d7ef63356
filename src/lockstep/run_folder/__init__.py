"""The folder of a run, as its launcher uses it: how it is chosen, locked and watched."""
