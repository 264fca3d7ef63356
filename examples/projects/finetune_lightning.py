"""The fine-tuning with Lightning: python examples/projects/finetune_lightning.py"""

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import WandbLogger
from peft import LoraConfig, get_peft_model
from pieces import base_model, sentences
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler


def collate(rows):
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask, "labels": labels}


class Finetune(LightningModule):
    def __init__(self):
        super().__init__()
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        self.net = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model()), lora)

    def training_step(self, batch, index):
        loss = self.net(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("eval_loss", self.net(**batch).loss, batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self):
        trained = (p for p in self.net.parameters() if p.requires_grad)
        optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.0)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    seed_everything(0)
    model = Finetune()
    train = DataLoader(sentences(96, seed=0), batch_size=4, shuffle=True, collate_fn=collate)
    valid = DataLoader(sentences(24, seed=1), batch_size=4, collate_fn=collate)
    settings = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 1.0}
    trainer = Trainer(**settings, logger=WandbLogger(offline=True), log_every_n_steps=1)
    trainer.fit(model, train, valid)
    if trainer.is_global_zero:
        model.net.save_pretrained("lightning_adapters")
