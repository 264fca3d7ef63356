"""The loss of a causal model without its logits: `linear_cross_entropy` in place of the head.

transformers' models compute hidden states, then logits, then a loss. With a large vocabulary the logits are the largest
tensors of a run. `fuse_loss` changes a model so that a call with labels skips them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.losses import linear_cross_entropy

IGNORED = -100  # the label of tokens that do not count, as everywhere in transformers


class FusedLoss:
    """Put before the class of a causal model: a call with labels returns their SUM of the loss, and no logits."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return super().forward(*args, **kwargs)  # pyrefly: ignore[missing-attribute]

        # torch.compile follows an import statement, but no function that imports.
        from transformers.modeling_outputs import CausalLMOutput

        model: Any = self
        hidden = model.base_model(*args, **kwargs).last_hidden_state
        head = model.get_output_embeddings()

        if not isinstance(head, nn.Linear):  # since `fuse_loss`, an adapter may have been added to it
            raise _refusal(model, f"its head has become a {type(head).__name__}")

        # The output at a token predicts the next one. Shifting labels is cheaper than copying hidden states.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        loss = linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)
        return CausalLMOutput(loss=loss)  # pyrefly: ignore[bad-argument-type]


def fuse_loss(model: Any) -> Any:
    """Change a causal model of transformers, in place: `model(..., labels=labels).loss` is then the SUM of its loss.

    Labels are shifted inside, as transformers does. Its head is found; a model that does more to its logits than the
    head does is refused. Calls without labels return logits as before.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise _refusal(model, f"its head is a {type(head).__name__}, not nn.Linear")

    _check_nothing_else(model, head)
    kind = type(model)
    model.__class__ = type(kind.__name__, (FusedLoss, kind), {"__module__": kind.__module__})
    return model


@torch.no_grad()
def _check_nothing_else(model: Any, head: nn.Linear) -> None:
    """Refuse a model whose logits are not the head's output on its last hidden state: scaled or capped ones.

    One call with two tokens, in which tensors are compared by identity: so it also works for a model on `meta`.
    """
    seen: dict[str, Tensor] = {}
    hooks = [
        head.register_forward_hook(lambda _, inputs, output: seen.update(input=inputs[0], logits=output)),
        model.base_model.register_forward_hook(lambda _, inputs, output: seen.update(hidden=output[0])),
    ]
    # With a mask of four dimensions, transformers makes none, for which it would read values that `meta` has not.
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    more = {"attention_mask": tokens.new_ones(1, 1, 2, 2, dtype=torch.bool)} if tokens.is_meta else {}

    try:
        logits = model(tokens, use_cache=False, **more).logits
    except Exception as error:  # a model may raise anything
        raise _refusal(model, f"a probe with two tokens ended in {type(error).__name__}: {error}") from None
    finally:
        for hook in hooks:
            hook.remove()

    # The head may get a view of the hidden states, cut by `logits_to_keep`.
    if len(seen) != 3 or not _same(seen["input"], seen["hidden"]):
        raise _refusal(model, "its head does not get the last hidden state of the model below it")

    if not _same(logits, seen["logits"]):
        raise _refusal(model, "it changes the logits after its head, by a cap or a scale")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory, or views of all of it."""
    return one.shape == other.shape and (one is other or one._typed_storage()._cdata == other._typed_storage()._cdata)


def _refusal(model: Any, why: str) -> UserError:
    return UserError(
        f"the loss of {type(model).__name__} cannot be computed without its logits",
        why,
        "leave task.fused_loss out; or call lockstep.linear_cross_entropy inside the forward of a model of your own",
    )
