"""Fit a small language model with Lightning and compressed gradients, on CPUs or GPUs, and go on from a checkpoint.

pip install '.[lightning]'  # in the clone
torchrun --nproc-per-node 2 examples/train_lightning.py
torchrun --nproc-per-node 2 examples/train_lightning.py --steps 200 --resume runs/lightning/last.ckpt
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from narrowband.integrations.lightning import CompressGradients


class Reader(LightningModule):
    """Guesses the next byte."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def training_step(self, text_BL: Tensor, _: int) -> Tensor:
        guess_BLC = self.head(self.body(self.embed(text_BL[:, :-1]))[0])
        loss = nn.functional.cross_entropy(guess_BLC.flatten(0, 1), text_BL[:, 1:].flatten())
        if (self.trainer.fit_loop.total_batch_idx + 1) % 20 == 0:
            self.print(f"step {self.global_step + 1}: loss {loss:.2f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default="runs/lightning")
parser.add_argument("--resume", help="a checkpoint")
options = parser.parse_args()
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

torch.manual_seed(0)
compression = CompressGradients("topk:density=0.01+ef")  # the one line
checkpoint = ModelCheckpoint(options.folder, save_last=True)
trainer = Trainer(
    strategy="ddp", devices="auto" if torch.cuda.is_available() else 2, max_steps=options.steps, gradient_clip_val=1.0,
    callbacks=[compression, checkpoint], logger=False, enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Reader(), DataLoader(text.unfold(0, 65, 64), batch_size=16, shuffle=True), ckpt_path=options.resume)
if trainer.is_global_zero:
    print(f"{compression.handle.stats().total.ratio:.0f} times less sent")
