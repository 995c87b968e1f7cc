"""Load the experiments' data sets as tensors.

The files of a set come from ``--data-dir``, else from the folder that ``NARROWBAND_DATA`` names; otherwise they are
downloaded once into the cache folder:

=================  ==================================================  ================================================
set                files in the folder                                 format
=================  ==================================================  ================================================
CIFAR-10           ``cifar10/{train,test}.parquet``                    columns ``img`` = {bytes, path} and ``label``
MNIST              ``mnist/{train,test}.parquet``                      columns ``image``, likewise, and ``label``
tiny shakespeare   ``tinyshakespeare/input.txt``                       plain text
WikiText-2         ``wikitext2/{validation,test}.parquet``             column ``text``, one line a row
=================  ==================================================  ================================================

Downloads are the versions that the papers read: CIFAR-10 as PNG, and WikiText-2 raw-v1. A folder may hold other
versions, such as images encoded again as JPEG, or WikiText-2 v1, in which rare words are ``<unk>``. :func:`about` says
which version is there, and pages repeat it. A row that is trained on other data is another row.

Decoding 60,000 images takes a while. So decoded arrays are kept in the cache folder (``$XDG_CACHE_HOME/narrowband``),
under names that contain the size and time of their file. They are mapped into memory, so all ranks share one copy.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from narrowband.errors import UnsupportedError, pip_install
from narrowband.files import whole

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = [
    "Images",
    "Text",
    "about",
    "cache_folder",
    "cifar10",
    "locate",
    "mnist",
    "places",
    "tiny_shakespeare",
    "wikitext2",
]

ENVIRONMENT = "NARROWBAND_DATA"

_HUB = "https://huggingface.co/datasets"
#: Name of a file in the data folder → URL of the public set.
URLS = {
    "cifar10/train.parquet": f"{_HUB}/uoft-cs/cifar10/resolve/main/plain_text/train-00000-of-00001.parquet",
    "cifar10/test.parquet": f"{_HUB}/uoft-cs/cifar10/resolve/main/plain_text/test-00000-of-00001.parquet",
    "mnist/train.parquet": f"{_HUB}/ylecun/mnist/resolve/main/mnist/train-00000-of-00001.parquet",
    "mnist/test.parquet": f"{_HUB}/ylecun/mnist/resolve/main/mnist/test-00000-of-00001.parquet",
    "wikitext2/validation.parquet": (
        f"{_HUB}/Salesforce/wikitext/resolve/main/wikitext-2-raw-v1/validation-00000-of-00001.parquet"
    ),
    "wikitext2/test.parquet": (
        f"{_HUB}/Salesforce/wikitext/resolve/main/wikitext-2-raw-v1/test-00000-of-00001.parquet"
    ),
    "tinyshakespeare/input.txt": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    ),
}
_TIMEOUT_S = 60.0

#: The first bytes of a JPEG file.
_JPEG = b"\xff\xd8\xff"

#: Folder → name of the set of images, and the column that holds them.
_PICTURES = {"cifar10": ("CIFAR-10", "img"), "mnist": ("MNIST", "image")}

#: Share of tiny shakespeare that is trained on; the rest, at its end, is held out.
_TRAINED_ON = 0.9


@dataclass(frozen=True)
class Images:
    """Images as uint8 (N, C, H, W), labels as int64 (N,), and a digest of the files they came from."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    digest: str


@dataclass(frozen=True)
class Text:
    """Two stretches of text as flat uint8 token ids below ``vocabulary``, and a digest of the files."""

    train: Tensor
    heldout: Tensor
    vocabulary: int
    digest: str


# ---- the sets --------------------------------------------------------------------------------------------------------


