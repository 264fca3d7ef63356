"""Models that nobody here wrote: tiny, randomly initialised ones of `transformers` and `timm`, in float64 and without
dropout.

Each is trained by plain PyTorch in one loop, and by Lockstep under every strategy: see compare.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep import Loss, Task

VOCABULARY, LENGTH, SAMPLES, SIDE, CLASSES = 32, 8, 20, 16, 4
SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **SPECIAL}
NARROW = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
IMAGE = {"image_size": SIDE, "patch_size": 4, "num_channels": 3, "num_labels": CLASSES}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Public(Task):
    """A task around one public model. `build` makes it, `kind` says what it reads."""

    kind = "decoder"
    build: Callable[[], nn.Module]

    def model(self) -> nn.Module:
        return type(self).build().double()

    def optimizer(self, model: nn.Module) -> Any:
        # Not Adam: it divides rounding errors by themselves where a gradient is 0, as that of a key's bias.
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        if self.kind in ("vision", "timm"):
            images = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=g, dtype=torch.float64)
            return TensorDataset(images, torch.randint(0, CLASSES, (SAMPLES,), generator=g))
        lengths = torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=g)
        tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=g)
        return TensorDataset(tokens, (torch.arange(LENGTH) < lengths).long())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return getattr(self, f"_{self.kind.replace('-', '_')}_loss")(model, *batch)

    def _vision_loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> Loss:
        logits = model(pixel_values=images).logits
        return Loss(F.cross_entropy(logits, labels, reduction="sum"), len(labels))

    def _timm_loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> Loss:
        return Loss(F.cross_entropy(model(images), labels, reduction="sum"), len(labels))

    def _decoder_loss(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Loss:
        logits = model(input_ids=tokens, attention_mask=mask).logits
        return _per_token(logits[:, :-1], tokens[:, 1:], mask[:, 1:])

    def _encoder_loss(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Loss:
        return _per_token(model(input_ids=tokens, attention_mask=mask).logits, tokens, mask)

    def _encoder_decoder_loss(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Loss:
        shifted = F.pad(tokens[:, :-1], (1, 0))
        return _per_token(model(input_ids=tokens, attention_mask=mask, decoder_input_ids=shifted).logits, tokens, mask)

    def _speech_loss(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Loss:
        sound = torch.sin(tokens.double().repeat_interleave(2, 1)[:, None] * torch.arange(1, 9)[:, None])
        shifted = F.pad(tokens[:, :-1], (1, 0))
        return _per_token(model(input_features=sound, decoder_input_ids=shifted).logits, tokens, mask)

    def _pair_loss(self, model: nn.Module, tokens: Tensor, mask: Tensor) -> Loss:
        """CLIP's loss of every pair by itself: how well the text fits its own picture."""
        g = torch.Generator().manual_seed(1)
        pictures = torch.randn(VOCABULARY, 3, SIDE, SIDE, generator=g, dtype=torch.float64)[tokens[:, 0]]
        found = model(input_ids=tokens, attention_mask=mask, pixel_values=pictures)
        return Loss(-found.logits_per_text.diagonal().sum(), len(tokens))


def _per_token(logits: Tensor, labels: Tensor, mask: Tensor) -> Loss:
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()
    return Loss(each.sum(), int(mask.sum()))


