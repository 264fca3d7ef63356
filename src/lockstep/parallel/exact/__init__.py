"""Exact mode: gradients are added in one fixed order, so the bits do not depend on the number of ranks."""
