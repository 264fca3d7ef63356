"""A run in a notebook: a display that redraws in place, the name of the notebook, and a result that shows its curve.

IPython is never imported here unless this process is the kernel of a notebook, which has imported it already.
"""