def _made(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return staticmethod(build)  # pyrefly: ignore[bad-return]


def _made_by_timm(module: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(import_module(f"timm.models.{module}"), model)(num_classes=CLASSES, **options)

    return staticmethod(build)  # pyrefly: ignore[bad-return]


def _resnet() -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (2, 1, 1, 1), num_classes=CLASSES, channels=(4, 8, 8, 8), stem_width=4)  # pyrefly: ignore


def _efficientnet() -> nn.Module:
    """Depthwise convolutions, squeeze and excitation, BatchNorm."""
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    stages = [["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r2_k3_s2_e2_c12_se0.25"]]
    return EfficientNet(decode_arch_def(stages), num_classes=CLASSES, stem_size=8, num_features=16)


DECODERS = {
    "GPT2": _made(
        "GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=4, n_head=4, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, vocab_size=VOCABULARY, **SPECIAL,
    ),
    "GPTNeoX": _made("GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL, **WORDS),
    "OPT": _made(
        "OPTForCausalLM", "OPTConfig", **NARROW, **WORDS,
        ffn_dim=32, word_embed_proj_dim=16, dropout=0.0,
    ),
    "Llama": _made("LlamaForCausalLM", "LlamaConfig", **SMALL, **WORDS, num_key_value_heads=2),
    "Mistral": _made("MistralForCausalLM", "MistralConfig", **SMALL, **WORDS, num_key_value_heads=2),
    "Qwen2": _made("Qwen2ForCausalLM", "Qwen2Config", **SMALL, **WORDS, num_key_value_heads=2),
    "Qwen3": _made("Qwen3ForCausalLM", "Qwen3Config", **SMALL, **WORDS, num_key_value_heads=2, head_dim=4),
    "Gemma": _made("GemmaForCausalLM", "GemmaConfig", **SMALL, **WORDS, num_key_value_heads=2, head_dim=4),
    "Phi": _made("PhiForCausalLM", "PhiConfig", **SMALL, **WORDS, resid_pdrop=0.0),
    "Falcon": _made("FalconForCausalLM", "FalconConfig", **NARROW,
                    **WORDS, ffn_hidden_size=32, hidden_dropout=0.0, attention_dropout=0.0),
    "StableLm": _made("StableLmForCausalLM", "StableLmConfig", **SMALL, **WORDS, num_key_value_heads=4),
    "Mixtral": _made("MixtralForCausalLM", "MixtralConfig", **SMALL, **WORDS, num_key_value_heads=2,
                     num_local_experts=2, num_experts_per_tok=2, experts_implementation="eager"),
}  # fmt: skip
ENCODERS = {
    "BERT": _made("BertForMaskedLM", "BertConfig", **SMALL, **WORDS, **QUIET),
    "RoBERTa": _made("RobertaForMaskedLM", "RobertaConfig", **SMALL, **WORDS, **QUIET),
    "DistilBERT": _made("DistilBertForMaskedLM", "DistilBertConfig", dim=16, n_layers=4, n_heads=4, hidden_dim=32,
                        vocab_size=VOCABULARY, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0),
    "ELECTRA": _made("ElectraForMaskedLM", "ElectraConfig", **SMALL, **WORDS, **QUIET, embedding_size=16),
}  # fmt: skip
VISION = {
    "ViT": _made("ViTForImageClassification", "ViTConfig", **SMALL, **IMAGE, **QUIET),
    "DeiT": _made("DeiTForImageClassification", "DeiTConfig", **SMALL, **IMAGE, **QUIET),
    "DINOv2": _made("Dinov2ForImageClassification", "Dinov2Config", **NARROW,
                    **IMAGE, **QUIET, mlp_ratio=2),
    "BEiT": _made("BeitForImageClassification", "BeitConfig", **SMALL, **IMAGE, **QUIET, drop_path_rate=0.0),
}  # fmt: skip
PLAIN = {"img_size": SIDE, "patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 4}
TIMM_TRANSFORMERS = {
    "timm ViT": _made_by_timm("vision_transformer", "VisionTransformer", **PLAIN, mlp_ratio=2),
    "timm DeiT": _made_by_timm("deit", "VisionTransformerDistilled", **PLAIN, mlp_ratio=2),
    "timm BEiT": _made_by_timm("beit", "Beit", **PLAIN, mlp_ratio=2, use_rel_pos_bias=True, init_values=0.1),
    "timm EVA-02": _made_by_timm("eva", "Eva", **PLAIN, mlp_ratio=2, swiglu_mlp=True, use_rot_pos_emb=True),
    "timm CaiT": _made_by_timm("cait", "Cait", **PLAIN, mlp_ratio=2, init_values=0.1),
    "timm Swin V2": _made_by_timm("swin_transformer_v2", "SwinTransformerV2", img_size=SIDE, patch_size=2,
                                  window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 4), mlp_ratio=2,
                                  drop_path_rate=0.0),
    "timm Swin": _made_by_timm("swin_transformer", "SwinTransformer", img_size=SIDE, patch_size=2, window_size=4,
                               embed_dim=8, depths=(2, 2), num_heads=(2, 4), mlp_ratio=2, drop_path_rate=0.0),
}  # fmt: skip
TIMM_OTHERS = {
    "timm Mixer": _made_by_timm("mlp_mixer", "MlpMixer", img_size=SIDE, patch_size=4, num_blocks=4, embed_dim=16),
    "timm ConvNeXt": _made_by_timm("convnext", "ConvNeXt", depths=(1, 2, 1, 1), dims=(8, 8, 12, 12), patch_size=2,
                                   output_stride=8, ls_init_value=0.1),
    "timm ResNet": staticmethod(_resnet),
    "timm EfficientNet": staticmethod(_efficientnet),
}  # fmt: skip
OTHERS = {
    "T5": ("encoder-decoder", _made("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=16, d_kv=4,
           d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0)),
    "BART": ("encoder-decoder", _made("BartForConditionalGeneration", "BartConfig", vocab_size=VOCABULARY, d_model=16,
             encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, dropout=0.0, **SPECIAL,
             decoder_start_token_id=0, forced_eos_token_id=None)),
    "Whisper": ("speech", _made("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, d_model=16,
                encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=LENGTH,
                max_target_positions=16, dropout=0.0, **SPECIAL,
                decoder_start_token_id=0, suppress_tokens=None, begin_suppress_tokens=None)),
    "Mamba": ("decoder", _made("MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=16, state_size=4,
              num_hidden_layers=4, conv_kernel=2, **SPECIAL)),
    "ConvNeXt": ("vision", _made("ConvNextForImageClassification", "ConvNextConfig", num_channels=3, patch_size=4,
                 hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=CLASSES)),
    "CLIP": ("pair", _made("CLIPModel", "CLIPConfig", projection_dim=16,
             text_config={**SMALL, **WORDS}, vision_config={**SMALL, "image_size": SIDE, "patch_size": 4})),
}  # fmt: skip


def _task(name: str, kind: str, build: Any) -> type[Public]:
    return type(name, (Public,), {"kind": kind, "build": build, "__module__": __name__})


TASKS: dict[str, type[Public]] = {
    **{name: _task(name, "decoder", build) for name, build in DECODERS.items()},
    **{name: _task(name, "encoder", build) for name, build in ENCODERS.items()},
    **{name: _task(name, "vision", build) for name, build in VISION.items()},
    **{name: _task(name, "timm", build) for name, build in (TIMM_TRANSFORMERS | TIMM_OTHERS).items()},
    **{name: _task(name, kind, build) for name, (kind, build) in OTHERS.items()},
}

# What can be a pipeline, and have its layers sharded: decoders, encoders and vision transformers.
TRANSFORMERS = [*DECODERS, *ENCODERS, *VISION, *TIMM_TRANSFORMERS]
