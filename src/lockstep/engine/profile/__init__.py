"""`lockstep train --profile`: the trace of a few steps, and its evaluation."""
