"""The packed stream with Lightning: python examples/projects/packed_stream_lightning.py"""

import json

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from pieces import corpus
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Rows(IterableDataset):
    def __init__(self, trainer):
        self.trainer = trainer

    def __iter__(self):
        tokens = []
        for path in corpus()[self.trainer.global_rank :: self.trainer.world_size]:
            for line in path.read_text().splitlines():
                tokens += [*json.loads(line)["text"].encode(), 0]
                while len(tokens) >= 33:
                    yield torch.tensor(tokens[:33])
                    tokens = tokens[33:]


class PackedStream(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(128, 32), nn.ReLU(), nn.Linear(32, 128))

    def training_step(self, rows, index):
        loss = F.cross_entropy(self.net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(0)
    trainer = Trainer(max_steps=40, accumulate_grad_batches=3)
    trainer.fit(PackedStream(), DataLoader(Rows(trainer), batch_size=4 // trainer.world_size))
