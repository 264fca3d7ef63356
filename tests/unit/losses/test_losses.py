"""The chunked token loss against torch's own, on whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import losses
from lockstep.errors import UserError
from lockstep.losses import _default_chunk, linear_cross_entropy

TOKENS, WIDTH, WORDS = (3, 11), 16, 50


def tensors(dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*TOKENS, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(WORDS, TOKENS, generator=draw)
    targets[0, ::3] = -100
    return hidden, weight, targets


def whole(hidden, weight, targets, ignore_index=-100):
    logits = F.linear(hidden, weight).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=ignore_index)


def gradients(loss, *of, start=1.0):
    return torch.autograd.grad(loss, of, torch.tensor(start, dtype=loss.dtype))


def off(found, right):
    return float((found.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("chunk", [1, 7, 33, 1000, None])
def test_it_is_cross_entropy_however_it_is_cut(chunk):
    hidden, weight, targets = tensors()
    right, found = whole(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    torch.testing.assert_close(found, right)
    pairs = zip(gradients(found, hidden, weight, start=3.0), gradients(right, hidden, weight, start=3.0), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("words", [1, 63, 64, 65, 127])
def test_any_number_of_words(words):
    draw = torch.Generator().manual_seed(words)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((9, WIDTH), (words, WIDTH), (words,))
    )
    targets = torch.randint(words, (9,), generator=draw)
    targets[0], targets[1] = words - 1, -100

    right = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum")
    found = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk=4)
    torch.testing.assert_close(found, right)
    mine, theirs = gradients(found, hidden, weight, bias), gradients(right, hidden, weight, bias)
    assert [gradient.shape for gradient in mine] == [x.shape for x in (hidden, weight, bias)]
    torch.testing.assert_close(mine, theirs)


def test_words_that_fill_up_change_no_bit(monkeypatch):
    """Whole numbers, so that no order of additions matters: 51 words with padding, and the same without."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-2, 3, (rows, 8), generator=draw).float().requires_grad_() for rows in (6, 51))
    targets = torch.randint(51, (6,), generator=draw)

    found = linear_cross_entropy(hidden, weight, targets)
    with monkeypatch.context() as patch:
        patch.setattr(losses, "WORDS_MULTIPLE", 1)
        right = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(found, right)
    torch.testing.assert_close(gradients(found, hidden, weight), gradients(right, hidden, weight), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_it_is_the_sum_of_torchs_own():
    hidden, weight, targets = tensors()
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    right = F.linear_cross_entropy(rows, weight, labels, reduction="sum")
    found = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradients(found, hidden, weight), gradients(right, hidden, weight))


def test_logits_in_float8():
    hidden, weight, targets = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, targets, chunk=5, float8=True)
        low = linear_cross_entropy(hidden, weight, targets)
    right = whole(hidden, weight, targets)

    assert abs(found / right - 1) < 2e-2
    # 4 bits of precision per factor: near, but not as near as bfloat16.
    truth = gradients(right, hidden, weight)
    for mine, usual, exact in zip(gradients(found, hidden, weight), gradients(low, hidden, weight), truth, strict=True):
        assert off(usual, exact) < off(mine, exact) < 0.1


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 20)])
def test_float8_is_refused_where_it_cannot_be(dtype, width):
    hidden, weight = torch.zeros(2, width, dtype=dtype), torch.zeros(3, width, dtype=dtype)
    with pytest.raises(UserError, match="float8"):
        linear_cross_entropy(hidden, weight, torch.zeros(2, dtype=torch.int64), float8=True)


def test_another_mark_for_targets_that_do_not_count():
    hidden, weight, targets = tensors()
    targets = targets.masked_fill(targets == -100, 7)
    found = linear_cross_entropy(hidden, weight, targets, chunk=5, ignore_index=7)
    right = whole(hidden, weight, targets, ignore_index=7)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradients(found, weight), gradients(right, weight))


