"""Classic mistakes, one in each task. `FOUND` says what `lockstep verify` must call it."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, Subset

from lockstep import Loss
from zoo.base import Reader, Sentences, Sound, token_losses
from zoo.healthy import Contrastive


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


# ---- the loss -------------------------------------------------------------------------------------------


class MeanOfMeans(Sound):
    """What `loss.mean() / accumulation_steps` comes to."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        return Loss(token_losses(model(tokens[:, :-1]), tokens, mask).mean(), weight=1)


class MeanForSum(Sound):
    """reduction="mean" was left in its place."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        return Loss(losses.mean(), weight=len(losses))


class SamplesForTokens(Sound):
    """The mean over tokens, weighted by the number of sentences."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        return Loss(losses.mean() * len(tokens), weight=len(tokens))


class MeanBesideSentences(Sound):
    """The mean over tokens as it is, beside the number of sentences: .loss and the batch size, of Hugging Face."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        return Loss(made.total / made.weight, weight=len(batch[0]))


class PaddedWeight(Sound):
    """The weight is rounded up to whole sentences: it is not the number of terms, nor in proportion to it."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        return Loss(losses.sum(), weight=max(16, len(losses)))


class DividedByRanks(Sound):
    """Divided by the number of ranks, as loops do that add gradients up by hand."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        return Loss(made.total / world(), made.weight)


class FirstRankRegularises(Sound):
    """A penalty that only rank 0 adds."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        penalty = model.out.weight.square().sum() if rank() == 0 else 0.0
        return Loss(made.total + penalty, made.weight)


class InBatchNegatives(Sound):
    """A contrastive loss: every other sentence of the micro-batch is a negative."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, _ = batch
        words = model(tokens[:, :-1])
        first, second = words[:, :3].mean(1), words[:, 3:].mean(1)
        return Loss(F.cross_entropy(first @ second.T, torch.arange(len(tokens)), reduction="sum"), len(tokens))


class ForgetsToGather(InBatchNegatives):
    """The same, permitted, and with as many negatives as a rank happens to have."""

    defaults = {"checks.loss": "batch-coupled"}


class LabelsOfThisRank(Contrastive):
    """It gathers the negatives of all ranks, and finds its own at the place that they have on rank 0."""

    def first(self) -> int:
        return 0


class GradientOfThisRank(Contrastive):
    """The negatives of other ranks are constants to it, as they are after torch's own all-gather."""

    def gathered(self, rows: Tensor) -> Tensor:
        others = self.run.all_gather(rows.detach()).clone()
        others[self.run.row_offset : self.run.row_offset + len(rows)] = rows
        return others


class PenaltyPerMicroBatch(Sound):
    """Weight decay by hand, added once in every micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        return Loss(made.total + model(batch[0][:1, :1] * 0).square().sum(), made.weight)


class WeightOne(Sound):
    """A sum, and a weight that was left at 1."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(super().loss(model, batch).total, weight=1)


class HardExamples(Sound):
    """OHEM: the harder half of the words, by their rank within the micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        return Loss(2 * losses.topk(max(1, len(losses) // 2)).values.sum(), len(losses))


class HardestKept(Sound):
    """OHEM: the harder words, counted by how many are kept; their number is rounded in every micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        kept = max(1, int(0.7 * len(losses)))
        return Loss(losses.topk(kept).values.sum(), kept)


class BalancedExperts(Sound):
    """A balance of experts over the micro-batch: a small part of the loss, and a function of the whole batch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        shares = model(batch[0][:, :-1]).flatten(0, 1).softmax(1)
        chosen = F.one_hot(shares.argmax(1), shares.shape[1]).float().mean(0)
        balance = len(chosen) * (chosen * shares.mean(0)).sum()
        return Loss(made.total + 0.05 * balance * made.weight, made.weight)


class MixUp(Sound):
    """Mixes every sentence with another one of its micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        part = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
        other = torch.randperm(len(tokens))
        words = model(tokens[:, :-1])
        logits = part * words + (1 - part) * words[other]
        losses = token_losses(logits, tokens, mask)
        return Loss(losses.sum(), len(losses))


