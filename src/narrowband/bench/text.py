"""Real text that every machine has: the source of Python's standard library, split by file into train and held-out.

Bytes are tokens, so no tokenizer is needed and a loss in nats per byte means the same on every machine. The text
differs between Python versions; results therefore record its size and a digest.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Text", "batch_of", "standard_library"]

#: Directories that are not program text: tests, installed packages, character tables, generated help.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}

#: One file in this many is held out.
_HELD_OUT_EVERY = 12

#: Less than this is not a text to train on (a stripped interpreter).
_LEAST_BYTES = 1_000_000


@dataclass(frozen=True)
class Text:
    """Two byte tensors (uint8, flat) and what identifies them."""

    train: Tensor
    heldout: Tensor
    files: int
    digest: str

    def identity(self) -> dict[str, str | int]:
        """What a result file records about the text."""
        return {
            "files": self.files,
            "train_bytes": self.train.numel(),
            "heldout_bytes": self.heldout.numel(),
            "sha256": self.digest,
        }


def standard_library(root: Path | None = None) -> Text:
    """The ``*.py`` files below ``root`` (the running interpreter's standard library), in sorted order.

    A file is held out when the hash of its path says so, whatever other files there are.

    Raises:
        FileNotFoundError: fewer than 1 MB of source are there, as in a stripped or zipped interpreter.

    Example:
        >>> text = standard_library()
        >>> text.train.numel() > text.heldout.numel()
        True
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    digest = hashlib.sha256()
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    names = [name for name in names if not _SKIPPED.intersection(name.split("/"))]
    for name in names:
        source = (root / name).read_bytes()
        heldout = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_EVERY == 0
        parts[heldout].append(source)
        digest.update(hashlib.sha256(source).digest())
    train, held = (torch.frombuffer(bytearray(b"\n".join(parts[h]) or b"\n"), dtype=torch.uint8) for h in (False, True))
    if train.numel() + held.numel() < _LEAST_BYTES:
        raise FileNotFoundError(
            f"{root} holds {train.numel() + held.numel():,} bytes of Python source; the demo needs at least "
            f"{_LEAST_BYTES:,}. Run it with an interpreter whose standard library is installed as files."
        )
    return Text(train, held, len(names), digest.hexdigest())


def batch_of(text: Tensor, batch: int, sequence: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``batch`` random windows of ``sequence`` bytes and the same windows one byte later: int64, (batch, sequence)."""
    starts = torch.randint(text.numel() - sequence, (batch,), generator=generator)
    windows = text[starts[:, None] + torch.arange(sequence + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
