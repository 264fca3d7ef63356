import typing
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep import precision
from lockstep.classic.dynamic_scaler import DynamicScaler as ClassicScaler
from lockstep.config import KEYS, ScalerConfig, resolve
from lockstep.errors import UserError
from lockstep.precision import (
    PRECISIONS,
    DynamicScaler,
    Precision,
    cast_parameters_,
    check_storage,
    choose_precision,
    for_model,
)
from lockstep.runtime import context
from lockstep.runtime.context import start
from lockstep.runtime.world import World

CPU = torch.device("cpu")


def config(**values):
    return resolve([("test", values)]).config


def test_defaults_of_the_scaler():
    scaler = DynamicScaler()
    assert (scaler.value, scaler.config.growth, scaler.config.backoff) == (2.0**15, 2.0, 0.5)
    assert (scaler.config.interval, scaler.config.minimum, scaler.config.maximum) == (2000, 1.0, 2.0**24)


def test_the_scale_halves_and_regrows_within_its_bounds():
    scaler = DynamicScaler(ScalerConfig(initial=4.0, interval=3, minimum=1.0, maximum=8.0))
    for expected in (2.0, 1.0, 1.0):
        scaler.update(overflowed=True)
        assert scaler.value == expected
    seen = []
    for _ in range(12):
        scaler.update(overflowed=False)
        seen.append(scaler.value)
    assert seen == [1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8]
    scaler.update(overflowed=False)
    scaler.update(overflowed=True)  # an overflow restarts the count
    assert (scaler.value, scaler.clean_steps) == (4.0, 0)


def test_hysteresis_forgives_rare_overflows():
    scaler = DynamicScaler(ScalerConfig(initial=8.0, hysteresis=2, interval=2))
    scaler.update(overflowed=True)
    assert scaler.value == 8.0
    scaler.update(overflowed=True)
    assert scaler.value == 4.0


def test_scaling_and_unscaling():
    scaler = ClassicScaler(init_scale=1024.0)
    loss = torch.tensor(1e-6)
    assert scaler.scale(loss).item() == pytest.approx(1.024e-3)
    grads = [torch.full((3,), 512.0)]
    scaler.unscale(grads)
    assert grads[0].tolist() == [0.5] * 3


def test_state_round_trip_and_unknown_version():
    scaler = DynamicScaler(ScalerConfig(initial=64.0, interval=5))
    for overflowed in (False, True, False, False):
        scaler.update(overflowed)
    other = DynamicScaler(ScalerConfig(initial=2.0, interval=5))
    other.load_state_dict(scaler.state_dict() | {"history": [[64.0, True]]})  # as older checkpoints have it
    assert other.state_dict() == scaler.state_dict()
    assert (other.value, other.clean_steps) == (32.0, 2)
    with pytest.raises(UserError, match="version 99"):
        other.load_state_dict({**scaler.state_dict(), "version": 99})


def test_the_history_is_bounded():
    scaler = ClassicScaler()
    for _ in range(250):
        scaler.update(False)
    assert len(scaler.history) == 100
    other = ClassicScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.history == scaler.history


def test_cpu_runs_in_fp32_unless_asked():
    assert choose_precision(config(), CPU).name == "fp32"
    assert choose_precision(config(precision="bf16"), CPU).compute is torch.bfloat16
    assert choose_precision(config(precision="fp16"), CPU).needs_scaler
    with pytest.raises(UserError, match="no TF32"):
        choose_precision(config(precision="tf32"), CPU)


def test_half_precision_master_weights_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(UserError, match=r"'1\.weight'"):
        check_storage(model)
    model[1].requires_grad_(False)  # frozen parts may be stored as they like
    check_storage(model)


def test_the_contract_of_every_format():
    stored = [name for name, precision in PRECISIONS.items() if precision.stores_bf16]
    contracts = {name: choose_precision(config(precision=name), CPU).contract(torch.bfloat16) for name in stored}
    start = "stored bfloat16, computed bfloat16, reduced float32, optimizer float32"
    assert all(contract.startswith(start) for contract in contracts.values())
    assert len(set(contracts.values())) == len(contracts)
    assert choose_precision(config(precision="bf16"), CPU).rounding is None


def test_rounding_errors_are_those_of_the_format_that_is_computed_in():
    found = {name: precision.eps(torch.float64) for name, precision in PRECISIONS.items()}
    assert (found["fp32"], found["tf32"], found["bf16"]) == (2.0**-52, 2.0**-10, 2.0**-7)
    assert [name for name, precision in PRECISIONS.items() if not precision.loses_bits] == ["fp32"]


