"""Replicas that exchange gradients: torch's DistributedDataParallel, driven for sums instead of means."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import DDPConfig
from lockstep.errors import UserError
from lockstep.parallel.ddp.hooks import HalfHook, Hook, WideHook
from lockstep.parallel.ddp.powersgd import STATE_NAME, PowerSGDHook
from lockstep.parallel.driver import Whole, trainable
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord, ControlWordCodec

# torch 2.13 renamed it.
BUFFERS_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class _WithWord(nn.Module):
    """The model plus a handful of numbers that look like one more parameter.

    Their "gradient" is this rank's control word. So the word is summed inside a gradient bucket that travels
    anyway, and the agreement of all ranks costs no collective of its own (on gloo one costs about a fifth of the
    step of a tiny model).
    """

    def __init__(self, model: nn.Module, word: Tensor):
        super().__init__()
        self.model = model
        # In a module of its own, after the model: DDP fills buckets from the back, and this gradient is known first.
        self.last = nn.ParameterList([nn.Parameter(word)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Replica(DistributedDataParallel):
    """What the task calls. Apart from the exchange it looks like the user's model: same parameters, same names."""

    def __init__(self, carrier: _WithWord, **options: Any):
        super().__init__(carrier, **options)
        self._fix_buckets()
        self.armed = False
        self._complete = True  # from here on, what the user's model has is set there

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Last parameter first: about the order in which gradients come, and the order of the buckets from now on."""
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]

    def _fix_buckets(self) -> None:
        """torch deals the parameters to buckets anew after the first step. From three ranks on, the place of a gradient
        in its bucket decides in which order the ranks are added, so a run that was resumed would differ in its last
        bits. Here the deal is made once, before the first step."""
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.armed = torch.is_grad_enabled()  # torch prepares the exchange here, and only here
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._users_model(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if own.get("_complete") and name not in own and hasattr(self._users_model(), name):
            setattr(self._users_model(), name, value)
        else:
            super().__setattr__(name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._users_model().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._users_model().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._users_model().load_state_dict(*args, **kwargs)

    def _users_model(self) -> nn.Module:
        carrier: Any = super().__getattr__("module")
        return carrier.model


class DDPDriver(Whole):
    leaves_sums = False  # DDP leaves the mean over ranks, and so do its hooks

    def __init__(self, model: nn.Module, config: DDPConfig, runtime: Runtime, seed: int = 0):
        self.model, self.runtime = model, runtime
        self.names, self.parameters = trainable(model)
        self.gradient_factor = 1.0 if self.leaves_sums else float(runtime.world.size)
        self._low = self.parameters[-1].dtype == torch.bfloat16
        dtype = self._word_dtype()
        self.codec = ControlWordCodec(runtime.device, dtype)
        carrier = _WithWord(model, torch.zeros(LENGTH, dtype=dtype, device=runtime.device))
        self._frozen = _frozen_names(model)
        ignored = [f"model.{name}" for name in self._frozen]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(carrier, ignored)
        self._replica = Replica(
            carrier,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            **{BUFFERS_OPTION: False},  # torch would in evaluations too, where ranks may run unequally many forwards
        )
        self._word_parameter = carrier.last[0]
        self.module: nn.Module = self._replica
        self.hook = self._make_hook(config, seed)
        if self.hook:
            self._replica.register_comm_hook(self.hook, lambda hook, bucket: hook(bucket))
        if isinstance(self.hook, PowerSGDHook):
            self.extra_state = {STATE_NAME: self.hook}
        self._broadcasts_buffers = config.broadcast_buffers
        self._reached: set[int] | None = None if config.gradient_as_bucket_view else self._watch_gradients()
        self.sync_buffers()

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._word_parameter.grad = None
        if self._broadcasts_buffers:
            self.sync_buffers()

    def arm(self, last: bool) -> None:
        self._replica.require_backward_grad_sync = last
        if self._reached is not None:
            self._reached.clear()
        self._replica.armed = False

    def backward(self, total: Tensor, start: Tensor, word: ControlWord | None) -> None:
        if not self._replica.armed:
            raise _bypassed(type(self.model).__name__)
        if self.hook:
            self.hook.prepare(start, word)
        if word is None:
            torch.autograd.backward(total, start)
            return
        # `times` the world size, since DDP will divide by it.
        carried = self.codec.pack(word, times=self.gradient_factor)
        torch.autograd.backward((total, self._word_parameter), (start, carried))
        self._check_complete()

    def word(self) -> Tensor:
        assert self._word_parameter.grad is not None
        return self._word_parameter.grad

    def sync_buffers(self) -> None:
        live = [buffer for name, buffer in self.model.named_buffers() if name not in self._frozen]
        self.runtime.collectives.broadcast_(live)

    def _word_dtype(self) -> torch.dtype:
        return torch.float32 if self._low else self.parameters[-1].dtype

    def _make_hook(self, config: DDPConfig, seed: int) -> Hook | None:
        word, group = self._word_parameter, self._replica.process_group
        assert group is not None
        if config.hook == "powersgd":
            named = dict(zip(self.names, self.parameters, strict=True))
            return PowerSGDHook(word, group, named, config, seed)
        if config.hook == "none" and self._low:
            return WideHook(word, group)
        dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
        return HalfHook(word, group, dtypes[config.hook]) if config.hook in dtypes else None

    def _watch_gradients(self) -> set[int]:
        """The parameters that backward has reached, where gradients themselves do not show it."""
        reached: set[int] = set()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: reached.add(id(p)))
        return reached

    def _check_complete(self) -> None:
        """A parameter that the last backward did not reach leaves its bucket unsent: DDP says so one step later,
        without names, and after the last step not at all. What was exchanged is a view into a bucket."""
        pairs = zip(self.names, self.parameters, strict=True)
        if self._reached is None:
            unsent = [name for name, p in pairs if p.grad is None or not p.grad._is_view()]
        else:
            unsent = [name for name, p in pairs if id(p) not in self._reached]
        check_reached(unsent)


def _frozen_names(model: nn.Module) -> list[str]:
    """Frozen parameters, and buffers of modules without any trainable parameter: moved, but never wrapped."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    for prefix, module in model.named_modules():
        if any(True for _ in module.parameters()) and not any(p.requires_grad for p in module.parameters()):
            frozen += [f"{prefix}.{name}" for name, _ in module.named_buffers()]
    return sorted(set(frozen))


def _bypassed(model: str) -> UserError:
    return UserError(
        "a training forward through the model that Lockstep passed in",
        f"a loss made without it: {model} or a part of it was called directly, so its gradients would not be "
        "exchanged and the replicas would drift apart",
        "in `loss(model, batch)` call `model(...)`, not `self.net(...)`, `model.module(...)` or `model.encoder(...)`; "
        "give the model's forward an argument that selects what to compute",
    )


def check_reached(missed: list[str]) -> None:
    """`missed`: the parameters that a backward should have reached."""
    if missed:
        raise UserError(
            "every trainable parameter takes part in the loss of every micro-batch",
            f"no gradient for {_some(missed)}",
            "freeze them (requires_grad=False) if nothing uses them; if only some micro-batches do, type "
            "ddp.find_unused_parameters=true, or (with exact=true) add `0 * parameter.sum()` for each to the loss",
        )


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
