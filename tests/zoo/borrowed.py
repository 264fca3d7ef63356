"""Healthy tasks around models that nobody here wrote: tiny ones from `transformers`, randomly initialised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lockstep import Loss, Task

WORDS, LENGTH, SAMPLES = 32, 8, 22
IGNORED = -100


class Rows(Dataset):
    """Token ids, and how many of them count."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=g)
        self.lengths = torch.randint(3, LENGTH + 1, (SAMPLES,), generator=g)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        counted = torch.arange(LENGTH) < self.lengths[index]
        tokens = self.tokens[index]
        return {
            "input_ids": torch.where(counted, tokens, 0),
            "attention_mask": counted.long(),
            "labels": torch.where(counted, tokens, IGNORED),
        }


class Borrowed(Task):
    defaults = {"global_batch": 8, "steps": 30}

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def data(self) -> Any:
        return Rows()

    def cost(self, logits: Tensor, labels: Tensor) -> Loss:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, int((labels != IGNORED).sum()))


class GPT2(Borrowed):
    """Causal; the head is tied to the embedding."""

    def model(self) -> nn.Module:
        import transformers

        config = transformers.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return self.cost(logits[:, :-1], batch["labels"][:, 1:])


class BERT(Borrowed):
    """Masked words, chosen in the dataset, where random numbers are seeded by sample."""

    def model(self) -> nn.Module:
        import transformers

        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=LENGTH,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)

    def data(self) -> Any:
        return Masked()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return self.cost(logits, batch["labels"])


class Masked(Rows):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        chosen = (torch.rand(LENGTH) < 0.3) & row["attention_mask"].bool()
        labels = torch.where(chosen, row["labels"], IGNORED)
        return row | {"input_ids": torch.where(chosen, 1, row["input_ids"]), "labels": labels}


class ViT(Borrowed):
    def model(self) -> nn.Module:
        import transformers

        config = transformers.ViTConfig(
            image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=4,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        images = torch.randn(SAMPLES, 1, 8, 8, generator=g)
        return TensorDataset(images, torch.randint(0, 4, (SAMPLES,), generator=g))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, labels = batch
        return Loss(F.cross_entropy(model(pixel_values=images).logits, labels, reduction="sum"), len(labels))


class T5(Borrowed):
    """Encoder and decoder, with embeddings tied three times."""

    def model(self) -> nn.Module:
        import transformers

        config = transformers.T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        shifted = F.pad(batch["input_ids"][:, :-1], (1, 0))
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=shifted
        ).logits
        return self.cost(logits, batch["labels"])


class Mamba(Borrowed):
    """A state-space model, in torch's own operations."""

    def model(self) -> nn.Module:
        import transformers

        config = transformers.MambaConfig(
            vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2, conv_kernel=2
        )
        return transformers.MambaForCausalLM(config)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.cost(model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:])


TASKS = [GPT2, BERT, ViT, T5, Mamba]
PRELOAD = [
    f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "vit", "t5", "mamba")
]  # imported once, before the processes fork