def cifar10(directory: Path | None = None) -> Images:
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images of ten classes.

    Args:
        directory: the data folder; None: as the module says.

    Raises:
        FileNotFoundError: the files are not available; the message says how to get them.
    """
    return _images("cifar10", directory, functools.partial(_decoded, column="img", mode="RGB", side=32))


def mnist(directory: Path | None = None) -> Images:
    """MNIST (LeCun, Cortes, Burges 1998): 60,000 training and 10,000 test images of digits, grey, 28 pixels wide.

    Args:
        directory: the data folder; None: as the module says.

    Raises:
        FileNotFoundError: the files are not available; the message says how to get them.
    """
    return _images("mnist", directory, functools.partial(_decoded, column="image", mode="L", side=28))


def tiny_shakespeare(directory: Path | None = None, *, as_bytes: bool = False) -> Text:
    """Tiny shakespeare (Karpathy 2015): 1.1 million characters; the last tenth is held out.

    Args:
        directory: the data folder; None: as the module says.
        as_bytes: token ids are the bytes themselves, as in :func:`wikitext2`. Otherwise they are the characters'
            indices in the sorted list of characters that occur.

    Raises:
        FileNotFoundError: the file is not available; the message says how to get it.
    """
    file = locate("tinyshakespeare/input.txt", directory)
    read = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    characters, ids = np.unique(read, return_inverse=True)
    tokens = torch.from_numpy(read.copy() if as_bytes else ids.astype(np.uint8))
    cut = int(_TRAINED_ON * tokens.numel())
    return Text(tokens[:cut], tokens[cut:], 256 if as_bytes else len(characters), _digest([file]))


def wikitext2(directory: Path | None = None) -> Text:
    """WikiText-2 (Merity et al. 2016) as bytes: its validation split for training, its test split for evaluation.

    The train split is not used: the two others are large enough for small models, and small enough to come with a
    repository's data. Losses are therefore not comparable with published ones.

    Raises:
        FileNotFoundError: the files are not available; the message says how to get them.
    """
    files = [locate(f"wikitext2/{split}.parquet", directory) for split in ("validation", "test")]
    train, heldout = (torch.frombuffer(bytearray(_lines(file)), dtype=torch.uint8) for file in files)
    return Text(train, heldout, 256, _digest(files))


def about(files: Sequence[str], directory: Path | None = None) -> str:
    """Describe data sets in words, for the pages of results, by the content of the first file of each set.

    Args:
        files: names in the data folder, of one set or several.
        directory: the data folder; None: as the module says.

    Example:
        >>> about(["tinyshakespeare/input.txt"])
        'tiny shakespeare, of which the last 10% are held out'
    """
    first = {file.partition("/")[0]: file for file in reversed(files)}
    return "; ".join(_about(first[name], directory) for name in dict.fromkeys(file.partition("/")[0] for file in files))


def _about(first: str, directory: Path | None) -> str:
    name = first.partition("/")[0]
    file = locate(first, directory)
    if name in _PICTURES:
        called, column = _PICTURES[name]
        encoded = bytes(_first(file, column)["bytes"][: len(_JPEG)])
        return called + (", images encoded again as JPEG, so not its original pixels" if encoded == _JPEG else "")
    if name == "wikitext2":
        version = "v1, rare words are <unk>; papers read raw-v1" if b"<unk>" in _lines(file) else "raw-v1"
        return f"WikiText-2 ({version}) as bytes, validation split, judged on its test split"
    return f"tiny shakespeare, of which the last {1 - _TRAINED_ON:.0%} are held out"


def _images(name: str, directory: Path | None, decoded: Callable[[Path], np.ndarray[Any, Any]]) -> Images:
    train, test = (locate(f"{name}/{split}.parquet", directory) for split in ("train", "test"))
    return Images(
        train_x=_kept(train, f"{name}-train-images", decoded),
        train_y=_kept(train, f"{name}-train-labels", _labels),
        test_x=_kept(test, f"{name}-test-images", decoded),
        test_y=_kept(test, f"{name}-test-labels", _labels),
        digest=_digest([train, test]),
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def locate(name: str, directory: Path | None = None) -> Path:
    """Return the path of the file ``name`` of the data folder, such as ``cifar10/train.parquet``.

    Without a data folder, the file is downloaded.

    Raises:
        FileNotFoundError: the file is not available; the message says how to get it.
    """
    ways = (
        f"pass --data-dir FOLDER with {name} in it, or set {ENVIRONMENT}=FOLDER, or connect to a network from which "
        f"{URLS[name]} can be downloaded"
    )
    folder = _folder(directory)
    file = (folder or cache_folder() / "data") / name
    if folder is not None and not file.is_file():
        raise FileNotFoundError(f"there is no {file}; {ways}")
    if not file.is_file():
        try:
            with urllib.request.urlopen(URLS[name], timeout=_TIMEOUT_S) as answer:
                content = answer.read()
        except (urllib.error.URLError, OSError) as error:
            raise FileNotFoundError(f"{name} is not here and could not be downloaded ({error}); {ways}") from error
        with whole(file) as out:  # several processes may download it at once
            out.write(content)
    return file


def places(directory: Path | None = None) -> list[Path]:
    """Return the paths at which the files of all sets are looked for, whether they exist or not."""
    folder = _folder(directory) or cache_folder() / "data"
    return [folder / name for name in URLS]


def _folder(directory: Path | None) -> Path | None:
    """Return the data folder that was given by argument or environment, if any."""
    named = os.environ.get(ENVIRONMENT, "")
    return Path(named) if directory is None and named else directory


def cache_folder() -> Path:
    """Return the folder that keeps downloads and decoded arrays: ``$XDG_CACHE_HOME/narrowband``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "narrowband"


