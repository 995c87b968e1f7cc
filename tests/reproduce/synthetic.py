"""Small data sets in the formats of the real ones, and learnable: what class an image has shows in its colour."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
LINES = [" \n", " = Heading = \n", " A line with <unk> and naïve bytes . \n"]


def image(label, seed):
    """A noisy image whose colour depends on its label."""
    generator = np.random.default_rng(seed)
    colour = np.array([20 + 23 * label, 230 - 23 * label, 40 * (label % 5) + 30])
    return np.clip(colour + generator.integers(-20, 20, (32, 32, 3)), 0, 255).astype(np.uint8)


def digit(label, seed):
    """A noisy grey image in which a few rows of pixels, depending on its label, are a little brighter."""
    pixels = np.random.default_rng(seed).integers(0, 200, (28, 28))
    pixels[2 * label + 3 : 2 * label + 6] += 30
    return pixels.astype(np.uint8)


def write_images(file, count, seed=0, *, column="img", make=image, encoding="PNG"):
    """A parquet file as the CIFAR-10 set has them; returns what it holds, as (N, C, H, W) and labels."""
    labels = np.random.default_rng(seed).integers(0, 10, count)
    images = [make(label, seed + at) for at, label in enumerate(labels)]
    rows = []
    for pixels in images:
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, encoding)
        rows.append({"bytes": encoded.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: pa.array(rows, kind), "label": pa.array(labels, pa.int64())}), file)
    return np.stack(images).reshape(count, *images[0].shape[:2], -1).transpose(0, 3, 1, 2), labels


def write_digits(file, count, seed=0):
    """The same as the MNIST set has them."""
    return write_images(file, count, seed, column="image", make=digit)


def write_lines(file, lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": lines}), file)


def write_all(folder, images=480, plays=100):
    """A whole data folder. Its tests are small, because they are taken after every epoch."""
    tests = max(4, images // 12)
    write_images(folder / "cifar10/train.parquet", images)
    write_images(folder / "cifar10/test.parquet", tests, seed=7_000)
    write_digits(folder / "mnist/train.parquet", images)
    write_digits(folder / "mnist/test.parquet", tests, seed=7_000)
    (folder / "tinyshakespeare").mkdir(parents=True, exist_ok=True)
    (folder / "tinyshakespeare/input.txt").write_text(PLAY * plays)
    write_lines(folder / "wikitext2/validation.parquet", LINES * 200)
    write_lines(folder / "wikitext2/test.parquet", LINES * 4)
