"""Train a small language model with Accelerate and compressed gradients, save all ranks' state, and go on later.

pip install '.[accelerate]'  # in the clone
torchrun --nproc-per-node 2 examples/train_accelerate.py
torchrun --nproc-per-node 2 examples/train_accelerate.py --resume
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from narrowband.integrations.accelerate import compress_gradients


class Reader(nn.Module):
    """Guesses the next byte."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text_BL: Tensor) -> Tensor:
        return self.head(self.body(self.embed(text_BL))[0])


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default="runs/accelerate")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

torch.manual_seed(0)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = Reader()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
handle = compress_gradients(accelerator, model, "topk:density=0.01+ef")  # the one line
torch.manual_seed(1 + accelerator.process_index)  # every rank reads elsewhere
if options.resume:
    accelerator.load_state(options.folder)
for batch in range(2 * options.steps):
    starts = torch.randint(len(text) - 65, (16,))
    batch_BL = torch.stack([text[start : start + 65] for start in starts]).to(accelerator.device)
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(batch_BL[:, :-1]).flatten(0, 1), batch_BL[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if (batch + 1) % 40 == 0:
        accelerator.print(f"step {handle.step}: loss {loss:.2f}, {handle.stats().total.ratio:.0f} times less sent")
accelerator.save_state(options.folder)
accelerator.end_training()
