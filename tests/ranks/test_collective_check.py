"""A part of the model that only some ranks use cannot be sharded: all ranks raise an error that names it, and gloo does
not abort."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from lockstep.errors import UserError
from lockstep.parallel.fsdp.collective_check import CollectiveCheck
from lockstep.runtime import context
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import Regression, assert_user_errors, configured, fit

VALUES = {"global_batch": 8, "micro_batch": 2, "steps": 4, "strategy": "fsdp"}


class Halved(nn.Module):
    """From its fifth forward on, the third step, `skips` says what a rank leaves out."""

    def __init__(self, skips: Callable[[str], bool], since: int = 5):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.branch, self.out = nn.Linear(5, 1), nn.Linear(5, 1)
        self.skips, self.since, self.calls = skips, since, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        left_out = self.skips if self.calls >= self.since else lambda name: False
        for number, block in enumerate(self.blocks):
            x = x if left_out(f"block {number}") else block(x)
        found = self.out(x)
        if left_out("gradient"):  # gathered as everywhere, and then of no use
            found = found + self.branch(x).detach()
        elif not left_out("branch"):
            found = found + self.branch(x)
        return found.squeeze(-1)


def on_rank_1(part: str) -> Callable[[str], bool]:
    return lambda name: dist.get_rank() == 1 and name == part


SAID = {
    "block 1": ("rank 0 is about to use blocks.1.weight, blocks.1.bias", "rank 1 is about to use blocks.2.weight"),
    "branch": ("rank 0 has a gradient for branch.weight, branch.bias; rank 1 does not",),
    "gradient": ("rank 0 has a gradient for branch.weight, branch.bias; rank 1 does not",),
}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-grads", "hsdp"])
@pytest.mark.parametrize("part", SAID)
def test_what_one_rank_leaves_out_is_named_by_all(pool: Pool, part: str, strategy: str) -> None:
    task = Regression(network=lambda: Halved(on_rank_1(part)))
    ranks = 4 if strategy == "hsdp" else 2
    values = VALUES | {"strategy": strategy, "micro_batch": 4 // ranks}  # two on each rank
    errors = pool.errors(fit, task, values, world=ranks)
    assert_user_errors(errors, *SAID[part], "set strategy=ddp ddp.find_unused_parameters=true")


def test_the_copies_of_a_stage_compare_too(pool: Pool) -> None:
    """Ranks 2 and 3 hold the second of two stages."""
    task = Regression(network=lambda: Halved(lambda name: dist.get_rank() == 3 and name == "branch"))
    errors = pool.errors(fit, task, VALUES | {"mesh.pp": 2}, world=4)
    assert_user_errors(errors[2:], "rank 2 has a gradient for branch.weight, branch.bias; rank 3 does not")


class Wide(Halved):
    """With layers to share."""

    def __init__(self, skips: Callable[[str], bool]):
        super().__init__(skips)
        self.up, self.down = nn.Linear(5, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.down(self.up(x)))


@pytest.mark.parametrize(("network", "mesh"), [(Wide, {"mesh.tp": 2}), (Halved, {})])
def test_zero1_is_advised_where_it_could_be_typed(pool: Pool, network: type[Halved], mesh: dict[str, int]) -> None:
    task = Regression(network=lambda: network(on_rank_1("branch")))
    for error in pool.errors(fit, task, VALUES | mesh, world=2):
        assert isinstance(error, UserError)
        assert ("zero1" in error.fix) == (not mesh)


class OnlyBlocks(nn.Module):
    """Nothing is outside the blocks, so that the first one's gradient is the last to come; rank 1 has none for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found = self.blocks[0](x)
        return self.blocks[1](found.detach() if dist.get_rank() == 1 else found).sum(-1)


def test_a_rank_that_is_done_while_another_is_not(pool: Pool) -> None:
    errors = pool.errors(fit, Regression(network=OnlyBlocks), VALUES | {"micro_batch": 4}, world=2)
    assert_user_errors(errors, "rank 0 has a gradient for blocks.0.weight, blocks.0.bias; rank 1 does not")


def test_what_is_typed_then_trains(pool: Pool) -> None:
    task = Regression(network=lambda: Halved(on_rank_1("branch")))
    for strategy in ("ddp", "zero1"):
        values = VALUES | {"strategy": strategy, "ddp.find_unused_parameters": True}
        for trace in pool.run(fit, task, values, world=2):
            assert [note.result.applied for note in trace.steps] == [True] * 4


def test_over_nccl_the_first_passes_are_compared() -> None:
    for backend, compared in {"gloo": [True] * 5, "nccl": [True] * 3 + [False] * 2}.items():
        runtime: Any = SimpleNamespace(backend=backend, collectives=None)
        check = CollectiveCheck(nn.Linear(1, 1), runtime)
        found = []
        for _ in range(5):
            check.begin_pass()
            found.append(check.compares)
        assert found == compared


class Recorded(DefaultAllGather):
    """Counts the parameter groups that torch gathers."""

    def __init__(self, gathered: list[int]):
        self.gathered = gathered

    def __call__(self, output_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        self.gathered.append(output_tensor.numel())
        return super().__call__(output_tensor, *rest, **options)


class RecordedReduce(DefaultReduceScatter):
    """Counts the elements of gradients that torch reduces."""

    def __init__(self, reduced: list[int]):
        self.reduced = reduced

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        self.reduced.append(input_tensor.numel())
        return super().__call__(output_tensor, input_tensor, *rest, **options)


def plain_fsdp(world: World, store: Any, part: str) -> tuple[list[int], list[int]]:
    """Without collective_check: what torch gathers and reduces in one step that leaves `part` out on all ranks."""
    with context.start(world, configured(VALUES).config, store=store) as runtime:
        mesh = init_device_mesh(runtime.device.type, (world.size,))
        model = Halved(lambda name: name == part, since=1).to(runtime.device)
        gathered: list[int] = []
        reduced: list[int] = []
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh)
            module.set_custom_all_gather(Recorded(gathered))
            module.set_custom_reduce_scatter(RecordedReduce(reduced))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no mean
        model(torch.ones(2, 5, device=runtime.device)).sum().backward()
    return sorted(gathered), sorted(reduced)


def test_torch_exchanges_what_each_rank_has_used(pool: Pool) -> None:
    """The behaviour of torch that collective_check.py is for. If this fails, torch exchanges the same on ranks that use
    different parameters, and the module may be deleted."""
    everything, *_ = pool.run(plain_fsdp, "", world=2)
    without_block, *_ = pool.run(plain_fsdp, "block 1", world=2)
    without_gradient, *_ = pool.run(plain_fsdp, "gradient", world=2)
    assert without_block[0] != everything[0]  # another number of gathers
    assert without_gradient[0] == everything[0]
    assert without_gradient[1] != everything[1]  # gradients of other sizes are added
