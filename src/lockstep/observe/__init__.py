"""See a run without slowing it: numbers to files, to the terminal and to a page.

Only `metrics` and `recorder` (what is read from the device) import torch; the rest works in the process that launches,
and on a laptop that holds nothing but the run folder.
"""