def _kept(file: Path, name: str, make: Callable[[Path], np.ndarray[Any, Any]]) -> Tensor:
    """Return ``make(file)``, mapped into memory; from the cache folder if it was made from this file before."""
    stat = file.stat()
    kept = cache_folder() / "arrays" / f"{name}-{stat.st_size}-{stat.st_mtime_ns}.npy"
    if not kept.exists():
        array = make(file)
        with whole(kept) as out:
            np.save(out, array)
    # Copy on write, because torch warns about memory that is not writable.
    return torch.from_numpy(np.load(kept, mmap_mode="c"))


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


# ---- formats ---------------------------------------------------------------------------------------------------------


def _table(file: Path, name: str) -> pq.ParquetFile:
    """Open a parquet file, and check that it has a column ``name``."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnsupportedError(f"reading {file.name} needs pyarrow: {pip_install('reproduce')}") from error
    try:
        table = pq.ParquetFile(file)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{file} is no parquet file, or a part of one; delete it, or put the whole one there"
        ) from error
    names = table.schema_arrow.names
    if name not in names:
        raise ValueError(f"{file} has the columns {', '.join(names)}; expected one named {name!r}")
    return table


def _column(file: Path, name: str) -> list[Any]:
    column: list[Any] = _table(file, name).read([name])[name].to_pylist()
    return column


def _first(file: Path, name: str) -> Any:
    """Return a column's first value."""
    return next(_table(file, name).iter_batches(1, columns=[name]))[name][0].as_py()


def _decoded(file: Path, *, column: str, mode: str, side: int) -> np.ndarray[Any, Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError(f"decoding images needs pillow: {pip_install('reproduce')}") from error
    rows = _column(file, column)
    x_NHWC = np.empty((len(rows), side, side, len(mode)), dtype=np.uint8)
    for at, row in enumerate(rows):
        pixels = np.asarray(Image.open(io.BytesIO(row["bytes"])).convert(mode))
        x_NHWC[at] = pixels.reshape(side, side, len(mode))
    return np.ascontiguousarray(x_NHWC.transpose(0, 3, 1, 2))


def _labels(file: Path) -> np.ndarray[Any, Any]:
    return np.asarray(_column(file, "label"), dtype=np.int64)


def _lines(file: Path) -> bytes:
    return "".join(_column(file, "text")).encode()
