from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from reproduce import data
from tests.reproduce.synthetic import LINES, PLAY, write_digits, write_images, write_lines


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own, and no folder that the environment names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(data.ENVIRONMENT, raising=False)
    return tmp_path / "cache" / "narrowband"


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("there is no network")

    monkeypatch.setattr(data.urllib.request, "urlopen", refuse)


def write_both(folder):
    return write_images(folder / "cifar10/train.parquet", 12), write_images(folder / "cifar10/test.parquet", 6, seed=50)


def test_images_arrive_as_they_were_written(tmp_path):
    (train_x, train_y), (test_x, test_y) = write_both(tmp_path)
    images = data.cifar10(tmp_path)
    assert images.train_x.dtype == torch.uint8
    assert images.train_y.dtype == torch.int64
    np.testing.assert_array_equal(images.train_x.numpy(), train_x)
    np.testing.assert_array_equal(images.train_y.numpy(), train_y)
    np.testing.assert_array_equal(images.test_x.numpy(), test_x)
    np.testing.assert_array_equal(images.test_y.numpy(), test_y)


def test_what_a_set_holds_is_said(tmp_path):
    write_both(tmp_path)
    files = ["cifar10/train.parquet", "cifar10/test.parquet"]
    assert data.about(files, tmp_path) == "CIFAR-10"
    write_images(tmp_path / files[0], 2, encoding="JPEG")
    assert data.about(files, tmp_path) == "CIFAR-10, images encoded again as JPEG, so not its original pixels"
    write_digits(tmp_path / "mnist/train.parquet", 2)
    assert data.about(["mnist/train.parquet"], tmp_path) == "MNIST"
    for lines, version in ((LINES, "v1, rare words are <unk>"), (["All words .\n"], "raw-v1")):
        write_lines(tmp_path / "wikitext2/validation.parquet", lines)
        assert version in data.about(["wikitext2/validation.parquet"], tmp_path)
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare/input.txt").write_text(PLAY)
    assert "the last 10% are held out" in data.about(["tinyshakespeare/input.txt"], tmp_path)
    both = data.about(["wikitext2/validation.parquet", "wikitext2/test.parquet", "tinyshakespeare/input.txt"], tmp_path)
    assert both.startswith(
        "WikiText-2 (raw-v1) as bytes, validation split, judged on its test split; tiny shakespeare,"
    )


def test_the_shared_images_are_known_to_be_encoded_again(data_file):
    folder = data_file("cifar10/train.parquet").parents[1]
    first = bytes(data._first(folder / "cifar10/train.parquet", "img")["bytes"][:3])
    assert ("JPEG" in data.about(["cifar10/train.parquet"], folder)) == (first == b"\xff\xd8\xff")


def test_digits_arrive_as_they_were_written(tmp_path):
    written = [write_digits(tmp_path / f"mnist/{split}.parquet", n, seed=n) for split, n in (("train", 9), ("test", 4))]
    images = data.mnist(tmp_path)
    found = [(images.train_x, images.train_y), (images.test_x, images.test_y)]
    for (x, y), (found_x, found_y) in zip(written, found, strict=True):
        assert found_x.dtype == torch.uint8
        assert found_x.shape[1:] == (1, 28, 28)
        np.testing.assert_array_equal(found_x.numpy(), x)
        np.testing.assert_array_equal(found_y.numpy(), y)


