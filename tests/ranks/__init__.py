"""N ranks against one rank. Jobs run in the workers of `pool`; the judging happens here, in the session."""
