"""Models of public libraries, on one GPU, with Lockstep's defaults.

    python benchmarks/public_models.py models     # six models against a compiled loop by hand: about 3 minutes
    python benchmarks/public_models.py packing    # a ragged Llama, padded and packed: a minute
    python benchmarks/public_models.py fp8        # precision=fp8 against bf16: 40 s; needs torchao
    python benchmarks/public_models.py models --tiny --only bert --turns 2    # on a CPU: does it run

models   The total time of 20, 200 and 2,000 steps, from an empty compile cache, with building the model and compiling.
         The loop by hand compiles the model, uses bf16 autocast, fused AdamW and pinned batches. 20 and 200 steps are
         run. 2,000 are extrapolated: the first 200 (by hand) or 100 (Lockstep, with steps=2000) as measured, and for
         the rest the median of turns in which both alternate.
packing  Tokens with a label per second: `lockstep.hf.CausalLM` as it is, and with task.row_length; with compile=false,
         which shows what packing alone gains, and with the default. And how far gradients are off, relative to float32,
         document by document.
fp8      Tokens per second and memory of a Llama with and without precision=fp8.

Configurations are built here; no weights are read. The models are narrower or shorter than the published ones, to leave
time for compiling.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.bench.intervals import estimate, ratio
from lockstep.bench.ranks.turns import by_lockstep, take, take_round
from lockstep.bench.ranks.workload import settings_of
from lockstep.bench.results import cell, figure, table_lines
from lockstep.config import resolve_for
from lockstep.data.packing import packed_batch
from lockstep.hf import CausalLM, packed_inputs
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.compiled.deadline import Deadline
from lockstep.precision import choose_precision
from lockstep.runtime import context
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World
from lockstep.task import Loss, Task

BLOCK = 20  # steps of a turn
FIRST, LATER = 200, 2000  # steps
BEFORE_TURNS = 100  # steps of the long run that are timed before it takes turns
SAMPLES = 512
MOST_S = 60  # for the first turns of a loop by hand

# transformers' special tokens, which lie outside a small vocabulary.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


# ---- the models ----


class Case(Task):
    """A public model on random data, with a loss as its users write it."""

    batch = 32
    tiny = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def data(self) -> TensorDataset:
        return self.tensors

    @cached_property
    def tensors(self) -> TensorDataset:
        torch.manual_seed(0)
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


# ---- the loops ----


def by_hand(task: Case, device: torch.device, compiled: bool) -> Iterator[None]:
    """A plain PyTorch loop that never waits for the GPU inside a turn."""
    torch.manual_seed(0)
    on_cuda = device.type == "cuda"
    model = task.model().to(device)
    if compiled:
        model.compile()
    optimizer = task.optimizer(model)
    data = task.data().tensors

    for step, rows in enumerate(rows_of(len(data[0]), task.batch), start=1):
        batch = [tensor[rows] for tensor in data]
        if on_cuda:
            batch = [tensor.pin_memory().to(device, non_blocking=True) for tensor in batch]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_cuda):
            loss = task.loss(model, batch)
        (loss.total / loss.weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % BLOCK == 0:
            yield


def rows_of(samples: int, batch: int) -> Iterator[Tensor]:
    while True:
        yield from (rows for rows in torch.randperm(samples).split(batch) if len(rows) == batch)


def lockstep_loop(task: Task, runtime: Runtime, folder: str, **values: Any) -> Iterator[Any]:
    """The same by Lockstep. What is not in `values` is a default, or what a benchmark must switch off."""
    run_dir = tempfile.mkdtemp(dir=folder)
    last = {"run_dir": run_dir, "log.every": BLOCK, "clip.norm": 1.0, "tail": "drop", **values}
    return by_lockstep(task, settings_of(type(task), [], last), runtime, BLOCK)


def empty_cache(folder: str) -> Any:
    """Compile from nothing: what another loop has compiled, or learnt about compiling, must not help this one."""
    from torch._inductor.utils import fresh_cache

    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fresh_cache(dir=folder, delete=False)


def seconds_of(loop: Iterator[Any], steps: int) -> list[float]:
    """Take as many turns as `steps` need, and return when each of them ended."""
    ends = [0.0]
    for _ in range(steps // BLOCK):
        ends.append(ends[-1] + take(loop).seconds)
    return ends[1:]


# ---- models ----


def measure_model(name: str, runtime: Runtime, folder: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of steps."""
    torch.compiler.reset()  # only here: the loop by hand keeps its code until it has taken turns
    task = CASES[name]()
    task.tiny = given.tiny
    if given.tiny:
        task.batch = 8
    task.data()
    first = 2 * BLOCK if given.tiny else FIRST
    before = BLOCK if given.tiny else BEFORE_TURNS

    # The first loop must not pay for imports and for the GPU's libraries.
    eager = by_hand(task, runtime.device, compiled=False)
    report(name, "by hand, eager, with what the first call costs", seconds_of(eager, BLOCK))
    eager.close()

    ours: dict[int, list[float]] = {}
    for steps in (BLOCK, first):
        with empty_cache(folder):
            loop = lockstep_loop(task, runtime, folder, global_batch=task.batch, steps=steps)
            ours[steps] = seconds_of(loop, steps)
            loop.close()
        report(name, f"lockstep, steps={steps}", ours[steps])

    # A compiled loop on a CPU would only test the C++ compiler.
    # torch.compile may take hours: it is given up at the next graph.
    with empty_cache(folder), Deadline(MOST_S):
        plain = by_hand(task, runtime.device, compiled=not given.tiny)
        plain_ends = seconds_of(plain, first)
    report(name, "by hand", plain_ends)

    with empty_cache(folder):
        long = lockstep_loop(task, runtime, folder, global_batch=task.batch, steps=LATER)
        long_ends = seconds_of(long, before)
        report(name, f"lockstep, steps={LATER}", long_ends)
        print_decisions(folder)
        loops = {"plain": plain, "lockstep": long}
        rounds = [take_round(loops, number) for number in range(given.turns)]
    for loop in loops.values():
        loop.close()

    theirs, steady = ([each[loop].seconds / BLOCK for each in rounds] for loop in loops)
    plain_step, our_step = estimate(theirs), estimate(steady)
    totals = {
        BLOCK: (plain_ends[0], ours[BLOCK][-1]),
        first: (plain_ends[-1], ours[first][-1]),
        LATER: (
            plain_ends[-1] + (LATER - first) * plain_step["median"],
            long_ends[-1] + (LATER - before) * our_step["median"],
        ),
    }
    same = {"model": name, "plain_ms": 1e3 * plain_step["median"], "lockstep_ms": 1e3 * our_step["median"]}
    same["step_ratio"] = ratio(steady, theirs)
    return [
        {**same, "steps": steps, "plain_s": plain_s, "lockstep_s": our_s, "extrapolated": steps == LATER}
        for steps, (plain_s, our_s) in totals.items()
    ]


