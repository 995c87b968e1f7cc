"""Peers at two sites train one model: two workstations in an office, and two at home, whose links send slowly.

One comes later than the others. On this machine, with emulated links (Linux; root, or unprivileged user namespaces):

    narrowband lab --nodes 4 --up 1gbit,1gbit,10mbit,10mbit --down 1gbit,1gbit,50mbit,50mbit \
        -- python examples/two_sites.py
"""

import argparse
import hashlib
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.updates.stores import serve

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--spec", default="topk:density=0.01+ef", help="see: narrowband codecs")
parser.add_argument("--every", default="30", help="steps from one round to the next, or a time: 20min")
parser.add_argument("--rounds", type=int, default=20, help="up to three times as many until all have come")
parser.add_argument("--late", type=int, default=10, help="rounds after which the last peer comes")
options = parser.parse_args()
rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(32 * 64, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# On a machine that stays up; else: narrowband rendezvous.
store = serve(29400) if rank == 0 else dist.TCPStore(host, 29400)
if rank == size - 1:
    store.wait(["come"])
peers = nb.Rendezvous(f"{host}:29400", begin_with=size - 1, name=str(rank), grace_s=30, exchange_s=60)
began, every = time.monotonic(), int(options.every) if options.every.isdigit() else options.every
handle = nb.compress_updates(model, optimizer, options.spec, every=every, outer="auto", peers=peers)
told = {"joined_round": handle.rounds, "joined_s": time.monotonic() - began, "rounds": []}
torch.manual_seed(1 + rank)  # every peer reads elsewhere
last = 3 * options.rounds
while handle.rounds < last:
    if len(handle.peers) == size:  # as all of them see it after the same round
        last = min(last, max(options.rounds, handle.rounds + 1))
    at_BL = torch.randint(len(text) - 33, (64, 1)) + torch.arange(33)
    loss = nn.functional.cross_entropy(model(text[at_BL[:, :-1]]), text[at_BL[:, -1]])
    optimizer.zero_grad()
    loss.backward()
    began, before = time.monotonic(), handle.rounds
    optimizer.step()
    if handle.rounds != before:
        told["rounds"].append({"round": handle.rounds, "peers": len(handle.peers), "s": time.monotonic() - began})
        print(told["rounds"][-1], flush=True)
        if handle.rounds >= options.late:
            store.set("come", "now")
bits = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
told |= {"loss": float(loss), "parameters_bytes": len(bits), "parameters_sha256": hashlib.sha256(bits).hexdigest()}
print(json.dumps(told), flush=True)
if folder := os.environ.get("NARROWBAND_TOLD"):  # of narrowband lab --json
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
handle.remove()
store.set(f"done {rank}", "")
if rank == 0:  # with which the store ends
    store.wait([f"done {peer}" for peer in range(size)])
