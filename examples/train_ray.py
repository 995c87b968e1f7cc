"""Train a small language model with Ray Train and compressed gradients; every rank's state is in Ray's checkpoints.

pip install 'ray[train]' . # in the clone
python examples/train_ray.py; python examples/train_ray.py --steps 200  # the second goes on where the first ended
"""

import argparse
import tempfile
from pathlib import Path

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import narrowband as nb
from narrowband.integrations import states


def train_worker(options: dict) -> None:
    """What every worker of Ray does."""
    source = Path(argparse.__file__).with_name("_pydecimal.py")  # a text that is on every machine
    text = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8).long()
    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 256)))
    handle = nb.compress_gradients(model, "topk:density=0.01+ef")  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt")
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            states.load(handle, states.read(folder), folder, strict=True)
    while handle.step < options["steps"]:
        torch.manual_seed(handle.step * 1000 + rank)  # every rank reads elsewhere
        at = torch.randint(len(text) - 1, (1024,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(text[at]), text[at + 1])
        loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        states.write(handle, folder)  # a file for each rank; Ray puts those of all workers into one checkpoint
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/model.pt")
        said = {"step": handle.step, "loss": loss.item(), "ratio": handle.stats().total.ratio}
        train.report(said, checkpoint=train.Checkpoint.from_directory(folder))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default=str(Path("runs/ray").absolute()))
options = parser.parse_args()
ray.init(num_cpus=2, include_dashboard=False)
run, workers = train.RunConfig(name="narrowband", storage_path=options.folder), train.ScalingConfig(num_workers=2)
trainer = TorchTrainer(train_worker, train_loop_config=vars(options), scaling_config=workers, run_config=run)
said = trainer.fit().metrics
print(f"step {said['step']}: loss {said['loss']:.2f}, {said['ratio']:.0f} times less sent")