def test_nothing_counts():
    hidden, weight, targets = tensors()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), chunk=5)
    assert loss == 0
    assert all(not grad.any() for grad in gradients(loss, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_near_the_truth_as_whole_logits_are(dtype):
    hidden, weight, targets = tensors(dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = gradients(whole(*exact, targets), *exact)
    usual = gradients(whole(hidden, weight, targets), hidden, weight)
    found = gradients(linear_cross_entropy(hidden, weight, targets, chunk=5), hidden, weight)
    for mine, theirs, right in zip(found, usual, truth, strict=True):
        assert mine.dtype == dtype
        assert off(mine, right) < 1.5 * off(theirs, right)


def test_autocast_computes_low_and_adds_high():
    hidden, weight, targets = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right, found = whole(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets, chunk=5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, right, rtol=1e-3, atol=0)
    mine, theirs = gradients(found, hidden, weight), gradients(right, hidden, weight)
    assert [grad.dtype for grad in mine] == [torch.float32, torch.float32]
    assert max(map(off, mine, theirs)) < 1e-2
    assert not torch.equal(mine[1], mine[1].bfloat16().float())  # the weight's was never rounded to 8 bits
    plain = linear_cross_entropy(hidden, weight, targets)
    assert 0 < abs(plain - found) < 1e-2 * plain  # autocast did something


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)

    def forward(self, ids, targets, loss_of):
        return loss_of(self.words(ids).tanh(), self.words.weight, targets)


@pytest.mark.parametrize("compiled", [False, True])
def test_tied_weights_and_one_compiled_graph(compiled):
    torch.manual_seed(0)
    model, (_, _, targets) = Tied(), tensors()
    ids = torch.randint(WORDS, TOKENS)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    right = gradients(model(ids, targets, whole), model.words.weight)
    found = gradients(call(ids, targets, linear_cross_entropy), model.words.weight)
    torch.testing.assert_close(found, right)


def test_gradients_only_where_they_are_asked_for():
    hidden, weight, targets = tensors()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad
    rows, bias = hidden.detach().flatten(0, -2), torch.zeros(WORDS, dtype=torch.float64)
    arguments = (rows, weight.detach(), bias, targets.flatten(), torch.float64, 5, -100, False)
    for asked in ((False, False, False), (True, False, False), (False, True, False), (False, False, True)):
        _, *found = torch.ops.lockstep.linear_cross_entropy(*arguments, *asked)
        assert tuple(gradient.numel() > 0 for gradient in found) == asked
    frozen = linear_cross_entropy(hidden, weight.detach(), targets)
    torch.testing.assert_close(gradients(frozen, hidden), gradients(whole(hidden, weight, targets), hidden))


def test_torchs_own_checks_of_an_operator():
    hidden, weight, targets = tensors(torch.float32)
    rows = hidden.detach().flatten(0, -2).requires_grad_()
    bias = torch.randn(WORDS, requires_grad=True)
    arguments = (rows, weight, bias, targets.flatten(), torch.float32, 5, -100, False, True, True, True)
    torch.library.opcheck(
        torch.ops.lockstep.linear_cross_entropy.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_chunks_of_the_usual_size():
    assert _default_chunk(50304) == 8192
    assert _default_chunk(2**40) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h, w, t: (h, w.T, t), "not its transpose"),
        (lambda h, w, t: (h, w, t[:1]), "one target"),
        (lambda h, w, t: (h[..., None], w, t), "one target"),
    ],
)
def test_shapes_that_do_not_fit(change, says):
    with pytest.raises(UserError, match=says):
        linear_cross_entropy(*change(*tensors()))


def test_a_bias_that_does_not_fit():
    with pytest.raises(UserError, match="bias"):
        linear_cross_entropy(*tensors(), bias=torch.zeros(WORDS + 1))


def test_a_chunk_of_nothing():
    with pytest.raises(UserError, match="chunk=0"):
        linear_cross_entropy(*tensors(), chunk=0)


def test_a_target_outside_the_vocabulary():
    hidden, weight, targets = tensors()
    targets[1, 1] = WORDS
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(hidden, weight, targets)