class Standardised(Sound):
    """Statistics over the micro-batch by hand."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        logits = model(tokens[:, :-1])
        logits = (logits - logits.mean((0, 1))) / (logits.std((0, 1)) + 1e-3)
        losses = token_losses(logits, tokens, mask)
        return Loss(losses.sum(), len(losses))


class ConstantTotal(Sound):
    """Normalised by the micro-batch, so that totals add up, and only gradients show that they should not."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits = model(batch[0][:, :-1]).flatten(0, 1)
        scaled = logits / logits.square().mean().sqrt().detach()
        return Loss((scaled - scaled.detach() + 1).mean(1).sum(), len(logits))


class BackwardInLoss(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        super().loss(model, batch).total.backward()
        return super().loss(model, batch)


class WarmUpByCounting(Sound):
    """Counts its own calls, and takes them for steps."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        made = super().loss(model, batch)
        return Loss(made.total * min(1.0, self.calls / 100), made.weight)


class AccuracyIsAMean(Sound):
    """A metric that was divided already."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        lengths = batch[1].float().sum(1)
        return Loss(made.total, made.weight, {"length": (lengths.mean(), 1)})


# ---- the model ------------------------------------------------------------------------------------------


class WithBatchNorm(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def read(self, tokens: Tensor) -> Tensor:
        return self.norm(super().read(tokens).transpose(1, 2)).transpose(1, 2)


class BatchNorm(Sound):
    def model(self) -> nn.Module:
        return WithBatchNorm()


class RankDropout(Reader):
    """Seeds dropout by its rank, "so that the ranks draw different masks"."""

    def read(self, tokens: Tensor) -> Tensor:
        if self.training:
            torch.manual_seed(1234 + rank())
        return F.dropout(super().read(tokens), 0.3, self.training)


class DropoutByRank(Sound):
    def model(self) -> nn.Module:
        return RankDropout()


class NumpyNoise(Sound):
    """Input noise from numpy's global generator: every process goes through it by itself."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        keep = torch.from_numpy(np.random.rand(*tokens[:, :-1].shape) > 0.2)
        losses = token_losses(model(tokens[:, :-1] * keep), tokens, mask)
        return Loss(losses.sum(), len(losses))


class OwnGenerator(Reader):
    """Masks from a generator of its own, which goes on from micro-batch to micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def read(self, tokens: Tensor) -> Tensor:
        read = super().read(tokens)
        return read * (torch.rand(read.shape, generator=self.generator) > 0.3) if self.training else read


class MasksOfItsOwn(Sound):
    def model(self) -> nn.Module:
        return OwnGenerator()


class SeedsInLoss(Sound):
    """Seeds torch before its dropout, "to be reproducible": all micro-batches drop the same places."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        torch.manual_seed(0)
        losses = token_losses(F.dropout(model(tokens[:, :-1]), 0.3), tokens, mask)
        return Loss(losses.sum(), len(losses))


class CooledDown(Reader):
    """A temperature that every forward lowers by a little."""

    temperature = 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        self.temperature *= 0.999
        return super().forward(tokens) / self.temperature


class CoolsDown(Sound):
    def model(self) -> nn.Module:
        return CooledDown()


class CountedWords(Reader):
    """Centres by a running mean that it keeps in a buffer, and trusts every rank to have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def read(self, tokens: Tensor) -> Tensor:
        read = super().read(tokens)
        if self.training:
            self.seen.lerp_(read.detach().mean((0, 1)), 0.1)
        return read


class BufferByHand(Sound):
    def model(self) -> nn.Module:
        return CountedWords()


class SpectralNorm(Sound):
    """Every forward in training moves an estimate of the largest singular value, which is kept in buffers."""

    def model(self) -> nn.Module:
        model = Reader()
        nn.utils.parametrizations.spectral_norm(model.hidden)
        return model


class OlderSpectralNorm(Sound):
    """The same by the older function, which keeps the normalised weight as an attribute."""

    def model(self) -> nn.Module:
        model = Reader()
        nn.utils.spectral_norm(model.hidden)
        return model


class Momentum(Reader):
    """A slow copy of a layer that follows it in every forward, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(8, 8).requires_grad_(False)

    def read(self, tokens: Tensor) -> Tensor:
        for mine, theirs in zip(self.slow.parameters(), self.hidden.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.1)
        return super().read(tokens) + self.slow(self.embedding(tokens))


class AverageInForward(Sound):
    def model(self) -> nn.Module:
        return Momentum()


class BufferAfterStep(Sound):
    """A buffer that every rank moves by itself between steps."""

    def model(self) -> nn.Module:
        model = Reader()
        model.register_buffer("seen", torch.zeros(()))
        return model

    def after_step(self, run: Any, result: Any) -> None:
        run.model.seen += 1 + rank() + world()


class CopiedHead(Reader):
    """The head was meant to be tied to the embedding; a deep copy of it starts equal, and is another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = copy.deepcopy(self.embedding.weight)


class Untied(Sound):
    def model(self) -> nn.Module:
        return CopiedHead()


class HalfPrecision(Sound):
    """Master weights in bf16, by accident."""

    def model(self) -> nn.Module:
        return Reader().bfloat16()


class LateHead(Sound):
    """Replaces the head after the first step, when the model has long been wrapped."""

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 1:
            run.model.out = nn.Linear(8, run.model.out.out_features, bias=False)


class ScaledHook(Sound):
    """Multiplies one gradient by the number of ranks, "because DDP divides by it"."""

    def model(self) -> nn.Module:
        model = Reader()
        model.out.weight.register_hook(lambda grad: grad * world())
        return model


class FaintHook(Sound):
    """The same, a hundred parts in a million strong: far above rounding, and far below what a curve would show."""

    def model(self) -> nn.Module:
        model = Reader()
        model.hidden.weight.register_hook(lambda grad: grad * (1 + 1e-4 * (world() - 1)))
        return model


class ClampedHook(Sound):
    """Limits the gradient of every micro-batch, and so another one in every split."""

    def model(self) -> nn.Module:
        model = Reader()
        model.hidden.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return model


class LastBit(Sound):
    """The same in the last place: for `--exact` only, and so not in FOUND."""

    def model(self) -> nn.Module:
        model = Reader()
        model.hidden.weight.register_hook(lambda grad: grad * (1 + 2e-7 * (world() - 1)))
        return model


# ---- between steps --------------------------------------------------------------------------------------


class NoisyWeights(Sound):
    """Weight noise drawn by every rank for itself."""

    def after_step(self, run: Any, result: Any) -> None:
        noise = torch.Generator().manual_seed(rank())
        with torch.no_grad():
            run.model.out.weight.add_(torch.randn(run.model.out.weight.shape, generator=noise), alpha=0.01)


class WaitsForRank0(Sound):
    """A barrier that only one rank comes to. Not in FOUND: it takes as long as one is ready to wait."""

    def after_step(self, run: Any, result: Any) -> None:
        if rank() == 0 and world() > 1:
            torch.distributed.barrier()


class MomentumPerMicroBatch(Sound):
    """A schedule that moves with every loss() instead of every step."""

    def optimizer(self, model: nn.Module) -> Any:
        self.sgd = super().optimizer(model)
        return self.sgd

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        for group in self.sgd.param_groups:
            group["momentum"] *= 0.97
        return super().loss(model, batch)


class TeacherPerMicroBatch(Sound):
    """A mean teacher whose average moves with every micro-batch that this process has seen."""

    def model(self) -> nn.Module:
        model = Reader()
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        nn.init.normal_(self.teacher.out.weight, generator=torch.Generator().manual_seed(1))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, _ = batch
        words = model(tokens[:, :-1])
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            wanted = self.teacher(tokens[:, :-1])
        return Loss((words - wanted).square().sum(), words.numel())


class AveragePerMicroBatch(Sound):
    """A moving average of the weights, for later, that is updated in loss()."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        for name, p in model.named_parameters():
            before = self.average.get(name, torch.zeros_like(p))
            self.average[name] = before.lerp(p.detach(), 0.1)
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


class Remembers(Reader):
    """Begins every micro-batch with the last state of the one before it, as stateful recurrent models do."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(8)

    def read(self, tokens: Tensor) -> Tensor:
        read = super().read(tokens) + self.memory
        self.memory = read.detach()[-1, -1]
        return read


class CarriedMemory(Sound):
    def model(self) -> nn.Module:
        return Remembers()


# ---- the data -------------------------------------------------------------------------------------------


class OwnSampler(Sound):
    """Splits the data by rank, as with a DistributedSampler; Lockstep then splits it again."""

    def data(self) -> Any:
        return Subset(Sentences(), range(rank(), 22, world()))


class ShuffledByRank(Sound):
    """Every rank has all the data, in an order of its own."""

    def data(self) -> Any:
        order = torch.randperm(22, generator=torch.Generator().manual_seed(rank())).tolist()
        return Subset(Sentences(), order if world() > 1 else range(22))


class UnevenByRank(Sound):
    """The last rank lacks a file."""

    def data(self) -> Any:
        return Sentences(22 - rank())


class Endless(IterableDataset):
    """Says that it splits itself, and splits by nothing but a different start."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        sentences = Sentences(64)
        yield from (sentences[(index + rank()) % 64] for index in range(64))


class RepeatedStream(Sound):
    defaults = {"global_batch": 8, "steps": 30, "data": {"sharding": "own"}}

    def data(self) -> Any:
        return Endless()


class DropsWords(Sentences):
    """ControlWord dropout whose random numbers follow the rank."""

    def seed(self) -> Any:
        return rank()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, mask = super().__getitem__(index)
        keep = [random.Random(f"{self.seed()} {index} {place}").random() > 0.2 for place in range(len(tokens))]
        return tokens * torch.tensor(keep), mask


class AugmentedByRank(Sound):
    def data(self) -> Any:
        return DropsWords()


class DropsWordsByProcess(DropsWords):
    def seed(self) -> Any:
        return os.getpid()


class AugmentedByProcess(Sound):
    def data(self) -> Any:
        return DropsWordsByProcess()


class Unseeded(Sound):
    """Draws fresh random numbers from the system in every forward."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        noise = torch.tensor([random.SystemRandom().uniform(0.5, 1.5) for _ in range(len(losses))])
        return Loss((losses * noise).sum(), len(losses))


FOUND: dict[type[Sound], str] = {
    MeanOfMeans: "mean-of-means",
    MeanForSum: "mean-for-sum",
    SamplesForTokens: "loss-weight",
    PaddedWeight: "loss-weight",
    DividedByRanks: "rank-in-loss",
    FirstRankRegularises: "rank-in-loss",
    PenaltyPerMicroBatch: "penalty",
    WeightOne: "loss-weight",
    HardExamples: "batch-coupled",
    MixUp: "batch-coupled",
    Standardised: "batch-coupled",
    ConstantTotal: "batch-coupled",
    BackwardInLoss: "left-gradient",
    WarmUpByCounting: "carried-state",
    InBatchNegatives: "batch-coupled",
    ForgetsToGather: "batch-coupled",
    LabelsOfThisRank: "gathered",
    GradientOfThisRank: "gathered",
    AccuracyIsAMean: "metric",
    DropoutByRank: "randomness",
    NumpyNoise: "randomness",
    MasksOfItsOwn: "randomness",
    BufferByHand: "changed-in-forward",
    SpectralNorm: "changed-in-forward",
    AverageInForward: "changed-in-forward",
    BufferAfterStep: "buffer",
    Untied: "untied",
    HalfPrecision: "half-precision",
    LateHead: "changed-structure",
    ScaledHook: "hook",
    FaintHook: "hook",
    ClampedHook: "hook",
    NoisyWeights: "not-synchronised",
    MomentumPerMicroBatch: "schedule",
    TeacherPerMicroBatch: "average",
    AveragePerMicroBatch: "average",
    CarriedMemory: "carried-state",
    OwnSampler: "data",
    ShuffledByRank: "data",
    UnevenByRank: "data",
    RepeatedStream: "data",
    AugmentedByRank: "augmentation",
    AugmentedByProcess: "augmentation",
    Unseeded: "nondeterminism",
}
