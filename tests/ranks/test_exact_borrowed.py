"""`exact: true` on models that nobody here wrote: several blocks read one tensor, layouts change inside a block, and a
parameter has no dimension. One hash each, at one, two and three ranks, under ddp and fsdp."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.exact_models import bits
from zoo import SLOW_TO_IMPORT

WORDS, SAMPLES = 32, 24
VALUES = {"exact": True, "global_batch": 6, "steps": 3, "clip.norm": 0.5, "log.every": 1}
LAYOUTS = {"one": (1, "ddp"), "ddp": (2, "ddp"), "fsdp": (3, "fsdp")}


class Borrowed(Task):
    """A tiny public model, randomly initialised; `tensors` are the samples."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def data(self) -> TensorDataset:
        return TensorDataset(*self.tensors)

    def eval_data(self) -> TensorDataset:
        return self.data()


class T5(Borrowed):
    """Every block of the decoder reads the encoder's output, as keys and as values."""

    def __init__(self) -> None:
        super().__init__(_words(6), _words(5))

    def model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        source, target = batch
        return _cross_entropy(model(input_ids=source, decoder_input_ids=target[:, :-1]).logits, target[:, 1:])


class Whisper(T5):
    """The same, with an encoder of sound."""

    def __init__(self) -> None:
        Borrowed.__init__(self, torch.randn(SAMPLES, 8, 16, generator=_generator()), _words(5))

    def model(self) -> nn.Module:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        lengths = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 8}
        sizes = {"vocab_size": WORDS, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        return WhisperForConditionalGeneration(WhisperConfig(**layers, **lengths, **sizes, **tokens))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        sound, target = batch
        return _cross_entropy(model(input_features=sound, decoder_input_ids=target[:, :-1]).logits, target[:, 1:])


class ConvNeXt(Borrowed):
    """timm's. Convolutions choose their kernel by the strides of their input.

    A block permutes its output, so that the channels of (N, C, H, W) lie next to each other. FSDP's node around the
    inputs of the next block makes a view of it. In a micro-batch of one sample torch makes up the stride of that
    dimension anew: the picture no longer counts as channels-last, and the depthwise convolution runs in another kernel,
    which adds in another order. With two samples or more the strides say what they said, and so do the bits.
    """

    def __init__(self) -> None:
        super().__init__(torch.randn(SAMPLES, 3, 32, 32, generator=_generator()), _words(1)[:, 0] % 4)

    def model(self) -> nn.Module:
        from timm.models.convnext import ConvNeXt

        sizes = {"depths": (2, 2, 1, 1), "dims": (8, 12, 12, 12), "output_stride": 16, "ls_init_value": 0.1}
        return ConvNeXt(num_classes=4, **sizes)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, labels = batch
        return _cross_entropy(model(images), labels)


class ConvNextV2(ConvNeXt):
    """That of transformers, with a norm over the whole response, whose parameters have a single row."""

    def model(self) -> nn.Module:
        from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

        return ConvNextV2ForImageClassification(
            ConvNextV2Config(num_stages=2, hidden_sizes=[8, 12], depths=[2, 2], patch_size=4, num_labels=4)
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, labels = batch
        return _cross_entropy(model(pixel_values=images).logits, labels)


class DINOv2(ConvNextV2):
    """No sample uses its `mask_token`."""

    def model(self) -> nn.Module:
        from transformers import Dinov2Config, Dinov2ForImageClassification

        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
        return Dinov2ForImageClassification(Dinov2Config(image_size=32, patch_size=8, num_labels=4, **sizes))


class CLIP(Borrowed):
    """`logit_scale` is a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__(torch.randn(SAMPLES, 3, 8, 8, generator=_generator()), _words(6))

    def model(self) -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = sizes | {"vocab_size": WORDS, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1}
        return CLIPModel(
            CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8)
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, words = batch
        logits = model(input_ids=words, pixel_values=images).logits_per_text
        return _cross_entropy(logits, torch.arange(len(images)))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _words(length: int) -> Tensor:
    return torch.randint(3, WORDS, (SAMPLES, length), generator=_generator())


def _cross_entropy(logits: Tensor, labels: Tensor) -> Loss:
    return Loss(F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum"), labels.numel())


# What is trained, and the samples of a micro-batch; the rest of them in `make test-long`.
MODELS = [(T5(), 2), (Whisper(), 2), (ConvNeXt(), 1), (CLIP(), 2)]
if os.environ.get("LOCKSTEP_ALL_EXACT"):
    MODELS += [(T5(), 1), (Whisper(), 1), (ConvNeXt(), 2), (ConvNextV2(), 1), (DINOv2(), 2)]
CASES: dict[str, tuple[Borrowed, int]] = {
    f"{type(task).__name__}, {micro_batch}": (task, micro_batch) for task, micro_batch in MODELS
}


def bits_of_all(world: World, store: Any, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A job: what a run of each case ended with."""
    found = {}
    for name, (task, micro_batch) in CASES.items():
        unused = isinstance(task, DINOv2) and values["strategy"] == "ddp"
        more = {"micro_batch": micro_batch, "ddp.find_unused_parameters": unused}
        found[name] = bits(world, dist.PrefixStore(name, store), task, values | more)
    return found


@pytest.fixture(scope="module")
def found(pool: Pool) -> Callable[[str], dict[str, dict[str, Any]]]:
    """What every model ends with in a layout, on rank 0."""
    seen: dict[str, dict[str, dict[str, Any]]] = {}
    pool.preload(*SLOW_TO_IMPORT)

    def result(layout: str) -> dict[str, dict[str, Any]]:
        if layout not in seen:
            world, strategy = LAYOUTS[layout]
            seen[layout] = pool.run(bits_of_all, VALUES | {"strategy": strategy}, world=world)[0]
        return seen[layout]

    return result


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_one_hash(found: Callable[[str], dict[str, dict[str, Any]]], layout: str, name: str) -> None:
    single, several = found("one")[name], found(layout)[name]
    differing = [tensor for tensor, digest in single["each"].items() if several["each"][tensor] != digest]
    assert not differing
    assert several["logged"] == single["logged"]
    assert several["eval"] == single["eval"]
