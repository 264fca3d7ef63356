"""The classifier with Lightning: python examples/projects/classifier_lightning.py"""

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from pieces import convnet, pictures
from torch.utils.data import DataLoader


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = convnet()

    def step(self, batch, name):
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        accuracy = (out.argmax(dim=1) == y).float().mean()
        self.log_dict({f"{name}loss": loss, f"{name}accuracy": accuracy}, sync_dist=True)
        return loss

    def training_step(self, batch, index):
        return self.step(batch, "")

    def validation_step(self, batch, index):
        self.step(batch, "eval_")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(0)
    train = DataLoader(pictures(240, seed=0), batch_size=8, shuffle=True)
    valid = DataLoader(pictures(100, seed=1), batch_size=50)
    keep = ModelCheckpoint(monitor="eval_loss")
    trainer = Trainer(
        max_epochs=12,
        accumulate_grad_batches=3,
        callbacks=[EarlyStopping("eval_loss", patience=2), keep],
        logger=TensorBoardLogger("runs", name="lightning"),
    )
    trainer.fit(Classifier(), train, valid)
    best = Classifier.load_from_checkpoint(keep.best_model_path)
    torch.save(best.net.state_dict(), "runs/lightning/final.pt")
