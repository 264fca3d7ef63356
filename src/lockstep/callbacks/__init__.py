"""Callbacks: objects that a run calls, with code that several tasks share.

A callback is any object with one or more of these methods, which are those of `Task` (`task.py` documents them):

    before_training(run)           once in each process, before the first step
    first_steps(names)             once: {name of a parameter: the first step that trains it}
    before_batch(run, micro)       before each forward
    before_backward(run, loss)     after each forward; may return another loss
    after_step(run, result)        after each step
    after_eval(run, metrics)       after each evaluation
    state_dict(), load_state_dict(state)   saved with every checkpoint, and restored on resume

It may also have these attributes:

    name                           the name of its state in checkpoints, instead of that of its class
    follows_places = False         its before_batch does not depend on the place in the global batch

Pass them to `lockstep.fit(..., callbacks=[...])`, return them from `Task.callbacks()`, or call `run.add_callback` in
your own loop. The hooks of the task come first, then those of the callbacks, in the order of the list.
Early stopping and the average of the weights are settings: `stop.patience` and `ema.decay`.
"""

from lockstep.callbacks.sizes import ProgressiveSizes, crop_sequences, resize_images
from lockstep.callbacks.unfreeze import Unfreeze

__all__ = ["ProgressiveSizes", "Unfreeze", "crop_sequences", "resize_images"]
