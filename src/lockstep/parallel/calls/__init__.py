"""The call of a module: its arguments as tensors (arguments.py), what it changes (state.py), and the links that are put
around it (chain.py).
"""
