"""The check at the start of a run: it calls the loss on a few samples and refuses what would train the wrong model.

`check.py` defines what is compared, and in which order; `checked_run.py` says what it uses of a run. `data.py` compares
what the ranks and their workers read, `probe.py` calls the loss, `random_numbers.py` makes its random numbers
comparable, `snapshot.py` records and restores what it changes, and `mistakes.py` decides which mistake explains the
numbers.
"""
