"""`lockstep train --profile`: when a run is traced, and what is made of the trace."""
