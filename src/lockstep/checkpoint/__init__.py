"""Never lose a run, never lie about one: tensors and plain values, committed as a whole or not at all.

    step-00000040/part-00000.safetensors ...   one file for each rank that wrote
    step-00000040/manifest.json                what is where, with the size and the digest of each file
    latest                                     the name of the newest one, for people

This area knows nothing about models, and calls no collective.
"""
