"""Trains a GAN: in every step the discriminator learns first, then the generator.

lockstep train examples/projects/gan.py --nproc 2
"""

import torch
import torch.nn.functional as F
from pieces import mlp, ring

import lockstep

with lockstep.start({"global_batch": 24, "micro_batch": 8, "epochs": 4}) as run:
    g, d = mlp(4, 2), mlp(2, 1)
    rates = {"lr": 2e-3, "betas": (0.5, 0.9)}
    optimizers = torch.optim.Adam(g.parameters(), **rates), torch.optim.Adam(d.parameters(), **rates)
    g, d, g_optimizer, d_optimizer = run.setup(g, d, *optimizers)

    for step in run.steps(ring(240), passes=2):
        for (real,) in step:
            fake = g(torch.randn(len(real), 4, device=run.device)).detach()
            loss = F.softplus(-d(real)).sum() + F.softplus(d(fake)).sum()
            step.backward(loss, weight=len(real), d_loss=loss.detach())
        step.apply(d_optimizer)

        for (real,) in step:
            loss = F.softplus(-d(g(torch.randn(len(real), 4, device=run.device)))).sum()
            step.backward(loss, weight=len(real), g_loss=loss.detach())
        step.apply(g_optimizer)
