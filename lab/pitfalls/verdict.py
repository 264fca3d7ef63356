"""Run every pitfall in its bad and its good form. The same check must catch the bad one, and pass the good one.

python lab/pitfalls/verdict.py
"""

import os
import runpy
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

# Imported once, for all processes that are forked from this one.
import torch.nn.parallel
import torch.utils.data  # noqa: F401

import lockstep.lab.counting
import lockstep.lab.ranks  # noqa: F401

HERE = Path(__file__).parent


def run(path: Path) -> tuple[int, str]:
    """Run a script in a forked process, and return its exit code and what it printed."""
    with tempfile.TemporaryFile("w+") as output:

        def script() -> None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = [str(path)]
            runpy.run_path(str(path), run_name="__main__")

        process = get_context("fork").Process(target=script)
        process.start()
        process.join()
        output.seek(0)
        return process.exitcode or 0, output.read()


def main() -> None:
    """Run all pairs, and exit with code 1 if a verdict is not as it must be."""
    wrong = 0
    for bad in sorted(HERE.glob("*_bad.py")):
        good = bad.with_name(bad.name.replace("_bad", "_good"))
        for path, caught in ((bad, True), (good, False)):
            code, output = run(path)
            # Exit code 1 alone would also be a crash: a check must have failed.
            failed = [line.strip() for line in output.splitlines() if line.startswith("  FAIL")]
            right = code == int(caught) and bool(failed) == caught
            wrong += not right
            verdict = "caught" if failed else "passes" if code == 0 else "crashed"
            print(f"  {'ok  ' if right else 'FAIL'} {path.name:24} {verdict:8}{'; '.join(failed)}", flush=True)
            if not right:
                print(output)
    print("every bad form is caught, every good form passes" if not wrong else f"{wrong} verdicts are wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
