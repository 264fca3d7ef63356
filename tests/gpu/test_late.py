"""On a GPU the host learns a step's outcome one step late. The same numbers as on the CPU, and nobody waits."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config import resolve
from lockstep.engine import loop
from lockstep.engine.end import close, end_training
from lockstep.engine.setup import open_run
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")


class Wobbly(Task):
    """The first step weighs nothing, and the loss of step 6 is infinite."""

    def __init__(self, optimizer: str, tensor_weights: bool):
        self.kind, self.tensor_weights, self.calls = optimizer, tensor_weights, 0

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def optimizer(self, model):
        if self.kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def data(self):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, generator=generator))

    def loss(self, model, batch):
        x, y = batch
        errors = (model(x)[:, 0] - y) ** 2
        step, self.calls = self.calls, self.calls + 1
        weight = torch.full((), float(len(x)), device=x.device) if self.tensor_weights else len(x)
        if step == 0:
            return Loss(errors.sum() * 0, weight * 0)
        return Loss(errors.sum() * (math.inf if step == 6 else 1.0), weight)


def trained(task: Task, device: str, folder) -> tuple[dict[str, torch.Tensor], dict]:
    values = {"device": device, "precision": "fp32", "compile": False, "global_batch": 16, "steps": 20}
    values["checks.loss"] = "off"  # it counts its calls
    values |= {
        "clip.norm": 0.5,
        "lr.schedule": "constant",
        "ema.decay": 0.9,
        "log.progress": "off",
        "log.every": 5,
        "run_dir": str(folder),
    }
    resolved = resolve([("test", values)])
    with context.start(World(), resolved.config) as runtime:
        builder = open_run(resolved, runtime, "test")
        summary = loop.fit(task, builder)
        return {name: p.detach().cpu() for name, p in builder.driver.model.named_parameters()}, summary


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("tensor_weights", [False, True])
def test_the_gpu_trains_the_model_of_the_cpu(tmp_path, optimizer, tensor_weights):
    on_cpu, cpu_summary = trained(Wobbly(optimizer, tensor_weights), "cpu", tmp_path / "cpu")
    junk = [torch.full((4096,), 1e6, device="cuda") for _ in range(64)]  # what uninitialised memory may hold
    del junk
    on_gpu, gpu_summary = trained(Wobbly(optimizer, tensor_weights), "cuda", tmp_path / "gpu")
    for key in ("step", "applied", "skipped"):
        assert cpu_summary[key] == gpu_summary[key], key
    assert (gpu_summary["applied"], gpu_summary["skipped"]) == (18, 1)
    for name in on_cpu:
        torch.testing.assert_close(on_cpu[name], on_gpu[name], rtol=1e-4, atol=1e-5)

    # The two steps that the device does not apply leave the averages, too.
    averages = [load_file(tmp_path / device / "ema.safetensors") for device in ("cpu", "gpu")]
    torch.testing.assert_close(averages[0], averages[1], rtol=1e-4, atol=1e-5)
    assert math.isfinite(gpu_summary["loss"])


class Steady(Wobbly):
    def loss(self, model, batch):
        self.calls = max(self.calls, 7)  # past the wobbles
        return super().loss(model, batch)


@pytest.mark.parametrize("tensor_weights", [False, True])
def test_no_step_makes_the_host_wait(tmp_path, tensor_weights):
    """Log lines included: torch raises at anything that waits for the device."""
    values = {"device": "cuda", "compile": False, "global_batch": 16, "steps": 60, "clip.norm": 0.5, "ema.decay": 0.9}
    resolved = resolve([("test", values | {"log.progress": "off", "log.every": 5, "run_dir": str(tmp_path / "run")})])
    task = Steady("adamw", tensor_weights)
    with context.start(World(), resolved.config) as runtime:
        builder = open_run(resolved, runtime, "test")
        builder.setup_model(task.model(), task.optimizer)
        run = builder.setup_run(task.data(), task.collate)
        assert run.stepper.outcomes_are_late
        try:
            for batches in run.step_batches():
                if run.steps_done == 20:
                    torch.cuda.set_sync_debug_mode("error")
                if run.steps_done == 55:
                    torch.cuda.set_sync_debug_mode("default")
                run.end_step(batches, run.stepper.step(batches, task.loss))
                run.log.write_if_due()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        end_training(run)
        close(run)
