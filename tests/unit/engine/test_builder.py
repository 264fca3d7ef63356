"""What a run does before its model exists."""

from lockstep.config import RunConfig
from lockstep.engine.setup.builder import tell_launcher
from lockstep.runtime import attempt_folder
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER


def test_only_rank_0_tells_our_launcher_the_settings(tmp_path, monkeypatch):
    config = RunConfig(steps=1, global_batch=1)
    monkeypatch.delenv(ATTEMPT_FOLDER, raising=False)
    tell_launcher(config, is_main=True)
    monkeypatch.setenv(ATTEMPT_FOLDER, str(tmp_path))
    tell_launcher(config, is_main=False)
    assert list(tmp_path.iterdir()) == []
    tell_launcher(config, is_main=True)
    assert attempt_folder.settings(tmp_path).exists()
