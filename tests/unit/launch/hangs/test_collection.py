"""What a node sends when its ranks seem to hang."""

from lockstep.launch.hangs import collection as module


def test_stacks_that_would_be_too_large_for_a_message_keep_the_main_thread(tmp_path, monkeypatch):
    """A message above the largest size would look like an attack, and its node would be dropped."""
    monkeypatch.setattr(module, "STACKS_SIZE", 4000)
    texts = {rank: "x" * 9000 + f"the main thread of {rank}" for rank in range(2)}
    monkeypatch.setattr(module.stacks, "collect", lambda *arguments: texts)
    monkeypatch.setattr(module.flight_recorder, "collect", lambda *arguments: {0: [{"collective_seq_id": 1}]})
    found, collectives = module.collect(tmp_path, {0: 1, 1: 2})
    assert [len(text) for text in found.values()] == [2000, 2000]
    assert found[1].endswith("the main thread of 1")
    assert collectives == {0: [{"collective_seq_id": 1}]}


def test_a_folder_that_is_gone_does_not_end_the_launcher(tmp_path, monkeypatch):
    """TMPDIR may be full as well: then the request for collectives cannot be written."""
    monkeypatch.setattr(module.stacks, "collect", lambda *arguments: {0: "the main thread of 0"})
    assert module.collect(tmp_path / "gone", {0: 1}) == ({0: "the main thread of 0"}, {})
