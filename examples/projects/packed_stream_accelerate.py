"""The packed stream with accelerate: accelerate launch --num_processes 2 .../packed_stream_accelerate.py"""

import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from pieces import corpus
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Rows(IterableDataset):
    def __iter__(self):
        tokens = []
        for path in corpus():
            for line in path.read_text().splitlines():
                tokens += [*json.loads(line)["text"].encode(), 0]
                while len(tokens) >= 33:
                    yield torch.tensor(tokens[:33])
                    tokens = tokens[33:]


set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=3)
model = nn.Sequential(nn.Embedding(128, 32), nn.ReLU(), nn.Linear(32, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Rows(), batch_size=4 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step = 0
while step < 40:
    for rows in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        step += accelerator.sync_gradients
        if step == 40:
            break
    accelerator.print(f"step {step}  loss {accelerator.gather(loss).mean().item():.4f}")
    accelerator.save_state(f"runs/accelerate_stream/{step}")
