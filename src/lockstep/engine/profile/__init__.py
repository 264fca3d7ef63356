"""`lockstep train --profile`: the trace of a few steps, when it is taken, and what is made of it."""
