"""HRM, looked at again: python evaluate.py checkpoint=runs/NAME; or under torchrun, with save_outputs=true."""

import sys

from lockstep.recipes.hrm.evaluate import main

if __name__ == "__main__":
    main(sys.argv[1:])
