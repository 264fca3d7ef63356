"""The count of the processes that the kernel has killed for lack of memory."""

import pytest

from lockstep.launch.ranks import oom_kills


@pytest.mark.parametrize(
    "text", ["low 0\nhigh 0\noom 2\noom_kill 7\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"]
)
def test_both_kinds_of_control_groups_are_read(tmp_path, monkeypatch, text):
    (tmp_path / "events").write_text(text)
    monkeypatch.setattr(oom_kills, "_memory_files", lambda: [tmp_path / "missing", tmp_path / "events"])
    assert oom_kills.so_far() == 7
