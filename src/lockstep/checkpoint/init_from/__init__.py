"""`init_from`: start a new run from the weights of a file, a run or a Hugging Face folder.

sources   the files that weights are read from, slice by slice
match     which tensor of the source goes where, and what does not fit
weights   reads them into the model, and the record of it
"""
