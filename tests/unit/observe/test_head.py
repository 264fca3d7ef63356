"""What a run writes into its folder before its first step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lockstep.config import resolve
from lockstep.observe.head import write_head


def test_the_settings_of_a_run_are_replaced_in_one_piece(tmp_path: Path) -> None:
    """A kill between emptying config.yaml and filling it would leave a run that --resume refuses."""
    write_head(tmp_path, resolve([("command line", {"steps": 5})]), {"steps": 5})
    files = [tmp_path / name for name in ("config.yaml", "config.sources.json", "plan.json")]
    before = [path.read_text() for path in files]

    # Whoever has a file open reads all of the earlier one.
    with ExitStack() as stack:
        opened = [stack.enter_context(path.open()) for path in files]
        write_head(tmp_path, resolve([("file a.yaml", {"steps": 7})]), {"steps": 7})
        assert [file.read() for file in opened] == before

    assert not set(before) & {path.read_text() for path in files}
