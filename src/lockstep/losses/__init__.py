"""Cross-entropy for language models whose logits would be the largest tensor of the run.

With a vocabulary of 50,000, the logits of 32,000 tokens are 3 GB in bfloat16, and a step reads or writes them about
six times. `linear_cross_entropy` never stores all of them: for one chunk of tokens after another it computes logits and
loss, and immediately the gradients, which need the logits too. The backward only scales these gradients.
"""

# Why not torch.nn.functional.linear_cross_entropy (torch 2.13), with its chunked path? Measured on a CPU with 2048
# tokens, C = 256, V = 16000, against float64:
#   - in bfloat16 it returns the loss in bfloat16, with a relative error of 2e-2 (ours: float32, 1e-6);
#   - it took 1.9 s in float32 and 1.1 s in bfloat16 (ours: 1.4 s and 0.6 s);
#   - torch.compile(fullgraph=True) refuses it and breaks the graph otherwise (ours is one operator of the graph).
# On an H200 ours trains GPT-2 at 537k tokens/s with torch 2.11, which has no such function. Compare again when it
# compiles and returns float32: `python benchmarks/token_loss.py` has a row for it.

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from lockstep.errors import UserError

# Logits per chunk, unless the caller sets `chunk`: 1 GiB in bfloat16. More would not make a GPU faster.
CHUNK_ELEMENTS = 2**29

# Inside the operator a vocabulary is rounded up to a multiple of this: the rows of the logits then begin at 128 bytes.
# With GPT-2's 50,257 words, products of unaligned matrices halved the speed of the whole training on an H200.
WORDS_MULTIPLE = 64

# The largest number of float8_e4m3fn.
FLOAT8, FLOAT8_MAX = torch.float8_e4m3fn, 448.0


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    float8: bool = False,
) -> Tensor:
    """Return the SUM over tokens of `cross_entropy(hidden @ weight.T + bias, targets)`, as a `Loss` needs it.

    hidden        (..., C) the output of the model before its head
    weight        (V, C) the weight of the head
    targets       (...) class indices, int64; tokens with the target `ignore_index` do not count
    bias          (V,) the bias of the head
    chunk         the number of tokens whose logits exist at the same time
    float8        compute the logits in float8, with a scale for each token and each word. Gradients are not rounded so

    The loss is float32, or float64 for float64 inputs. Matrix products use autocast's dtype, or the dtype of `hidden`
    if autocast is off. The gradient of `weight` is summed over chunks in float32. Any V is fast: inside, the weight is
    padded to a multiple of 64 words. Call it inside the model's `forward`, where a sharded weight is gathered. There is
    no second derivative.
    """
    _check(hidden, weight, targets, bias, chunk)

    # Autocast does not cast float64.
    device = hidden.device.type
    casts = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if casts else hidden.dtype
    if float8:
        _check_float8(dtype, hidden)

    needs_grad = torch.is_grad_enabled()
    loss, _, _, _ = _chunked(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets.reshape(-1).contiguous(),
        dtype,
        chunk or _default_chunk(len(weight)),
        ignore_index,
        float8,
        needs_grad and hidden.requires_grad,
        needs_grad and weight.requires_grad,
        needs_grad and bias is not None and bias.requires_grad,
    )
    return loss


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk: int | None) -> None:
    if hasattr(weight, "placements"):
        raise UserError(
            "linear_cross_entropy got a weight that is sharded over ranks (a DTensor); it needs the full one",
            "",
            "call it inside the model's forward, and leave the layer out of tensor_plan",
        )

    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != targets.shape:
        raise UserError(
            f"linear_cross_entropy got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)}, whose shapes do not fit together",
            "they must be (..., C), (V, C) and (...)",
            "give every token one target; pass the weight of nn.Linear(C, V), not its transpose",
        )

    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(
            f"linear_cross_entropy got a bias {tuple(bias.shape)} for a weight {tuple(weight.shape)}",
            "",
            "pass the bias of the same nn.Linear(C, V): one number for each word",
        )

    if chunk is not None and chunk < 1:
        raise UserError(f"linear_cross_entropy: chunk={chunk} is below 1", "", "give 1 or more, or leave it out")


def _check_float8(dtype: torch.dtype, hidden: Tensor) -> None:
    # The rows of float8 matrices must begin at multiples of 16 bytes.
    if dtype != torch.bfloat16 or hidden.shape[-1] % 16:
        raise UserError(
            f"linear_cross_entropy cannot compute logits of {dtype} with a width of {hidden.shape[-1]} in float8",
            "float8=True needs bfloat16, by autocast or by the dtype of hidden, and a width that is a multiple of 16",
            "set precision=bf16 or precision=fp8, or leave float8 out",
        )


