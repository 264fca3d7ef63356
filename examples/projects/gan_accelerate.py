"""The GAN with accelerate: accelerate launch --num_processes 2 examples/projects/gan_accelerate.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from pieces import mlp, ring
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
g, d = mlp(4, 2), mlp(2, 1)
rates = {"lr": 2e-3, "betas": (0.5, 0.9)}
g_optimizer = torch.optim.Adam(g.parameters(), **rates)
d_optimizer = torch.optim.Adam(d.parameters(), **rates)
loader = DataLoader(ring(240), batch_size=24 // accelerator.num_processes, shuffle=True)
g, d, g_optimizer, d_optimizer, loader = accelerator.prepare(g, d, g_optimizer, d_optimizer, loader)
set_seed(0, device_specific=True)

for epoch in range(4):
    for (real,) in loader:
        fake = g(torch.randn(len(real), 4, device=accelerator.device)).detach()
        d_loss = F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()
        d_optimizer.zero_grad()
        accelerator.backward(d_loss)
        d_optimizer.step()

        g_loss = F.softplus(-d(g(torch.randn(len(real), 4, device=accelerator.device)))).mean()
        g_optimizer.zero_grad()
        accelerator.backward(g_loss)
        g_optimizer.step()
    accelerator.print(f"epoch {epoch}  d_loss {d_loss.item():.4f}  g_loss {g_loss.item():.4f}")
    accelerator.save_state(f"runs/accelerate_gan/{epoch}")