def report(name: str, what: str, ends: list[float]) -> None:
    print(f"  {name}, {what}: {BLOCK} steps {ends[0]:.1f} s, {BLOCK * len(ends)} steps {ends[-1]:.1f} s", flush=True)


def print_decisions(folder: str) -> None:
    """Print what the newest run in the folder has said about compiling."""
    newest = max(Path(folder).glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    for record in read_jsonl(newest):
        if record.get("event") == "compile":
            said = {key: value for key, value in record.items() if key not in ("event", "time", "rank")}
            print(f"    {said}", flush=True)


def model_lines(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("model", "steps", "by hand s", "lockstep s", "lockstep / by hand", "", "step ms", "lockstep ms", "ratio")
    body = [
        [
            row["model"],
            f"{row['steps']:,}",
            figure(row["plain_s"]),
            figure(row["lockstep_s"]),
            f"{row['lockstep_s'] / row['plain_s']:.3f}",
            "extrapolated" if row["extrapolated"] else "measured",
            figure(row["plain_ms"]),
            figure(row["lockstep_ms"]),
            cell(row["step_ratio"]),
        ]
        for row in rows
    ]
    return table_lines(heads, body)


def models(runtime: Runtime, folder: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    if runtime.device.type == "cuda":
        torch.compile(torch.sin)(torch.ones(8, device=runtime.device))  # imports the compiler, starts its workers

    began, rows = time.monotonic(), []
    for name in given.only or CASES:
        if time.monotonic() - began > 60 * given.minutes:
            print(f"no time left for {name}")
            continue
        rows += attempted(measure_model, name, runtime, folder, given)
        save(given, rows)

    if rows:
        print(*model_lines(rows), sep="\n")
    return rows


# ---- packing ----


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{"num_hidden_layers": 4, "tie_word_embeddings": False, **SPECIAL, **changes})


def texts(shortest: int, longest: int, words: int, count: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(3, words, (length,), generator=draw).tolist()} for length in lengths]


@dataclass(frozen=True)
class Ragged:
    """A Llama and texts of many lengths."""

    config: Any
    rows: list[dict[str, Any]]
    longest: int  # tokens of a text, and of a packed row
    batch: int  # texts of a step
    micro_batch: int
    warm_up: int = 2  # turns that do not count


def gradient(task: CausalLM, model: nn.Module, batches: list[Any], device: torch.device, low: bool) -> Tensor:
    model.zero_grad()
    for batch in batches:
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            task.loss(model, moved).total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def gradient_lines(ragged: Ragged, device: torch.device) -> list[str]:
    """How far the gradient of packed rows is off, in bfloat16, where packed attention is torch's `varlen_attn`."""
    torch.manual_seed(0)
    rows = [torch.tensor(row["input_ids"]) for row in ragged.rows[:24]]
    task = CausalLM(ragged.config, ragged.rows, row_length=ragged.longest)
    model = task.model().to(device)
    documents = [{"labels": row[None], "input_ids": row[None]} for row in rows]
    batch = packed_batch(rows, ragged.longest)
    packed = [{"labels": batch["labels"], **packed_inputs(batch)}]

    truth = gradient(task, model, documents, device, low=False)
    found = {
        "packed, float32": gradient(task, model, packed, device, low=False),
        "alone, bfloat16": gradient(task, model, documents, device, low=True),
        "packed, bfloat16": gradient(task, model, packed, device, low=True),
    }
    off = {name: float((one - truth).norm() / truth.norm()) for name, one in found.items()}
    return [f"  gradient, {name}: off by {value:.2e} from float32, one by one" for name, value in off.items()]


def measure_packing(
    title: str, ragged: Ragged, values: dict[str, Any], runtime: Runtime, folder: str, turns: int
) -> list[dict[str, Any]]:
    """Return a row for padding and one for packing."""
    labels = sum(len(row["input_ids"]) - 1 for row in ragged.rows)
    packed = CausalLM(ragged.config, ragged.rows, row_length=ragged.longest)
    per_row = labels / len(packed.data())
    per_text = labels / len(ragged.rows)
    # As many labels in a step as without packing, in whole micro-batches, which hold as many tokens with padding.
    micro = ragged.micro_batch
    rows = max(micro, round(ragged.batch * per_text / per_row / micro) * micro)
    settings = {"global_batch": ragged.batch, "micro_batch": micro, "epochs": None, **values}

    ways = {
        "padded": (CausalLM(ragged.config, ragged.rows), settings, ragged.batch * per_text),
        "packed": (packed, {**settings, "global_batch": rows}, rows * per_row),
    }
    loops = {name: lockstep_loop(task, runtime, folder, **given) for name, (task, given, _) in ways.items()}
    for name, loop in loops.items():
        warm = [take(loop).seconds for _ in range(ragged.warm_up)]
        print(f"  {title}, {name}: warm-up turns of {', '.join(f'{second:.1f}' for second in warm)} s", flush=True)

    rounds = [take_round(loops, number) for number in range(turns)]
    for loop in loops.values():
        loop.close()
    counted = {name: per_step for name, (_, _, per_step) in ways.items()}
    rates = {name: [BLOCK * counted[name] / each[name].seconds for each in rounds] for name in loops}
    return [
        {
            "case": title,
            "way": name,
            "tokens_per_s": estimate(found),
            "against_padding": ratio(found, rates["padded"]),
        }
        for name, found in rates.items()
    ]


def packing(runtime: Runtime, folder: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    small = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 1000}
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32_000}
    # Calls of the frequent lengths are captured during the warm-up.
    short = Ragged(llama(**small), texts(3, 64, 1000, 2048), 64, batch=16, micro_batch=4, warm_up=8)
    cases = [("width 128, 3 to 64 tokens, compile=false", short, {"compile": False})]
    if not given.tiny:
        long = Ragged(llama(**large), texts(16, 1024, 32_000, 512), 1024, batch=32, micro_batch=8)
        cases.append(("width 1024, 16 to 1,024 tokens, compile=false", long, {"compile": False}))
        cases.append(("width 128, 3 to 64 tokens", short, {}))

    rows: list[dict[str, Any]] = []
    for title, ragged, values in cases:
        with empty_cache(folder):
            rows += attempted(measure_packing, title, ragged, values, runtime, folder, given.turns)
        save(given, rows)
        print(*packing_lines(rows[-2:]), sep="\n", flush=True)
        if values:
            print(*attempted(gradient_lines, ragged, runtime.device), sep="\n", flush=True)

    print(*packing_lines(rows), sep="\n")
    return rows


