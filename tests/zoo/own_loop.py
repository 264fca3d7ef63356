"""A custom loop, for `lockstep verify SCRIPT.py`. BROKEN in the environment: sum, or weight."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

g = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(22, 3, generator=g), torch.randn(22, 1, generator=g))
broken = os.environ.get("BROKEN")  # sum: a mean for a sum; weight: a mean of means

with lockstep.start(global_batch=8, epochs=5) as run:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(dataset):
        for x, y in step:
            errors = (model(x) - y) ** 2
            step.backward(errors.mean() if broken else errors.sum(), weight=1 if broken == "weight" else len(x))
        step.apply()
    raise AssertionError("what comes after the loop is not part of a comparison")
