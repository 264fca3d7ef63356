"""What a launcher prints, into a pipe that nobody reads any more."""

import os
import subprocess
import sys

SAY = """
import sys
from lockstep.launch.terminal import print_line

print_line("first")
print_line("second")
print("goes on")
"""


def test_a_launcher_outlives_the_reader_of_its_output() -> None:
    """`lockstep train ... 2>&1 | tee log`: when tee died, the next line ended the coordinator and killed the ranks."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-c", SAY], stdout=subprocess.PIPE, stderr=writer, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stdout) == (0, "goes on\n")
