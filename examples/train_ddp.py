"""Train a small language model on the source of Python's standard library, with compressed gradients.

torchrun --nproc-per-node 2 examples/train_ddp.py
narrowband lab --nodes 4 --rate 100mbit -- python examples/train_ddp.py --spec qsgd:bits=4
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb


class Reader(nn.Module):
    """Guesses the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 256), nn.Linear(256, 256)
        self.body = nn.GRU(256, 256, num_layers=2, batch_first=True)

    def forward(self, text_BL: Tensor) -> Tensor:
        return self.head(self.body(self.embed(text_BL))[0])


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--spec", default="topk:density=0.01+ef", help="see: narrowband codecs")
parser.add_argument("--adapt", type=int, help="steps after which L-GreCo chooses specs layer by layer, such as 20")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--record", help="file for: narrowband report")
options = parser.parse_args()
dist.init_process_group("gloo")
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()

torch.manual_seed(0)
model = DistributedDataParallel(Reader())
compression = nb.LGreCo(options.spec, every=options.adapt) if options.adapt else options.spec
handle = nb.compress_gradients(model, compression)  # the one line
recorder = nb.Recorder(handle, options.record, layers_every=5)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

torch.manual_seed(1 + dist.get_rank())  # every rank reads elsewhere
for step in range(options.steps):
    starts = torch.randint(len(text) - 65, (16,))
    batch_BL = torch.stack([text[start : start + 65] for start in starts])
    loss = nn.functional.cross_entropy(model(batch_BL[:, :-1]).flatten(0, 1), batch_BL[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    recorder.step(loss=loss)
    if dist.get_rank() == 0 and (step + 1) % 20 == 0:
        ratio = handle.stats().total.ratio
        print(f"step {step + 1}: loss {loss.item():.2f}, {ratio:.0f} times less sent", flush=True)
recorder.close()
dist.destroy_process_group()
