"""Six models of public libraries on random data, each as a task with a loss as its users write it.

Configurations are built here; no weights are read. The models are narrower or shorter than the published ones, to leave
time for compiling.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.task import Loss, Task

SAMPLES = 512

# transformers' special tokens, which lie outside a small vocabulary.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Case(Task):
    """A public model on random data, with a loss as its users write it."""

    batch = 32  # samples of a step

    def __init__(self, tiny: bool = False):
        """Make the task; `tiny`: small enough for a CPU, and for a quick comparison of layouts."""
        self.tiny = tiny
        if tiny:
            self.batch = 8

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def data(self) -> TensorDataset:
        return self.tensors

    @cached_property
    def tensors(self) -> TensorDataset:
        # The same samples whatever was drawn before, and nothing that is drawn later depends on them.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return TensorDataset(*self.draw(32 if self.tiny else SAMPLES))

    def draw(self, samples: int) -> tuple[Tensor, ...]:
        raise NotImplementedError


def per_token(logits: Tensor, labels: Tensor) -> Loss:
    total = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")
    return Loss(total, (labels != -100).sum())


class Bert(Case):
    """An encoder, masked tokens."""

    batch = 32

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForMaskedLM(
            BertConfig(num_hidden_layers=2 if self.tiny else 4, **quiet, **(small if self.tiny else {}))
        )

    def draw(self, samples: int) -> tuple[Tensor, ...]:
        words, length = (100, 16) if self.tiny else (30_522, 256)
        tokens = torch.randint(5, words, (samples, length))
        masked = torch.rand(samples, length) < 0.15
        return tokens.masked_fill(masked, 4), tokens.masked_fill(~masked, -100)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        tokens, labels = batch
        return per_token(model(input_ids=tokens).logits, labels)


class ViT(Case):
    """timm's vision transformer, pictures of 128 x 128."""

    batch = 64

    def model(self) -> nn.Module:
        from timm.models.vision_transformer import VisionTransformer

        width, depth, heads = (32, 2, 2) if self.tiny else (768, 4, 12)
        sizes = {"img_size": self.side, "patch_size": 8, "num_classes": 100}
        return VisionTransformer(embed_dim=width, depth=depth, num_heads=heads, **sizes)

    @property
    def side(self) -> int:
        return 16 if self.tiny else 128

    def draw(self, samples: int) -> tuple[Tensor, ...]:
        return torch.randn(samples, 3, self.side, self.side), torch.randint(100, (samples,))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        pictures, labels = batch
        return Loss(F.cross_entropy(model(pictures).float(), labels, reduction="sum"), len(labels))


class Whisper(Case):
    """Speech: an encoder of 1,500 frames and a decoder."""

    batch = 8

    def model(self) -> nn.Module:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        width, layers, heads = (16, 1, 2) if self.tiny else (512, 2, 8)
        sizes = {
            f"{part}_{name}": value
            for part in ("encoder", "decoder")
            for name, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))
        }
        ends = {"decoder_start_token_id": 1, **SPECIAL}
        shape = {"d_model": width, "vocab_size": self.words, "max_source_positions": self.frames // 2}
        return WhisperForConditionalGeneration(WhisperConfig(**sizes, **shape, **ends))

    @property
    def words(self) -> int:
        return 100 if self.tiny else 51_865

    @property
    def frames(self) -> int:
        return 16 if self.tiny else 3000

    def draw(self, samples: int) -> tuple[Tensor, ...]:
        samples = min(samples, 128)
        return torch.randn(samples, 80, self.frames), torch.randint(3, self.words, (samples, 16 if self.tiny else 128))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        sound, tokens = batch
        logits = model(input_features=sound, decoder_input_ids=tokens[:, :-1], use_cache=False).logits
        return per_token(logits, tokens[:, 1:])


class Mixtral(Case):
    """A mixture of 8 experts, 2 for each token."""

    batch = 16

    def model(self) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        width, layers, heads = (16, 2, 2) if self.tiny else (512, 2, 8)
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
        shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": self.words}
        return MixtralForCausalLM(MixtralConfig(**sizes, **shape, num_local_experts=8, **SPECIAL))

    @property
    def words(self) -> int:
        return 100 if self.tiny else 32_000

    def draw(self, samples: int) -> tuple[Tensor, ...]:
        return (torch.randint(3, self.words, (samples, 16 if self.tiny else 512)),)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        (tokens,) = batch
        return per_token(model(input_ids=tokens, use_cache=False).logits[:, :-1], tokens[:, 1:])


class Lora(Mixtral):
    """peft's LoRA on GPT-2, 4 layers."""

    def model(self) -> nn.Module:
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        width, layers, heads = (16, 2, 2) if self.tiny else (768, 4, 12)
        quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": self.words}
        base = GPT2LMHeadModel(GPT2Config(**sizes, **quiet, **SPECIAL))
        return get_peft_model(base, LoraConfig(r=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))

    @property
    def words(self) -> int:
        return 100 if self.tiny else 50_257


class Denoiser(nn.Module):
    """A diffusion transformer of timm's parts: the time shifts and scales what each block reads."""

    def __init__(self, side: int, width: int, depth: int, heads: int):
        super().__init__()
        from timm.layers import Mlp, PatchEmbed
        from timm.models.vision_transformer import Attention

        self.patches = PatchEmbed(side, 2, 4, width)
        self.places = nn.Parameter(torch.randn(1, self.patches.num_patches, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(depth)])
        self.attention = nn.ModuleList([Attention(width, heads) for _ in range(depth)])
        self.mlps = nn.ModuleList([Mlp(width, 4 * width) for _ in range(depth)])
        self.changes = nn.ModuleList([nn.Linear(width, 6 * width) for _ in range(depth)])
        self.out = nn.Linear(width, 16)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        """(batch, 4, side, side) and (batch,) to the noise of each patch, (batch, patches, 16)."""
        x = self.patches(noisy) + self.places
        rates = torch.exp(torch.linspace(0.0, -9.0, x.shape[-1] // 2, device=x.device))
        angles = times[:, None] * rates
        time = F.silu(self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)))[:, None]
        for norm, attention, mlp, change in zip(self.norms, self.attention, self.mlps, self.changes, strict=True):
            shift1, scale1, gate1, shift2, scale2, gate2 = change(time).chunk(6, dim=-1)
            x = x + gate1 * attention(norm(x) * (1 + scale1) + shift1)
            x = x + gate2 * mlp(norm(x) * (1 + scale2) + shift2)
        return self.out(x)


class Diffusion(Case):
    """Predicts the noise in latents of 32 x 32."""

    batch = 64

    def model(self) -> nn.Module:
        return Denoiser(8, 32, 2, 2) if self.tiny else Denoiser(32, 768, 4, 12)

    def draw(self, samples: int) -> tuple[Tensor, ...]:
        side = 8 if self.tiny else 32
        shape = (samples, 4, side, side)
        return torch.randn(shape), torch.randn(shape), torch.rand(samples)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        latents, noise, times = batch
        share = times[:, None, None, None]
        found = model(latents * (1 - share) + noise * share, times * 1000)
        patches = F.unfold(noise, 2, stride=2).transpose(1, 2)
        return Loss(F.mse_loss(found.float(), patches, reduction="sum"), noise.numel())


CASES: dict[str, type[Case]] = {
    "bert": Bert,
    "lora": Lora,
    "vit": ViT,
    "diffusion": Diffusion,
    "whisper": Whisper,
    "mixtral": Mixtral,  # last: with transformers 5.17 and torch 2.11 each part of it fails to compile, for minutes
}
