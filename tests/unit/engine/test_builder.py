"""What a run does before its model exists."""

from lockstep.config import RunConfig
from lockstep.engine.setup.builder import tell_launcher
from lockstep.runtime import attempt_folder
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER


def test_only_rank_0_tells_our_launcher_the_settings(tmp_path, monkeypatch):
    """Another rank may train a model alone: it is the main process of its own world then."""
    config = RunConfig(steps=1, global_batch=1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(ATTEMPT_FOLDER, raising=False)
    tell_launcher(config)
    monkeypatch.setenv(ATTEMPT_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    tell_launcher(config)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    tell_launcher(config)
    assert attempt_folder.settings(tmp_path).exists()
