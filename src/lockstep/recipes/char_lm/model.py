"""A small GPT: a pre-norm, decoder-only transformer.

Shapes in comments: B windows, T positions (at most `context`), W width, H heads, D = W / H, V symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lockstep
from lockstep.recipes.layers import Rotation, SelfAttention, rotation_table

# The default follows the dtype and is far too large in bf16.
EPS = 1e-6


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, EPS)
        self.attention = SelfAttention(width, heads, causal=True, norm_eps=EPS)
        self.mlp_norm = nn.RMSNorm(width, EPS)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        draw_weights(self)
        # Each branch starts by adding nothing: any depth begins as the same well-behaved network.
        nn.init.zeros_(self.attention.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        hidden = nn.functional.relu(self.up(self.mlp_norm(x))).square()  # (B, T, 4W)
        return x + self.dropout(self.down(hidden))


class GPT(nn.Module):
    """Maps character ids (B, T) to the logits (B, T, V) of the next character after each of them."""

    def __init__(self, symbols: int, width: int, layers: int, heads: int, context: int, dropout: float = 0.0):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(symbols, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width, EPS)
        self.head = nn.Linear(width, symbols, bias=False)

        # The angles follow from the options, so they move with the model but are not part of its weights.
        cos, sin = rotation_table(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

        for block in self.blocks:
            block.reset_parameters()  # pyrefly: ignore[not-callable]

        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw_weights(self.head)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        rotation = self.cos[:T], self.sin[:T]  # (T, D/2) each

        x = self.dropout(self.embed(ids))  # (B, T, W)
        for block in self.blocks:
            x = block(x, rotation)

        return self.head(self.norm(x))  # (B, T, V)

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return `prompt_ids` (B, T) with `count` sampled ids after them, (B, T + count)."""
        # Dropout would disturb the text and must be back afterwards.
        was_training = self.training
        self.eval()

        # The text grows with every call, so no call has the shape of the one before.
        ids = prompt_ids
        with lockstep.run_eagerly(self):
            for _ in range(count):
                # Sampled on the CPU in float32, so that one generator serves every device.
                logits = self(ids[:, -self.context :])[:, -1].float().cpu()  # (B, V)

                # Only the `top_k` likeliest symbols: a rare one would derail the text.
                if top_k is not None and top_k < logits.shape[1]:
                    logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))

                drawn = torch.multinomial(nn.functional.softmax(logits / temperature, dim=-1), 1, generator=generator)
                ids = torch.cat((ids, drawn.to(ids.device)), dim=1)

        self.train(was_training)
        return ids


def draw_weights(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(module, nn.Linear):
            # This deviation keeps the scale of the activations.
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
