"""`lockstep evaluate`: what to evaluate, on which processes, and the table that is printed."""
