"""The check at the start of a run: it computes the loss on a few samples and names what would train the wrong model.

`check.py` says what is compared and in which order; `data.py` compares what the ranks and their workers read,
`probe.py` calls the loss, `random_numbers.py` holds still what it draws, `kept_state.py` notes and restores what it
changes, and `judge.py` tells the causes apart.
"""
