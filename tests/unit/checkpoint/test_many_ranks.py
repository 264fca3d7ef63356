"""A checkpoint of many ranks: what rank 0 does grows with the number of files, counted in operations of the storage."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from checkpoints import at

from lockstep.checkpoint import command, manifest_reader
from lockstep.checkpoint.manifest import File, Manifest, Piece, TensorEntry, encode_manifest
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.rank_file import FileLayout, arrange
from lockstep.checkpoint.saving.draft import Confirmation, SaveContext
from lockstep.checkpoint.saving.outcome import Committed, SaveFailed
from lockstep.checkpoint.saving.save import Save, Saver
from lockstep.checkpoint.state.reshard import RankContents
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim
from lockstep.config.sections import CheckpointConfig
from lockstep.run_folder.checkpoint_names import draft_name, file_name
from lockstep.runtime.shards import LocalShard


class CountingStorage(CheckpointStorage):
    """Counts its operations."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("open", "write", "replace", "delete", "folders", "rename"):
            self.calls[name] += 1
        return super().__getattribute__(name)


def layout_of(rank: int, ranks: int) -> FileLayout:
    piece = Piece(file_name(rank), (rank, 0), (1, 4))
    return arrange({"weight": TensorEntry("F32", (ranks, 4), (piece,))})


def saved(root: Path, ranks: int) -> tuple[CountingStorage, Save]:
    """Have rank 0 commit a checkpoint for which the other ranks have written their files."""
    storage = CountingStorage(root)
    claim(storage, "token")
    draft = root / draft_name(1, "token", 1)
    draft.mkdir(parents=True)
    for rank in range(1, ranks):
        layout = layout_of(rank, ranks)
        data = layout.header + bytes(layout.size)
        file = File(file_name(rank), len(data), xxhash.xxh3_128(data).hexdigest())
        (draft / file.name).write_bytes(data)
        (draft / f"rank-{rank:05d}.json").write_bytes(Confirmation(file, layout.tensors).encode())
    saver = Saver(SaveContext(storage, 0, ranks, "token", CheckpointConfig(asynchronous=False)))
    return storage, saver.copy_and_write(1, RankContents({"weight": LocalShard(torch.zeros(1, 4), (ranks, 4), (0, 0))}))


def test_a_commit_opens_each_file_twice_and_deletes_each_confirmation_once(tmp_path: Path) -> None:
    calls = {}
    for ranks in (8, 64):
        storage, save = saved(tmp_path / str(ranks) / "checkpoints", ranks)
        assert isinstance(save.outcome, Committed)
        assert not save.outcome.warnings
        calls[ranks] = dict(storage.calls)
        found = read_manifest(save.outcome.checkpoint)
        assert len(found.files) == len(found.tensors["weight"].pieces) == ranks
        assert command.verify(tmp_path / str(ranks))[1] == 0
        assert "not verified" in command.ls(tmp_path / str(ranks))[0]

    assert calls[64] == calls[8] | {"open": calls[8]["open"] + 2 * 56, "delete": calls[8]["delete"] + 56}


def test_a_manifest_that_would_be_too_large_to_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_reader, "_MAX_MANIFEST_BYTES", 1000)
    _, save = saved(tmp_path / "checkpoints", 16)
    assert isinstance(save.outcome, SaveFailed)
    assert save.outcome.reason.endswith("manifest.json: more than 1,000 bytes")


def test_a_manifest_of_1024_ranks_and_2200_sharded_tensors_can_be_read(tmp_path: Path) -> None:
    """A model of 723 parameters and its optimizer. From 944 ranks on, no save of it could be committed."""

    def encoded(tensors: int) -> tuple[Manifest, bytes]:
        files = [file_name(rank) for rank in range(1024)]
        pieces = {
            f"optimizer.0.model.layers.{number:03d}.self_attn.q_proj.weight.exp_avg_sq": [
                (file, (rank * 28, 0), (28, 8192)) for rank, file in enumerate(files)
            ]
            for number in range(tensors)
        }
        entries = {
            name: TensorEntry("F32", (28 * 1024, 8192), tuple(Piece(file, *place) for file, *place in shards))
            for name, shards in pieces.items()
        }
        manifest = Manifest(1, 0.0, "", tuple(File(file, 10**12, "0" * 32) for file in files), entries)
        return manifest, encode_manifest(manifest)

    manifest, data = encoded(4)
    assert manifest_reader.decode_manifest(data, at(tmp_path)) == manifest
    bytes_per_tensor = (len(data) - len(encoded(2)[1])) / 2
    assert 2 * 2200 * bytes_per_tensor < manifest_reader._MAX_MANIFEST_BYTES
