"""One module per exercise: calls the functions of a learner's file, and explains what is wrong."""
