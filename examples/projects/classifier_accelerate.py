"""The classifier with accelerate: accelerate launch --num_processes 2 examples/projects/classifier_accelerate.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from pieces import convnet, pictures
from torch.utils.data import DataLoader

EPOCHS, PATIENCE = 12, 2

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=3, log_with="tensorboard", project_dir="runs/accelerate")
accelerator.init_trackers("classifier")
model = convnet()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train = DataLoader(pictures(240, seed=0), batch_size=8 // accelerator.num_processes, shuffle=True)
valid = DataLoader(pictures(100, seed=1), batch_size=50)
model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)

best, waited, step = float("inf"), 0, 0
for _ in range(EPOCHS):
    model.train()
    for x, y in train:
        with accelerator.accumulate(model):
            out = model(x)
            loss = F.cross_entropy(out, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accuracy = accelerator.gather((out.argmax(dim=1) == y).float()).mean().item()
            accelerator.log({"loss": loss.item(), "accuracy": accuracy}, step=step)

    model.eval()
    losses, hits = [], []
    for x, y in valid:
        with torch.no_grad():
            out = model(x)
        each, right = F.cross_entropy(out, y, reduction="none"), (out.argmax(dim=1) == y).float()
        each, right = accelerator.gather_for_metrics((each, right))
        losses.append(each)
        hits.append(right)
    score = torch.cat(losses).mean().item()
    accelerator.log({"eval_loss": score, "eval_accuracy": torch.cat(hits).mean().item()}, step=step)

    if score < best:
        best, waited = score, 0
        accelerator.save_state("runs/accelerate/best")
    else:
        waited += 1
    if waited >= PATIENCE:
        break

accelerator.load_state("runs/accelerate/best")
accelerator.save_model(model, "runs/accelerate/final")
accelerator.end_training()
