"""Trains a language model on a stream of texts, packed into rows.

lockstep train examples/projects/packed_stream.py:PackedStream --nproc 2
"""

import torch.nn.functional as F
from pieces import corpus
from torch import nn

import lockstep


class PackedStream(lockstep.Task):
    defaults = {"steps": 40, "global_batch": 12, "micro_batch": 4, "lr.peak": 0.01}

    def model(self):
        return nn.Sequential(nn.Embedding(128, 32), nn.ReLU(), nn.Linear(32, 128))

    def data(self):
        texts = lockstep.Shards(corpus(), lockstep.read_jsonl, shards=12)
        return texts.map(lambda row: list(row["text"].encode())).chunk(33, end=0)

    def loss(self, model, rows):
        labels = rows[:, 1:].flatten()
        logits = model(rows[:, :-1]).flatten(0, 1)
        return lockstep.Loss(F.cross_entropy(logits, labels, reduction="sum"), weight=labels.numel())