def test_decoded_images_are_kept_until_the_file_changes(tmp_path, monkeypatch):
    write_both(tmp_path)
    first = data.cifar10(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_decoded", lambda file, **_: pytest.fail(f"{file} is decoded again"))
        assert torch.equal(data.cifar10(tmp_path).train_x, first.train_x)
    file = tmp_path / "cifar10/train.parquet"
    x, _ = write_images(file, 12, seed=99)
    os.utime(file, (1, 1))
    changed = data.cifar10(tmp_path)
    np.testing.assert_array_equal(changed.train_x.numpy(), x)
    assert changed.digest != first.digest


def test_the_digest_is_of_the_content_and_not_of_the_place(tmp_path):
    for name in ("here", "there"):
        write_both(tmp_path / name)
    assert data.cifar10(tmp_path / "here").digest == data.cifar10(tmp_path / "there").digest


def test_nothing_half_written_is_kept(tmp_path, cache, monkeypatch):
    write_both(tmp_path)

    def fail(out, array):
        out.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            data.cifar10(tmp_path)
    assert not list((cache / "arrays").iterdir())
    assert data.cifar10(tmp_path).train_y.numel() == 12


def test_characters_become_ids_and_the_end_is_held_out(tmp_path):
    file = tmp_path / "tinyshakespeare/input.txt"
    file.parent.mkdir()
    file.write_text(PLAY * 10)
    text = data.tiny_shakespeare(tmp_path)
    characters = sorted(set(PLAY))
    assert text.vocabulary == len(characters)
    assert text.train.numel() == int(0.9 * len(PLAY * 10))
    assert "".join(characters[i] for i in [*text.train.tolist(), *text.heldout.tolist()]) == PLAY * 10
    plain = data.tiny_shakespeare(tmp_path, as_bytes=True)
    assert bytes([*plain.train.tolist(), *plain.heldout.tolist()]).decode() == PLAY * 10
    assert (plain.vocabulary, plain.train.numel()) == (256, text.train.numel())


def test_wikitext_is_trained_on_its_validation_split(tmp_path):
    write_lines(tmp_path / "wikitext2/validation.parquet", LINES)
    write_lines(tmp_path / "wikitext2/test.parquet", ["other\n"])
    text = data.wikitext2(tmp_path)
    assert bytes(text.train.tolist()) == "".join(LINES).encode()
    assert bytes(text.heldout.tolist()) == b"other\n"
    assert text.vocabulary == 256


def test_another_schema_is_refused_with_its_columns(tmp_path):
    file = tmp_path / "wikitext2/validation.parquet"
    file.parent.mkdir()
    pq.write_table(pa.table({"line": ["a"]}), file)
    pq.write_table(pa.table({"text": ["a"]}), file.with_name("test.parquet"))
    with pytest.raises(ValueError, match="columns line; expected one named 'text'"):
        data.wikitext2(tmp_path)


# ---- where files come from -------------------------------------------------------------------------------------------


def test_the_folder_given_comes_before_the_one_that_the_environment_names(tmp_path, monkeypatch):
    for name in ("given", "named"):
        (tmp_path / name / "tinyshakespeare").mkdir(parents=True)
        (tmp_path / name / "tinyshakespeare/input.txt").write_text(name)
    monkeypatch.setenv(data.ENVIRONMENT, str(tmp_path / "named"))
    assert data.locate("tinyshakespeare/input.txt").read_text() == "named"
    assert data.locate("tinyshakespeare/input.txt", tmp_path / "given").read_text() == "given"


def test_what_is_downloaded_is_kept(tmp_path, cache, monkeypatch):
    public = tmp_path / "public.txt"
    public.write_text(PLAY)
    monkeypatch.setitem(data.URLS, "tinyshakespeare/input.txt", public.as_uri())
    file = data.locate("tinyshakespeare/input.txt")
    assert file.read_text() == PLAY
    assert cache in file.parents
    public.unlink()
    assert data.locate("tinyshakespeare/input.txt") == file


@pytest.mark.parametrize("way", ["folder", "environment", "network"])
def test_what_is_missing_is_said_with_all_three_ways(tmp_path, monkeypatch, no_network, way):
    if way == "environment":
        monkeypatch.setenv(data.ENVIRONMENT, str(tmp_path))
    with pytest.raises(FileNotFoundError) as caught:
        data.cifar10(tmp_path if way == "folder" else None)
    said = str(caught.value)
    for part in ("cifar10/train.parquet", "--data-dir", data.ENVIRONMENT, "https://huggingface.co/datasets/"):
        assert part in said
    assert ("no network" in said) == (way == "network")


@pytest.mark.parametrize("name", data.URLS)
def test_every_file_has_a_public_address(name):
    assert data.URLS[name].startswith("https://")
    assert data.URLS[name].endswith(name.rpartition(".")[2])


# ---- the real sets ---------------------------------------------------------------------------------------------------


def test_the_real_images_are_what_they_should_be(tmp_path, data_file):
    (tmp_path / "cifar10").mkdir()
    for split in ("train", "test"):  # the smaller split twice: it is the format that is looked at
        (tmp_path / f"cifar10/{split}.parquet").symlink_to(data_file("cifar10/test.parquet"))
    images = data.cifar10(tmp_path)
    assert images.test_x.shape == (10_000, 3, 32, 32)
    assert torch.equal(images.test_y.bincount(), torch.full((10,), 1_000))
    channels = images.test_x.float().mean((0, 2, 3))
    torch.testing.assert_close(channels, torch.tensor([126.0, 123.7, 114.9]), atol=3.0, rtol=0.0)


def test_the_real_digits_are_what_they_should_be(tmp_path, data_file):
    (tmp_path / "mnist").mkdir()
    for split in ("train", "test"):
        (tmp_path / f"mnist/{split}.parquet").symlink_to(data_file("mnist/test.parquet"))
    images = data.mnist(tmp_path)
    assert images.test_x.shape == (10_000, 1, 28, 28)
    assert images.test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_the_real_texts_are_what_they_should_be(data_file):
    play = data.tiny_shakespeare(data_file("tinyshakespeare/input.txt").parents[1])
    assert play.vocabulary == 65
    assert play.train.numel() == 1_003_854
    assert play.heldout.numel() == 111_540
    for name in ("validation", "test"):
        folder = data_file(f"wikitext2/{name}.parquet").parents[1]
    wiki = data.wikitext2(folder)
    assert b"<unk>" in bytes(wiki.train[:10_000].tolist())
    assert wiki.train.numel() > 1_000_000
    assert wiki.heldout.numel() > 1_000_000
