"""The loss of a language model whose logits would be the largest tensor of the run.

With 50,000 words, the logits of 32,000 tokens are 3 GB in bfloat16, and a step reads or writes them about six times.
`linear_cross_entropy` never has them all at once: it goes through the tokens in chunks, and for every chunk it makes
the logits, the loss, and at once the gradients, which need the logits too. Backward only scales what is there by then.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from lockstep.errors import UserError

CHUNK_ELEMENTS = 2**29  # logits at a time, if the caller does not say: 1 GiB in bfloat16


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int | None = None, ignore_index: int = -100
) -> Tensor:
    """The SUM over tokens of `cross_entropy(hidden @ weight.T, targets)`, as a `Loss` wants it, in float32 or better.

    `hidden` (..., C), `weight` (V, C), `targets` (...); targets equal to `ignore_index` count nothing. `chunk` is the
    number of tokens whose logits exist at a time. Products are in autocast's number format, without autocast in that of
    `hidden`; the gradient of `weight` is added up over chunks in float32. Use it inside the model's `forward`, where a
    weight that is cut over ranks is whole. There is no second derivative.
    """
    _check(hidden, weight, targets, chunk)
    kind, learns = hidden.device.type, torch.is_grad_enabled()
    casts = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64  # which autocast leaves alone
    loss, _, _ = _chunked(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        targets.reshape(-1).contiguous(),
        torch.get_autocast_dtype(kind) if casts else hidden.dtype,
        chunk or _usual_chunk(len(weight)),
        ignore_index,
        learns and hidden.requires_grad,
        learns and weight.requires_grad,
    )
    return loss


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None) -> None:
    if hasattr(weight, "placements"):
        raise UserError(
            "linear_cross_entropy with a weight that this rank holds whole",
            "one that is cut over ranks",
            "call it inside the model's forward, and leave the layer out of tensor_plan",
        )
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != targets.shape:
        raise UserError(
            "linear_cross_entropy(hidden (..., C), weight (V, C), targets (...))",
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}",
            "give every token one target; the weight is that of nn.Linear(C, V), not its transpose",
        )
    if chunk is not None and chunk < 1:
        raise UserError("linear_cross_entropy in chunks of tokens", f"chunk={chunk}", "give 1 or more, or leave it out")


def _usual_chunk(words: int) -> int:
    return 2 ** max(0, (CHUNK_ELEMENTS // words).bit_length() - 1)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("lockstep::linear_cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    chunk: int,
    ignore_index: int,
    for_hidden: bool,
    for_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of hidden (in `dtype`), gradient of weight; those not asked for are empty.

    An operator of its own, so that `torch.compile` takes it as it is.
    """
    h, w = hidden.to(dtype), weight.to(dtype)
    losses = hidden.new_empty(len(h), dtype=_sum_dtype(dtype))
    d_hidden = torch.empty_like(h) if for_hidden else h.new_empty(0)
    d_weight = torch.zeros_like(w, dtype=losses.dtype) if for_weight else losses.new_empty(0)
    for start in range(0, len(h), chunk):
        here = slice(start, start + chunk)
        logits = h[here] @ w.T
        _row_losses_(logits, targets[here], losses[here], ignore_index, gradient=for_hidden or for_weight)
        if for_hidden:
            torch.mm(logits, w, out=d_hidden[here])
        if for_weight:
            _add_product_(d_weight, logits.T, h[here])
    return losses.sum(), d_hidden, d_weight.to(weight.dtype)


@_chunked.register_fake
def _(hidden, weight, targets, dtype, chunk, ignore_index, for_hidden, for_weight):
    loss = hidden.new_empty((), dtype=_sum_dtype(dtype))
    d_hidden = torch.empty_like(hidden, dtype=dtype) if for_hidden else hidden.new_empty(0, dtype=dtype)
    return loss, d_hidden, torch.empty_like(weight) if for_weight else weight.new_empty(0)


def _keep(ctx, inputs, output) -> None:
    hidden, *_ = inputs
    _, d_hidden, d_weight = output
    ctx.set_materialize_grads(False)
    ctx.hidden_dtype, ctx.asked = hidden.dtype, inputs[-2:]
    ctx.save_for_backward(d_hidden, d_weight)


def _scale_kept(ctx, start, *second) -> tuple[Tensor | None, ...]:
    assert all(grad is None for grad in second), "linear_cross_entropy has no second derivative"
    for_hidden, for_weight = ctx.asked
    d_hidden, d_weight = ctx.saved_tensors
    of_hidden = (d_hidden * start).to(ctx.hidden_dtype) if for_hidden else None
    return of_hidden, d_weight * start if for_weight else None, None, None, None, None, None, None


_chunked.register_autograd(_scale_kept, setup_context=_keep)


def _row_losses_(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Fill `losses`; with `gradient`, put d loss / d logits where the logits were."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton"):
        from lockstep.losses_kernel import row_losses_

        row_losses_(logits, targets, losses, ignore_index, gradient)
        return
    kept = targets != ignore_index
    places = targets.where(kept, 0)[:, None]
    wide = logits.to(losses.dtype)
    log_sums = wide.logsumexp(dim=1, keepdim=True)
    losses.copy_((log_sums - wide.gather(1, places)).squeeze(1).where(kept, 0.0))
    if gradient:
        share = (wide - log_sums).exp_().scatter_add_(1, places, -torch.ones_like(log_sums))
        logits.copy_(share.where(kept[:, None], 0.0))


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, added up in the number format of `total`, which may be wider."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)
