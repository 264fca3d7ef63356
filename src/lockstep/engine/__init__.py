"""The engine: it sets a run up, goes through its steps, and ends it.

setup/          makes a Run (run.py) from the settings, the model and the data
loop.py         goes through the steps of a task; own_loop.py and own_step.py through those of a custom loop
step.py         one optimizer step; passes.py is for steps with several passes over their batches
outcomes/       whether a step is applied, and what follows if it is not
requests.py     what ranks ask of each other: stop, save, evaluate, preempt
end.py          the last checkpoint, the weights, the summary

log/, evaluation/, hooks/ and profile/ are called between the steps. checks/, determinism.py and diagnose.py turn
mistakes into errors that say what to do.
"""
