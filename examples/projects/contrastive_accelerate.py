"""The contrastive training with accelerate: accelerate launch --num_processes 2 .../contrastive_accelerate.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from pieces import mlp, two_views
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader

set_seed(0)
accelerator = Accelerator()
model = mlp(16, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(two_views(240), batch_size=24 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(4):
    for first, second in loader:
        first, second = F.normalize(model(torch.cat([first, second])), dim=1).chunk(2)
        everywhere = second
        if accelerator.num_processes > 1:
            everywhere = torch.cat(all_gather(second))
        labels = accelerator.process_index * len(first) + torch.arange(len(first), device=first.device)
        loss = F.cross_entropy(10 * first @ everywhere.T, labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}  loss {accelerator.gather(loss).mean().item():.4f}")
    accelerator.save_state(f"runs/accelerate_contrastive/{epoch}")
