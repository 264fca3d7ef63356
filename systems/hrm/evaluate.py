"""Evaluate a trained HRM: python evaluate.py checkpoint=runs/NAME; or under torchrun, with save_outputs=true."""

import sys

from lockstep.classic.hrm.evaluation import evaluate_checkpoint, main

__all__ = ["evaluate_checkpoint", "main"]

if __name__ == "__main__":
    main(sys.argv[1:])
