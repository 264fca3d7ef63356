"""The workload that all exercises share: generated data and small models."""
