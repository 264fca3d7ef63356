"""The fine-tuning with accelerate: accelerate launch --num_processes 2 examples/projects/finetune_accelerate.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from pieces import base_model, sentences
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_scheduler

EPOCHS = 2


def collate(rows):
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask, "labels": labels}


set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=3, log_with="wandb")
accelerator.init_trackers("finetune")
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model()), lora)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02, weight_decay=0.0)
size = 4 // accelerator.num_processes
train = DataLoader(sentences(96, seed=0), batch_size=size, shuffle=True, collate_fn=collate)
valid = DataLoader(sentences(24, seed=1), batch_size=size, collate_fn=collate)
total = EPOCHS * 96 // 12 * accelerator.num_processes  # it moves once per process and update
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=total)
model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)

step = 0
for _ in range(EPOCHS):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.log({"loss": loss.item()}, step=step)

model.eval()
losses = []
for batch in valid:
    with torch.no_grad():
        losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(len(batch["input_ids"]))))
accelerator.log({"eval_loss": torch.cat(losses).mean().item()}, step=step)
accelerator.unwrap_model(model).save_pretrained("accelerate_adapters", is_main_process=accelerator.is_main_process)
accelerator.end_training()
