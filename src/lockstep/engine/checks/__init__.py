"""Checks that turn silent mistakes into errors: of settings and models at the start, and guards during the run."""