def packing_lines(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("case", "way", "tokens/s", "against padding")
    body = [[row["case"], row["way"], cell(row["tokens_per_s"]), cell(row["against_padding"])] for row in rows]
    return table_lines(heads, body)


# ---- fp8 ----


def fp8(runtime: Runtime, folder: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A Llama with two wide layers, whose matrices are large enough for float8."""
    if find_spec("torchao") is None:
        print("torchao is not installed: precision=fp8 cannot be measured")
        return []

    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "vocab_size": 32_000}
    length, batch = 1024, 8
    sequences = texts(length, length, 32_000, 256)
    rows: list[dict[str, Any]] = []
    loops = {}
    for name in ("bf16", "fp8"):
        task = CausalLM(llama(num_hidden_layers=2, **sizes), sequences)
        loop = lockstep_loop(task, runtime, folder, global_batch=batch, epochs=None, precision=name)
        warm = [take(loop).seconds for _ in range(2)]
        print(f"  {name}: warm-up turns of {', '.join(f'{second:.1f}' for second in warm)} s", flush=True)
        loops[name] = loop

    rounds = [take_round(loops, number) for number in range(given.turns)]
    base = [each["bf16"].seconds for each in rounds]
    for name in loops:
        seconds = [each[name].seconds for each in rounds]
        rate = estimate([BLOCK * batch * (length - 1) / second for second in seconds])
        faster = ratio(base, seconds)
        rows.append({"precision": name, "tokens_per_s": rate, "against_bf16": faster})

    body = [[row["precision"], cell(row["tokens_per_s"]), cell(row["against_bf16"])] for row in rows]
    print(*table_lines(("precision", "tokens/s", "against bf16"), body), sep="\n")
    save(given, rows)
    return rows


# ---- the command ----


def attempted(measure: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
    """Measure, or say why not: the other cases still count."""
    try:
        return measure(*arguments)
    except Exception:
        print(traceback.format_exc(limit=-6), flush=True)
        return []


def save(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


PARTS = {"models": models, "packing": packing, "fp8": fp8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--only", nargs="+", choices=CASES, help="of the models")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=4.0, help="no new model begins after this time")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()

    config = resolve_for({}, {}, [("benchmark", {})]).config
    with context.start(World(), config) as runtime, tempfile.TemporaryDirectory() as folder:
        choose_precision(config, runtime.device).set_tf32()  # for the loop by hand, too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run would end its step first, and a loop by hand never asks
        print(f"{runtime.device}, torch {torch.__version__}", flush=True)
        attempted(PARTS[given.part], runtime, folder, given)


if __name__ == "__main__":
    main()