def _default_chunk(vocabulary: int) -> int:
    """Return the largest number of tokens, a power of two, whose logits are at most CHUNK_ELEMENTS."""
    return 2 ** max(0, (CHUNK_ELEMENTS // vocabulary).bit_length() - 1)


@torch.library.custom_op("lockstep::linear_cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    chunk: int,
    ignore_index: int,
    float8: bool,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss (), and the gradients of hidden (N, C) in `dtype`, of weight (V, C) and of bias (V,).

    A gradient is empty unless `for_hidden`, `for_weight` or `for_bias` is true. To `torch.compile` this custom operator
    is one opaque node.
    """
    words = len(weight)
    h = hidden.to(dtype)
    w = _padded(weight, dtype)
    b = None if bias is None else _padded(bias, dtype)
    logits_of = _logits_of(w, float8)

    losses = hidden.new_empty(len(h), dtype=torch.promote_types(dtype, torch.float32))
    d_hidden = torch.empty_like(h) if for_hidden else h.new_empty(0)
    d_weight = torch.zeros_like(w, dtype=losses.dtype) if for_weight else losses.new_empty(0)
    d_bias = losses.new_zeros(len(w)) if for_bias else losses.new_empty(0)

    for start in range(0, len(h), chunk):
        tokens = slice(start, start + chunk)
        logits = logits_of(h[tokens])
        if b is not None:
            logits += b

        # Overwrites `logits` with d loss / d logits if a gradient is needed. The words that fill up stay out of it:
        # their logits are 0, and a product with them adds 0 to the gradient of `hidden`.
        gradient = for_hidden or for_weight or for_bias
        _row_losses_(logits[:, :words], targets[tokens], losses[tokens], ignore_index, gradient)

        if for_hidden:
            torch.mm(logits, w, out=d_hidden[tokens])
        if for_weight:
            _add_product_(d_weight, logits.T, h[tokens])
        if for_bias:
            d_bias += logits.sum(dim=0, dtype=d_bias.dtype)

    bias_dtype = weight.dtype if bias is None else bias.dtype
    return losses.sum(), d_hidden, d_weight[:words].to(weight.dtype), d_bias[:words].to(bias_dtype)


# Shapes and dtypes only, for tracing by torch.compile.
@_chunked.register_fake
def _(hidden, weight, bias, targets, dtype, chunk, ignore_index, float8, for_hidden, for_weight, for_bias):
    loss = hidden.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    d_hidden = torch.empty_like(hidden, dtype=dtype) if for_hidden else hidden.new_empty(0, dtype=dtype)
    d_weight = torch.empty_like(weight) if for_weight else weight.new_empty(0)
    d_bias = torch.empty_like(bias) if for_bias else (weight if bias is None else bias).new_empty(0)
    return loss, d_hidden, d_weight, d_bias


def _save_gradients(ctx, inputs, output) -> None:
    hidden, *_, for_hidden, for_weight, for_bias = inputs
    _, d_hidden, d_weight, d_bias = output

    # The gradients among the outputs are never differentiated: do not allocate zeros as their gradients.
    ctx.set_materialize_grads(False)
    ctx.hidden_dtype = hidden.dtype
    ctx.needed = for_hidden, for_weight, for_bias
    ctx.save_for_backward(d_hidden, d_weight, d_bias)


def _scale_gradients(ctx, grad, *second) -> tuple[Tensor | None, ...]:
    assert all(gradient is None for gradient in second), "linear_cross_entropy has no second derivative"
    for_hidden, for_weight, for_bias = ctx.needed
    d_hidden, d_weight, d_bias = ctx.saved_tensors
    scaled_hidden = (d_hidden * grad).to(ctx.hidden_dtype) if for_hidden else None
    scaled_weight = d_weight * grad if for_weight else None
    scaled_bias = d_bias * grad if for_bias else None

    # One entry for each argument of `_chunked`.
    return scaled_hidden, scaled_weight, scaled_bias, None, None, None, None, None, None, None, None


_chunked.register_autograd(_scale_gradients, setup_context=_save_gradients)


# ---- the parts of a chunk ----


def _padded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight (V, C) or a bias (V,) in `dtype`, with zeros for more words, up to a multiple of 64."""
    words = len(tensor)
    more = -words % WORDS_MULTIPLE
    if not more:
        return tensor.to(dtype).contiguous()

    padded = tensor.new_empty((words + more, *tensor.shape[1:]), dtype=dtype)
    padded[:words] = tensor
    padded[words:] = 0
    return padded


def _logits_of(weight: Tensor, float8: bool) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states (N, C) to their logits (N, V)."""
    if not float8:
        return lambda hidden: hidden @ weight.T

    low, word_scales = _to_float8(weight)
    word_scales = word_scales.T.contiguous()

    def logits(hidden: Tensor) -> Tensor:
        rows, scales = _to_float8(hidden)
        return torch._scaled_mm(rows, low.T, scales, word_scales, out_dtype=torch.bfloat16)

    return logits


def _to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (N, C) in float8, and the factor (N, 1) of each in float32."""
    # A row of zeros, such as a word that fills up, has no largest element.
    scales = (rows.abs().amax(dim=1, keepdim=True).float() / FLOAT8_MAX).clamp_min(1e-12)
    return (rows.float() / scales).to(FLOAT8), scales


def _row_losses_(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Fill `losses` (N,); with `gradient`, overwrite the logits (N, V) with d loss / d logits."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton"):
        from lockstep.losses.kernel import row_losses_

        row_losses_(logits, targets, losses, ignore_index, gradient)
        return

    # An ignored target is not a valid column, so it gathers from column 0, and its loss is then set to 0.
    counted = targets != ignore_index
    columns = targets.where(counted, 0)[:, None]
    wide = logits.to(losses.dtype)
    log_sums = wide.logsumexp(dim=1, keepdim=True)
    losses.copy_((log_sums - wide.gather(1, columns)).squeeze(1).where(counted, 0.0))
    if gradient:
        # softmax(logits) - one_hot(targets)
        slope = (wide - log_sums).exp_().scatter_add_(1, columns, -torch.ones_like(log_sums))
        logits.copy_(slope.where(counted[:, None], 0.0))


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b in the dtype of `total`, which may be wider than the dtype of `a` and `b`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        # The product itself is accumulated in float32 and never rounded to bfloat16.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)
