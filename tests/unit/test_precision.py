import pytest
import torch
from torch import nn

from lockstep.config import ScalerConfig, resolve
from lockstep.errors import UserError
from lockstep.precision import DynamicScaler, check_storage, choose

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
    scaler = DynamicScaler(ScalerConfig(initial=1024.0))
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
    other.load_state(scaler.get_state())
    assert other.get_state() == scaler.get_state()
    assert len(other.history) == 4
    with pytest.raises(UserError, match="version 99"):
        other.load_state({**scaler.get_state(), "version": 99})


def test_the_history_is_bounded():
    scaler = DynamicScaler()
    for _ in range(250):
        scaler.update(False)
    assert len(scaler.history) == 100


def test_cpu_runs_in_fp32_unless_asked():
    assert choose(config(), CPU).name == "fp32"
    assert choose(config(precision="bf16"), CPU).compute is torch.bfloat16
    assert choose(config(precision="fp16"), CPU).needs_scaler
    with pytest.raises(UserError, match="no TF32"):
        choose(config(precision="tf32"), CPU)


def test_half_precision_master_weights_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(UserError, match=r"'1\.weight'"):
        check_storage(model)
    model[1].requires_grad_(False)  # frozen parts may be stored as they like
    check_storage(model)
