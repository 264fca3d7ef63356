"""The ranks of one node: how they are forked, what they run, what they leave behind, and why they ended."""
