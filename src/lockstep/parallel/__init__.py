"""How gradients come to be: one file per technique, applied in one order."""
