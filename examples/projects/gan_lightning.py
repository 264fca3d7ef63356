"""The GAN with Lightning: python examples/projects/gan_lightning.py"""

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from pieces import mlp, ring
from torch.utils.data import DataLoader


class GAN(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d = mlp(4, 2), mlp(2, 1)

    def training_step(self, batch, index):
        (real,) = batch
        g_optimizer, d_optimizer = self.optimizers()

        self.toggle_optimizer(d_optimizer)
        fake = self.g(torch.randn(len(real), 4, device=self.device)).detach()
        d_loss = F.softplus(-self.d(real)).mean() + F.softplus(self.d(fake)).mean()
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)

        self.toggle_optimizer(g_optimizer)
        g_loss = F.softplus(-self.d(self.g(torch.randn(len(real), 4, device=self.device)))).mean()
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def configure_optimizers(self):
        rates = {"lr": 2e-3, "betas": (0.5, 0.9)}
        return [torch.optim.Adam(self.g.parameters(), **rates), torch.optim.Adam(self.d.parameters(), **rates)]


if __name__ == "__main__":
    seed_everything(0)
    trainer = Trainer(max_epochs=4, strategy="ddp_find_unused_parameters_true")
    trainer.fit(GAN(), DataLoader(ring(240), batch_size=24 // trainer.world_size, shuffle=True))
