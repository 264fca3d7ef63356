"""Evaluate a trained HRM: python evaluate.py checkpoint=runs/NAME; or under torchrun, with save_outputs=true."""

import sys

from lockstep.recipes.hrm.commands import evaluate_main

if __name__ == "__main__":
    evaluate_main(sys.argv[1:])