def test_the_table_has_every_precision_of_the_configuration():
    choices = typing.get_args(KEYS["precision"].annotation)
    assert set(choices) == {"auto", *PRECISIONS}


def test_a_precision_is_one_record(monkeypatch):
    """Whatever it does not say is as in fp32."""
    refused = []
    plain = Precision(compute_text="int8 in blocks", check=lambda config, device: refused.append(device))
    monkeypatch.setitem(PRECISIONS, "tf32", plain)
    found = choose_precision(config(precision="tf32"), CPU)
    assert refused == [CPU]
    assert (found.rounding, found.needs_scaler, found.casts) == (None, False, False)
    assert found.contract(torch.float32).startswith("stored float32, computed int8 in blocks, reduced float32")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"strategy": "tp"}, "with strategy=tp"),
        ({"strategy": "pp"}, "with strategy=pp"),
        ({"mesh.tp": 2}, r"with mesh\.tp=2"),
        ({"strategy": "fsdp", "fsdp.offload": True}, r"with fsdp\.offload=true"),
        ({"ddp.hook": "powersgd"}, r"with ddp\.hook=powersgd"),
        ({"ddp.hook": "fp16"}, r"with ddp\.hook=fp16"),
    ],
)
def test_what_bf16_storage_cannot_do_is_refused(values, words):
    with pytest.raises(UserError, match=f"bf16-master {words}"):
        choose_precision(config(precision="bf16-master", **values), CPU)


def test_storing_keeps_the_objects_and_refuses_doubles():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = list(model.parameters())
    master = choose_precision(config(precision="bf16-master"), CPU)
    cast_parameters_(model, PRECISIONS["bf16"])
    assert {p.dtype for p in before} == {torch.float32}
    cast_parameters_(model, master)
    assert {p.dtype for p in before} == {torch.bfloat16}
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model[1].running_mean.dtype == torch.float32
    with pytest.raises(UserError, match="'weight' in float64"):
        cast_parameters_(nn.Linear(2, 2).double(), master)


def test_bf16_that_torch_only_emulates_is_not_chosen(monkeypatch):
    """A V100 or T4 computes in fp16; torch says that it supports bf16, and emulates it."""
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    assert choose_precision(config(precision="auto"), torch.device("cuda")).name == "fp16"
    with pytest.raises(UserError, match="T4 has no bf16"):
        choose_precision(config(precision="bf16"), torch.device("cuda"))


def test_fp8_is_refused_where_it_cannot_work(monkeypatch):
    cuda = torch.device("cuda")
    with pytest.raises(UserError, match="cpu, which has no float8"):
        choose_precision(config(precision="fp8"), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"A100, compute capability 8\.0; 8\.9 is needed"):
        choose_precision(config(precision="fp8"), cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="torchao is not installed"):
        choose_precision(config(precision="fp8"), cuda)
    monkeypatch.setattr(precision, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="compile=false"):
        choose_precision(config(precision="fp8", compile=False), cuda)
    with pytest.raises(UserError, match="fp8 with strategy=tp"):
        choose_precision(config(precision="fp8", strategy="tp"), cuda)
    found = choose_precision(config(precision="fp8"), cuda)
    assert found.contract(torch.float32).startswith("stored float32, computed float8 in blocks, else bfloat16")


def test_a_limit_of_memory_needs_a_gpu():
    with pytest.raises(UserError, match="leave gpu_memory out"), start(World(), config(gpu_memory=2, device="cpu")):
        pass


def test_a_limit_of_memory_ends_with_the_run(monkeypatch):
    """Another run in the same process has its own, or none."""
    fractions = [1.0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    with ExitStack() as stack:
        context._limit_memory(2.0, torch.device("cuda", 0), stack)
        assert fractions[-1] == 0.25
    assert fractions[-1] == 1.0
    with pytest.raises(UserError, match="gpu_memory=8"):
        context._limit_memory(9.0, torch.device("cuda", 0), stack)


def test_a_model_in_float64_is_computed_in_it_unless_something_else_was_asked_for() -> None:
    model, bf16 = nn.Linear(2, 2).double(), replace(PRECISIONS["bf16"], name="bf16", device_type="cuda")
    own = for_model(bf16, "auto", model)
    assert (own.casts, own.device_type) == (False, "cuda")
    with pytest.raises(UserError, match="precision=bf16 has no effect on a model in float64"):
        for_model(bf16, "bf16", model)
    assert for_model(bf16, "bf16", nn.Linear(2, 2)) is bf16
    assert for_model(bf16, "auto", nn.Sequential(model, nn.Linear(2, 2))) is bf16
