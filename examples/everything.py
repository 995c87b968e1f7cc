"""Train a small GPT, two replicas of two stages, as it is and with all that is sent and kept compressed.

torchrun --nproc-per-node 4 examples/everything.py
torchrun --nproc-per-node 4 examples/everything.py --sharded  # replicas share one model, by FSDP2
narrowband lab --nodes 4 --rate 100mbit -- python examples/everything.py
"""

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh, fsdp, pipelining

import narrowband as nb
from narrowband.report.record import provenance, write_json

SETTINGS = {
    "gradients": "qsgd:bits=4",  # between the replicas of a stage
    "parameters": "uniform:bits=4",  # where these share one model
    "boundary": {"forward": "uniform:bits=8", "backward": "qsgd:bits=8"},  # activations, and back their gradients
    "saved": nb.ActivationPolicy(bits=8),  # from forward to backward
}
PLAIN = {"gradients": "none", "parameters": "none", "boundary": {}, "saved": nb.ActivationPolicy(bits="off")}


class Block(nn.TransformerEncoderLayer):
    """Attention to what was read so far, and an MLP."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        return super().forward(x_BLD, nn.Transformer.generate_square_subsequent_mask(x_BLD.shape[1]), is_causal=True)


def train(settings: dict) -> Iterator[list[float]]:
    """Yields after every step, and then what is in the table: the loss is the mean of the last ten steps."""
    torch.manual_seed(at)  # replicas of a stage begin alike
    blocks = [Block(128, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(2)]
    part = nn.Sequential(*([nn.Embedding(256, 128), *blocks] if at == 0 else [*blocks, nn.Linear(128, 256, False)]))
    if options.sharded:
        for module in (*part, part):
            fsdp.fully_shard(module, mesh=mesh["replicas"])
        handle = nb.compress_shards(part, settings["gradients"], settings["parameters"])
    else:
        part = nn.parallel.DistributedDataParallel(part, process_group=mesh["replicas"].get_group())
        handle = nb.compress_gradients(part, settings["gradients"])
    stage = nb.CompressedStage(
        part, at, 2, torch.device("cpu"), **settings["boundary"], group=mesh["stages"].get_group()
    )
    saving = nb.compress_activations(part, policy=settings["saved"])
    schedule = pipelining.Schedule1F1B(stage, 4, lambda y_BLC, y_BL: nn.functional.cross_entropy(y_BLC.mT, y_BL))
    optimizer = torch.optim.AdamW(part.parameters(), lr=2e-3)
    reads, losses, last, seconds = torch.Generator().manual_seed(replica), [], [], []
    for _ in range(options.steps):
        batch_BL = text[torch.randint(len(text) - 65, (32, 1), generator=reads) + torch.arange(65)]
        read_BL = batch_BL[:, :-1].contiguous()  # PyTorch 2.11 lets nothing else into a stage
        began = time.perf_counter()
        optimizer.zero_grad()
        with saving:  # forward and backward of all four micro-batches
            schedule.step(read_BL) if at == 0 else schedule.step(target=batch_BL[:, 1:], losses=last)
        optimizer.step()
        losses += [loss.item() for loss in last]  # of the last stage
        seconds.append(time.perf_counter() - began)
        yield []
    places = handle.stats().total, *stage.stats().values(), saving.stats().total
    sent = [own.sent_bytes / options.steps / 1e6 for own in places]
    loss = statistics.fmean(losses[-40:] or [0.0])
    found = torch.tensor([*sent, loss / 2, statistics.median(seconds) / 4], dtype=torch.float64)
    dist.all_reduce(found)
    yield found.tolist()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--sharded", action="store_true")
parser.add_argument("--json", type=Path, help="file for the table")
options = parser.parse_args()
dist.init_process_group("gloo")
mesh = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
replica, at = mesh.get_coordinate()
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()
names = "between replicas, MB", "activations, MB", "their gradients, MB", "saved for backward, MB", "loss", "seconds"
*_, both = zip(train(PLAIN), train(SETTINGS), strict=True)  # in turn, so that a busy machine is fair to both
# Records call the compressed steps "plan".
rows = [{"name": name, "plain": plain, "plan": own} for name, plain, own in zip(names, *both, strict=True)]
if dist.get_rank() == 0:
    print(f"{'in a step':24}{'plain':>12}{'compressed':>12}")
    print(*("{name:24}{plain:12.3f}{plan:12.3f}".format_map(row) for row in rows), sep="\n")
    if options.json:
        write_json(options.json, {**provenance(0, ["python", *sys.argv]), "sharded": options.sharded, "rows": rows})
dist.destroy_process_group()
