"""What a call of the model changes besides its results; and how to call it without a trace."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.parallel.attributes import Attributes


class SourceContext:
    """Buffers, attributes and random numbers as they are now. They come back with `restore`, and at the end of a
    `with`."""

    def __init__(self, model: nn.Module, generator: torch.Generator = torch.default_generator):
        """`generator`: where the call draws its random numbers, beside those of the host."""
        self._generators = [torch.default_generator, generator]
        self._states = [generator.get_state() for generator in self._generators]
        self._host = random.getstate(), np.random.get_state()
        self._owned = [(m, dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()]
        held = {id(b): b for _, buffers, _ in self._owned for b in buffers.values() if b is not None}
        self._values = [(buffer, buffer.clone()) for buffer in held.values()]
        self._attributes = Attributes(model)

    def __enter__(self) -> SourceContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._host[0])
        np.random.set_state(self._host[1])
        for module, buffers, unsaved in self._owned:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(unsaved)
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        self._attributes.restore()

    def buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer, _ in self._values]

    def drawn_on_host(self) -> bool:
        """Random numbers of the host, which a replay would not draw again."""
        host, device = self._generators
        torchs = host is device or torch.equal(host.get_state(), self._states[0])
        numpys = all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), self._host[1], strict=True))
        return not (torchs and numpys and random.getstate() == self._host[0])

    def replaced(self) -> list[str]:
        """Buffers that are other tensors now, or were not there."""
        return [
            name
            for module, buffers, _ in self._owned
            for name in {**buffers, **module._buffers}
            if module._buffers.get(name) is not buffers.get(name)
        ]

    def attributes_set(self) -> list[str]:
        return self._attributes.changed()
