"""The kinds of benchmarks: each asks ranks to measure and makes sections of the result. None imports torch."""
