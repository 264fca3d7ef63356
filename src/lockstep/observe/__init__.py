"""Observes a run without slowing it: metrics and events go to files, to the terminal and to a report.

Only `metrics` and `recorder`, which read from the device, import torch. The rest also works in the launcher, and on a
laptop that has nothing but the run folder.
"""
