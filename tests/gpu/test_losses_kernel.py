"""The chunked token loss on a GPU, where its rows are a Triton kernel, against float64 on whole logits."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.losses import linear_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")

TOKENS, WIDTH = 300, 64


def tensors(words):
    draw = torch.Generator("cuda").manual_seed(words)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw, device="cuda").bfloat16().float().requires_grad_()
    weight = (torch.randn(words, WIDTH, generator=draw, device="cuda") / 4).bfloat16().float().requires_grad_()
    targets = torch.randint(words, (TOKENS,), generator=draw, device="cuda")
    targets[::7] = -100
    targets[1], targets[2] = 0, words - 1
    return hidden, weight, targets


def whole(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


def off(found, right):
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("words", [100, 4096, 5001, 50257])
@pytest.mark.parametrize("low", [False, True])
def test_as_near_the_truth_as_whole_logits_are(words, low):
    torch.set_float32_matmul_precision("highest")
    hidden, weight, targets = tensors(words)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = whole(*exact, targets)
    right = torch.autograd.grad(truth, exact)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
        usual = torch.autograd.grad(whole(hidden, weight, targets), (hidden, weight))
        loss = linear_cross_entropy(hidden, weight, targets, chunk=128)
    found = torch.autograd.grad(loss, (hidden, weight))
    assert abs(loss.item() / truth.item() - 1) < (1e-3 if low else 1e-6)
    for mine, theirs, exactly in zip(found, usual, right, strict=True):
        assert mine.dtype == torch.float32
        assert off(mine, exactly) < 1.5 * off(theirs, exactly) + 1e-6


def test_a_target_outside_the_vocabulary_is_no_number():
    hidden, weight, targets = tensors(100)
    targets[5] = 100
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.isnan()
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad[5].isnan().all()
    assert grad[6].isfinite().all()


def test_inside_a_compiled_model():
    hidden, weight, targets = tensors(1000)
    call = torch.compile(lambda h, w, t: linear_cross_entropy(h.tanh(), w, t, chunk=128), fullgraph=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, right = call(hidden, weight, targets), linear_cross_entropy(hidden.tanh(), weight, targets, chunk=128)
    torch.testing.assert_close(found, right)
    pairs = zip(torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(right, (hidden, weight)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)
