"""Fine-tune a small GPT-2 with Transformers' Trainer and compressed gradients, and go on from a checkpoint.

The model is made from a configuration. For one of the hub's: AutoModelForCausalLM.from_pretrained("gpt2").

    pip install '.[transformers]'  # in the clone
    torchrun --nproc-per-node 2 examples/train_transformers.py
    torchrun --nproc-per-node 2 examples/train_transformers.py --steps 200 --resume
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments, set_seed

from narrowband.integrations.transformers import compress_gradients

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default="runs/transformers")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

set_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    options.folder,
    use_cpu=not torch.cuda.is_available(),
    max_steps=options.steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    lr_scheduler_type="constant",
    logging_steps=20,
    save_steps=options.steps,
    ddp_find_unused_parameters=False,
    report_to=[],
    disable_tqdm=True,
)
pieces = [{"input_ids": piece, "labels": piece} for piece in text.unfold(0, 64, 64)]
trainer = Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=pieces)
compression = compress_gradients(trainer, "topk:density=0.01+ef")  # the one line
trainer.train(resume_from_checkpoint=options.resume)
if trainer.is_world_process_zero():
    print(f"{compression.handle.stats().total.ratio:.0f} times less sent")
