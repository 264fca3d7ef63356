"""What the agent of a node gives its ranks."""

from lockstep.launch import agent as module
from lockstep.runtime.environments.launcher import OF_ONE_JOB


def test_a_launcher_inside_a_rank_of_another_job_starts_ranks_of_its_own(monkeypatch):
    """The store of the outer job would come first, and its ranks would wait for those of the inner job."""
    for name in (*OF_ONE_JOB, "LOCKSTEP_SECRET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_OWN", "1")
    env = module._environment_for(1)
    assert not [name for name in env if name.startswith(("LOCKSTEP_", "TORCHELASTIC_"))]
    assert not {*OF_ONE_JOB} & env.keys()
    assert env["MY_OWN"] == "1"
