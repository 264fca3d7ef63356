"""The next micro-batch travels to the GPU while the present one is computed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from data_sources import source_options
from lockstep.config import DataConfig
from lockstep.data.sources import open_source
from lockstep.data.transfer import CopyStream, prefetch_to_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_as_on_the_cpu(workers: int) -> None:
    rows = TensorDataset(torch.randn(40, 3), torch.arange(40))

    def batches(device: torch.device) -> list[list[torch.Tensor]]:
        options = source_options(16, 4, config=DataConfig(workers=workers), device=device)
        source = open_source(rows, default_collate, options)
        found = []
        for step in range(9):  # three epochs, each with a short last step
            batches = source.take()
            for micro in batches:
                found.append(list(micro.data))  # kept: nothing may be written over it
                torch.cuda._sleep(200_000)
            source.commit(batches, None)
            if step == 4:  # going back throws away what was sent ahead
                source.load_state_dict({**source.state_dict(), "position": 16})
        source.close()
        return [[tensor.cpu() for tensor in batch] for batch in found]

    with torch.cuda.stream(torch.cuda.Stream()):
        on_gpu = batches(torch.device("cuda", 0))
    for one, other in zip(batches(torch.device("cpu")), on_gpu, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Noted(CopyStream):
    """When each batch has arrived."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.times: list[torch.cuda.Event] = []

    def send(self, batch: torch.Tensor) -> object:
        sent = super().send(batch)
        self.times.append(torch.cuda.Event(enable_timing=True))
        self.times[-1].record(self.stream)
        return sent


def test_a_copy_runs_beside_the_work_and_nobody_waits() -> None:
    device = torch.device("cuda", 0)
    host = [torch.full((4 << 20,), float(i)).pin_memory() for i in range(6)]
    totals, ends = torch.zeros(6, device=device), []
    with torch.cuda.stream(torch.cuda.Stream()):
        link = Noted(device)
        torch.cuda._sleep(1_000_000)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i, batch in enumerate(prefetch_to_device(iter(host), link)):
                torch.cuda._sleep(50_000_000)  # some 30 ms; the copy takes less than one
                totals[i : i + 1].copy_(batch.mean().view(1))
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
                del batch
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert totals.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        for i in range(5):  # the next one was there before the work on this one ended
            assert link.times[i + 1].elapsed_time(ends[i]) > 0
        batch_bytes = host[0].numel() * 4
        assert torch.cuda.max_memory_allocated() - before <= 3.5 * batch_bytes  # however far the host ran ahead


def test_a_batch_that_is_there_already_is_not_copied() -> None:
    """Its memory belongs to the stream that made it, which could use it again before a copy beside it has ended."""
    link, batch = CopyStream(torch.device("cuda", 0)), torch.ones(4, device="cuda:0")
    assert link.receive(link.send(batch)) is batch


def test_a_dataset_may_keep_its_tensors_on_the_gpu() -> None:
    rows = TensorDataset(torch.arange(40, device="cuda"), torch.randn(40, 3, device="cuda").t().contiguous().t())
    options = source_options(16, 4, device="cuda:0")
    source = open_source(rows, default_collate, options)
    for micro in source.take():
        ids, values = micro.data
        assert ids.tolist() == list(micro.ids)
        assert torch.equal(values, rows.tensors[1][ids])
