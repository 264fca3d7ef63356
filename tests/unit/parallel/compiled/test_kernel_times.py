"""How much of a step compiled code could save, by the names of its kernels."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, schedule

from lockstep.parallel.compiled import kernel_times
from lockstep.parallel.compiled.kernel_times import MOST, SAVED, KernelTimer, kind_of, saving_s


class FakeProfile:
    """Notes that it was started and stopped, and has seen no kernel."""

    def __init__(self):
        self.calls: list[str] = []

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")

    def events(self):
        return []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "fixed"),
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_nn_align2", "unaligned"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>", "odd"),
        # Of two aligned matrices (2048, 2048) in fp32: there is nothing to pad.
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)", "fixed"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>", "fixed"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "fixed"),
        ("Memcpy HtoD (Pinned -> Device)", "fixed"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "fixed"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", "fusible"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "fusible"),
        ("void at::native::batch_norm_backward_kernel<c10::BFloat16>", "fusible"),
    ],
)
def test_kernels_are_sorted_by_their_names(name: str, kind: str):
    assert kind_of(name) == kind


def test_the_saving_of_a_step():
    kernels = [("void at::native::add", 4e-3), ("void at::native::mul", 2e-3), ("nvjet_x", 5e-3), ("gemm_align1", 1e-3)]
    assert saving_s(kernels, 0.013) == pytest.approx(SAVED["fusible"] * 6e-3 + SAVED["odd"] * 1e-3)


def test_no_step_can_lose_nearly_all_of_its_time():
    assert saving_s([("void at::native::add", 1.0)], 0.01) == MOST * 0.01


@pytest.mark.parametrize("kernels", [[], [("void at::native::add", 5e-3)]])
def test_a_gpu_that_waits_for_the_host_shows_nothing(kernels: list[tuple[str, float]]):
    assert saving_s(kernels, 0.01) is None


def test_a_profiler_of_the_user_is_left_alone():
    timer = KernelTimer(torch.device("cpu"))
    with torch.profiler.profile() as theirs:
        timer.start()
        torch.ones(2) + 1
        assert timer.stop() == []
    assert any(event.name == "aten::add" for event in theirs.events())


def test_a_profiler_of_the_user_that_warms_up_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    """During the warm-up torch says that no profiler is enabled. Another one would crash the process."""
    monkeypatch.setattr(kernel_times, "profile", lambda **_: pytest.fail("a second profiler was made"))
    timer = KernelTimer(torch.device("cpu"))

    with torch.profiler.profile(schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as theirs:
        timer.start()
        assert timer.stop() == []
        theirs.step()
        torch.ones(2) + 1

    assert any(event.name == "aten::add" for event in theirs.events())


def test_a_step_that_is_measured_again_after_a_failure_counts_once(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(kernel_times, "profile", lambda **_: made.append(FakeProfile()) or made[-1])
    timer = KernelTimer(torch.device("cpu"))
    timer.start()
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    made[0].stop = lambda: setattr(profiler, "_is_profiler_enabled", False)
    timer.start()
    assert [profile.calls for profile in made] == [["start"], ["start"]]


@pytest.mark.parametrize("ends", [True, False])
def test_a_profiler_that_the_user_starts_in_the_measured_step(ends: bool, monkeypatch: pytest.MonkeyPatch):
    """It ends ours. Stopping ours then would raise, or stop theirs."""
    monkeypatch.setattr(kernel_times, "profile", lambda **_: torch.profiler.profile(activities=[ProfilerActivity.CPU]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    timer = KernelTimer(torch.device("cpu"))
    timer.start()

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
        torch.ones(2) + 1
        if not ends:
            assert timer.stop() == []

    assert timer.stop() == []
    assert any(event.name == "aten::add" for event in theirs.events())


def test_a_profiler_of_the_user_after_the_measured_step_hinders_nobody(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(kernel_times, "profile", lambda **_: made.append(FakeProfile()) or made[-1])
    monkeypatch.setattr(profiler, "_is_profiler_enabled", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]):
        pass

    timer = KernelTimer(torch.device("cpu"))
    timer.start()
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    assert timer.stop() == []
    assert made[0].calls == ["start", "stop"]
