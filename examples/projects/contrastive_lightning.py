"""The contrastive training with Lightning: python examples/projects/contrastive_lightning.py"""

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from pieces import mlp, two_views
from torch.utils.data import DataLoader


class Contrastive(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp(16, 8)

    def training_step(self, batch, index):
        first, second = F.normalize(self.net(torch.cat(batch)), dim=1).chunk(2)
        everywhere = self.all_gather(second, sync_grads=True).flatten(0, -2)
        labels = self.global_rank * len(first) + torch.arange(len(first), device=self.device)
        loss = F.cross_entropy(10 * first @ everywhere.T, labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(0)
    trainer = Trainer(max_epochs=4)
    trainer.fit(Contrastive(), DataLoader(two_views(240), batch_size=24 // trainer.world_size, shuffle=True))
