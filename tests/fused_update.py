"""The update of AdamATan2 that divides and skips by itself, beside the plain one that is given what comes of that."""

from __future__ import annotations

import torch

from lockstep.recipes.hrm.optimizers import AdamATan2

SCALE = 8.0


def assert_same_steps(plain: AdamATan2, fused: AdamATan2, spoiled: float, atol: float) -> None:
    """Five steps, of which two are to be skipped: their gradients are `spoiled`. Compares all weights after every
    step, and in the end what is remembered of the gradients: the weights would not tell another scale."""
    assert (plain.divides_and_skips, fused.divides_and_skips) == (False, True)
    ones, others = (optimizer.param_groups[0]["params"] for optimizer in (plain, fused))
    for skip in (True, False, True, False, False):
        gradients = [torch.randn_like(p) for p in ones]
        for p, gradient in zip(others, gradients, strict=True):
            p.grad = gradient * (spoiled if skip else SCALE)
        fused.grad_scale, fused.found_inf = (torch.tensor(float(v), device=others[0].device) for v in (SCALE, skip))
        fused.step()
        if not skip:
            for p, gradient in zip(ones, gradients, strict=True):
                p.grad = gradient
            plain.step()
        for a, b in zip(ones, others, strict=True):
            assert torch.allclose(a, b, atol=atol)
    for a, b in zip(ones, others, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(plain.state[a][name], fused.state[b][name], atol=1e-6)
