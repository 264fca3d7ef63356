"""Decide whether calls are captured at all, install that around a model, and take it away again."""

from __future__ import annotations

from torch import nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.call_chain import CallChain
from lockstep.parallel.cudagraph.device import CudaDevice
from lockstep.parallel.cudagraph.graphs import GraphedCall
from lockstep.parallel.cudagraph.variants import RunLength
from lockstep.runtime.context import EventLogger, Runtime


def wants_graph(config: RunConfig, runtime: Runtime) -> bool:
    """Whether to capture calls. config/conflicts.py refuses settings that cannot be combined with graph=true."""
    on_cuda = runtime.device.type == "cuda"
    if config.graph is True and not on_cuda:
        raise UserError(
            f"graph=true needs a GPU; the device is {runtime.device.type}",
            "CUDA graphs are for GPUs",
            "leave graph out",
        )

    if config.graph != "auto":
        return config.graph

    # With auto, only if the model's forward is not collective: all ranks would have to replay a captured collective in
    # the same order. And not with recomputation, which changes the kernels of a forward.
    return (
        on_cuda
        and config.strategy_record.local_forward
        and not config.uses_axis("tp", "pp")
        and not config.ddp.sync_batchnorm
        and not config.ddp.find_unused_parameters
        and not config.exact
        and config.remat == "none"
    )


def capture_calls(
    model: nn.Module, config: RunConfig, runtime: Runtime, log_event: EventLogger, length: RunLength | None = None
) -> None:
    """Install graph capture around the (compiled) call of `model`, in place, if the configuration allows it."""
    link = graph_link(model, config, runtime, log_event, length)
    if link:
        # The chain inserts it outside torch.compile, so that compiled kernels are captured.
        CallChain.of(model).install("graph", link)


def graph_link(
    model: nn.Module, config: RunConfig, runtime: Runtime, log_event: EventLogger, length: RunLength | None = None
) -> GraphedCall | None:
    """Return a link that captures, for a call of `model` or of a function of it; None if nothing is captured."""
    # A SyncBatchNorm in the user's model is collective too.
    if config.graph == "auto" and any(map(is_synchronised, model.modules())):
        return None
    if not wants_graph(config, runtime):
        return None
    return GraphedCall(model, CudaDevice(runtime.device), config.graph is True, log_event, length)


def has_captures(model: nn.Module) -> bool:
    link = CallChain.of(model).find("graph")
    return isinstance(link, GraphedCall) and any(variant.capture for variant in link.variants.values())


def release_captures(model: nn.Module) -> None:
    """Free the memory of all captures now."""
    chain = CallChain.of(model)
    link = chain.find("graph")
    if isinstance(link, GraphedCall):
        # The model and its link reference each other, so otherwise the captures would live until a garbage collection.
        chain.remove("graph")
        link.variants.clear()
