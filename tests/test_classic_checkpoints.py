"""Saves and loads of the classic trainers whose ranks do not come at the same time, or not all of them."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from classic_net import among, net, numbers, weights
from lockstep.checkpoint.choose import choose
from lockstep.checkpoint.integrity import verify_checkpoint
from lockstep.checkpoint.state.run_state import RunState
from lockstep.classic import AMPConfig, AMPTrainer, DistributedAMPTrainer, checkpoints
from lockstep.errors import UserError
from lockstep.runtime.world import World
from pool import Pool

FP32 = AMPConfig(enabled=False, device="cpu")
SHORT = timedelta(seconds=0.1)


def trainer_of(world: World, store: Any) -> DistributedAMPTrainer:
    """Return a trainer after one step, whose ranks wait for no more than a test may take."""
    among(world, store)
    trainer = DistributedAMPTrainer(net(), FP32)
    trainer.time_limit = timedelta(seconds=120)
    trainer.training_step(batch_of(world))
    return trainer


def batch_of(world: World) -> Any:
    return tuple(part[world.rank :: world.size] for part in numbers(8))


def tell(what: str) -> None:
    dist.distributed_c10d._get_default_store().set(what, "")


def wait(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([what], timedelta(seconds=120))


def test_a_machine_verifies_the_bytes_on_its_own_disk(tmp_path: Path) -> None:
    trainer = AMPTrainer(net(), FP32)
    trainer.training_step(numbers(8))
    checkpoint = choose(Path(trainer.save_checkpoint(tmp_path)))
    manifest, _ = verify_checkpoint(checkpoint)
    choice = {"checkpoint": checkpoint.name, "digest": manifest.digest, "folder": str(tmp_path)}
    alone_there = World(rank=1, size=2, local_rank=0, local_size=1)
    checkpoints._same_checkpoint(tmp_path, choice, alone_there)

    (file,) = tmp_path.glob("checkpoints/*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="does not see"):
        checkpoints._same_checkpoint(tmp_path, choice, alone_there)


@pytest.mark.parametrize("then", ["load", "save"])
def test_a_kill_between_the_two_renames_of_a_save_loses_nothing(tmp_path: Path, then: str) -> None:
    """The step was saved before, and that checkpoint has made way for the new one, which has no name yet."""
    trainer = AMPTrainer(net(), FP32)
    trainer.training_step(numbers(8))
    saved = weights(trainer.model)
    folder = Path(trainer.save_checkpoint(tmp_path))
    folder.rename(folder.with_name(f"{folder.name}.replaced"))

    if then == "save":
        trainer.training_step(numbers(8))
        trainer.save_checkpoint(tmp_path)
        assert {path.name for path in folder.parent.glob("step-*")} == {"step-00000001", "step-00000002"}
        shutil.rmtree(folder.with_name("step-00000002"))

    other = AMPTrainer(net(), FP32)
    other.training_step(numbers(8))
    assert other.load_checkpoint(tmp_path) == 1
    assert torch.equal(weights(other.model), saved)


def saved_at(trainer: AMPTrainer, step: int, folder: Path) -> Path:
    """Train until `step`, and save."""
    while trainer.stepper.steps_done < step:
        trainer.training_step(numbers(8))
    return trainer.save_checkpoint(folder)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoints/step-*"))


def test_a_new_training_in_the_same_folder_keeps_what_it_saves(tmp_path: Path) -> None:
    """The three checkpoints of an earlier training counted as the newest ones: the save was deleted at once."""
    trainer = AMPTrainer(net(), FP32)
    for step in (10, 20, 30):
        saved_at(trainer, step, tmp_path)

    path = saved_at(AMPTrainer(net(), FP32), 2, tmp_path)
    assert path.is_dir()
    later = [f"step-000000{step}.rewound" for step in (10, 20, 30)]
    assert names_in(tmp_path) == ["step-00000002", *later]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000002\n"
    assert AMPTrainer(net(), FP32).load_checkpoint(tmp_path) == 2
    assert AMPTrainer(net(), FP32).load_checkpoint(tmp_path / "checkpoints" / later[2]) == 30


def test_a_training_that_went_back_loads_what_it_saved_last(tmp_path: Path) -> None:
    trainer = AMPTrainer(net(), FP32)
    earlier, *_ = [saved_at(trainer, step, tmp_path) for step in (10, 20, 30)]

    # Until it saves, nothing changes.
    assert trainer.load_checkpoint(earlier) == 10
    assert len(names_in(tmp_path)) == 3
    assert [saved_at(trainer, step, tmp_path).is_dir() for step in (12, 14)] == [True, True]
    assert names_in(tmp_path)[:3] == ["step-00000010", "step-00000012", "step-00000014"]
    assert AMPTrainer(net(), FP32).load_checkpoint(tmp_path) == 14


def test_later_checkpoints_that_cannot_be_set_aside_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next load would return one of them."""
    trainer = AMPTrainer(net(), FP32)
    earlier, _ = [saved_at(trainer, step, tmp_path) for step in (1, 2)]
    trainer.load_checkpoint(earlier)

    def broken(*arguments: Any) -> None:
        raise OSError("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "set_aside_later", broken)
        with pytest.raises(UserError, match="the disk is away"):
            trainer.save_checkpoint(tmp_path)

    trainer.save_checkpoint(tmp_path)
    assert AMPTrainer(net(), FP32).load_checkpoint(tmp_path) == 1


# ---- ranks that come late ----


def save_after_load(world: World, store: Any, folder: Path) -> list[Any]:
    trainer = trainer_of(world, store)
    trainer.save_checkpoint(folder)
    saved = weights(trainer.model)

    # Rank 0 has loaded and goes on to replace the checkpoint, when rank 1 has not even begun to load.
    trainer.arrival_limit = SHORT
    if world.rank == 1:
        wait("rank 0 has loaded")
        time.sleep(0.3)  # for a rank 0 that does not wait
    step = trainer.load_checkpoint(folder)
    tell(f"rank {world.rank} has loaded")
    if world.rank == 0:
        with torch.no_grad():
            net_of(trainer).out.bias.add_(1)
    path = trainer.save_checkpoint(folder)
    same = world.rank == 0 or torch.equal(weights(trainer.model), saved)
    trainer.cleanup()
    return [step, path, same]


def net_of(trainer: DistributedAMPTrainer) -> Any:
    return trainer.model.module


def test_a_save_waits_for_ranks_that_still_load_from_its_folder(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(save_after_load, tmp_path, world=2):
        assert found == [1, tmp_path / "checkpoints" / "step-00000001", True]


def delete_after_load(world: World, store: Any, folder: Path) -> int:
    trainer = trainer_of(world, store)
    trainer.save_checkpoint(folder)
    restore = RunState.restore

    def slow_restore(*arguments: Any) -> None:
        time.sleep(0.3)
        restore(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(RunState, "restore", slow_restore)
        step = trainer.load_checkpoint(folder)
    if world.rank == 0:
        shutil.rmtree(folder)
    trainer.training_step(batch_of(world))
    trainer.cleanup()
    return step


def test_a_checkpoint_can_be_deleted_when_load_checkpoint_has_returned(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(delete_after_load, tmp_path / "saved", world=2) == [1, 1]


def slow_verification(world: World, store: Any, folder: Path) -> str:
    trainer = trainer_of(world, store)
    trainer.save_checkpoint(folder)
    newest_valid = checkpoints.newest_valid

    def slow_search(*arguments: Any) -> Any:
        tell("verifying")
        wait("rank 1 has raised")
        return newest_valid(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(checkpoints, "newest_valid", slow_search)
        else:
            wait("verifying")
            trainer.time_limit = SHORT
        try:
            with pytest.raises(UserError) as raised:
                trainer.load_checkpoint(folder)
        finally:
            tell(f"rank {world.rank} has raised")
    trainer.cleanup()
    return str(raised.value)


def test_a_rank_0_that_still_verifies_is_not_said_to_be_missing(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(slow_verification, tmp_path, world=2)
    assert found[0] == found[1]
    assert "waited for rank 0, which has not finished verifying" in found[0]


# ---- ranks that do not come ----


def save_after_lone_load(world: World, store: Any, folder: Path) -> list[Any]:
    trainer = trainer_of(world, store)
    trainer.save_checkpoint(folder)
    trainer.training_step(batch_of(world))

    # Rank 0 is at another step than rank 1 now.
    trainer.arrival_limit = SHORT
    if world.rank == 0:
        trainer.save_checkpoint(folder / "alone")
        trainer.load_checkpoint(folder)
    paths = [trainer.save_checkpoint(folder / "final"), trainer.save_checkpoint(folder)]
    with pytest.raises(UserError, match="1 of 2 ranks loaded a checkpoint"):
        trainer.training_step(batch_of(world))
    trainer.cleanup()
    return [path.relative_to(folder) for path in paths]


def test_all_ranks_can_save_after_rank_0_alone_has_loaded(pool: Pool, tmp_path: Path) -> None:
    step = Path("checkpoints") / "step-00000001"
    for found in pool.run(save_after_lone_load, tmp_path, world=2):
        assert found == ["final" / step, step]


def load_from_damaged_copy(world: World, store: Any, folder: Path) -> list[str]:
    trainer = trainer_of(world, store)
    path = trainer.save_checkpoint(folder / "0")
    if world.rank == 1:
        shutil.copytree(folder / "0", folder / "1")
        (folder / "1" / path.relative_to(folder / "0") / "manifest.json").write_text("{}")
    found = []
    with pytest.raises(UserError) as raised:
        trainer.load_checkpoint(folder / str(world.rank))
    found.append(str(raised.value))

    # A script that goes on all the same would train two different models.
    with pytest.raises(UserError) as refused:
        trainer.training_step(batch_of(world))
    found.append(str(refused.value))
    trainer.cleanup()
    return found


def test_a_checkpoint_that_one_rank_cannot_read_is_refused_on_all(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(load_from_damaged_copy, tmp_path, world=2)
    assert found[0] == found[1]
    assert "on rank 1 does not see step-00000001" in found[0][0]
    assert "1 of 2 ranks loaded a checkpoint" in found[0][1]


# ---- one folder with two paths ----


def other_paths(world: World, store: Any, folder: Path) -> list[Any]:
    trainer = trainer_of(world, store)
    linked = folder / "mounted"
    if world.rank == 1:
        linked.symlink_to(folder / "real")
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for other in (os.path.relpath(folder / "real"), linked):
            mine = other if world.rank == 1 else folder / "real"
            # A link is resolved, and a mount point is not.
            if other is linked:
                patch.setattr(Path, "resolve", Path.absolute)
            path = trainer.save_checkpoint(mine)
            found += [path.name, path.exists(), trainer.load_checkpoint(mine)]
            found.append(trainer.load_checkpoint(path))
            trainer.training_step(batch_of(world))

        # A failed save is the other rank's, too; a folder that the writer does not save to is named.
        (folder / "file").mkdir(exist_ok=True)
        (folder / "file" / "real").touch()
        with pytest.raises(UserError, match="could not write the checkpoint"):
            trainer.save_checkpoint(folder / "file" / "real" if world.rank == 0 else linked.with_name("real"))
    if world.rank == 1:
        trainer.time_limit = SHORT
    if world.rank == 0:
        trainer.save_checkpoint(folder / "rank0")
        tell("saved")
    else:
        wait("saved")
        with pytest.raises(UserError, match=r"it has saved to .*rank0"):
            trainer.save_checkpoint(folder / "rank1")
    trainer.cleanup()
    return found


def test_a_folder_may_have_another_path_on_another_rank(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(other_paths, tmp_path, world=2):
        assert found == ["step-00000001", True, 1, 1, "step-00000002", True, 2, 2]
