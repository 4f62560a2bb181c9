"""The four data sets: their splits, their preparation, and what happens to files that are missing or wrong.

Small synthetic files stand for the published ones, with the checksums and sizes set to theirs; the tests of the
published files themselves look for them in ../shared/data. No test reaches beyond this machine.
"""

import functools
import gzip
import hashlib
import http.server
import shutil
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from reproduction import data
from reproduction.data import load

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
beside = pytest.mark.skipif(not SHARED.exists(), reason="the data sets are not beside the repository")

# A file that each set needs, to damage or to miss.
ONE_FILE = {
    "energy": "energy/ENB2012_data.csv",
    "mnist": "MNIST/raw/train-images-idx3-ubyte.gz",
    "cifar10": "cifar-10-batches-bin/data_batch_2.bin",
}


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def files_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def idx(array):
    """The bytes of an IDX file."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def csv_of(table, columns=data._ENERGY_COLUMNS):
    lines = [",".join(columns), *(",".join(map(repr, row)) for row in table.tolist())]
    return ("\n".join(lines) + "\n").encode()


class Published:
    """Small data sets in the layouts of the real ones, and what they hold."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.table = rng.normal(3, 2, size=(768, 10)).round(2)
        # Each file has its own mixture of the classes, as the published ones do: only all five have as many of each.
        train = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), 10))
        self.labels = {
            ("mnist", "train"): rng.integers(0, 10, size=12, dtype=np.uint8),
            ("mnist", "test"): rng.integers(0, 10, size=5, dtype=np.uint8),
            ("cifar10", "train"): train,
            ("cifar10", "test"): np.repeat(np.arange(10, dtype=np.uint8), 2),
        }
        self.pixels = {}
        for key, labels in self.labels.items():
            shape = (1, 28, 28) if key[0] == "mnist" else (3, 32, 32)
            self.pixels[key] = rng.integers(0, 256, size=(len(labels), *shape), dtype=np.uint8)
        arrays = [part[key] for key in list(self.labels)[:2] for part in (self.pixels, self.labels)]
        self.unpacked = {name: idx(array.squeeze()) for name, array in zip(data._MNIST_MD5, arrays, strict=True)}
        records = [
            np.column_stack([self.labels["cifar10", part], self.pixels["cifar10", part].reshape(-1, 3072)])
            for part in ("train", "test")
        ]
        files = zip(data._CIFAR10_TRAIN + data._CIFAR10_TEST, np.split(np.vstack(records), 6), strict=True)
        self.files = {
            "energy": {ONE_FILE["energy"]: csv_of(self.table)},
            "mnist": {f"MNIST/raw/{name}.gz": gzip.compress(raw) for name, raw in self.unpacked.items()},
            "cifar10": {f"cifar-10-batches-bin/{name}": rows.tobytes() for name, rows in files},
        }

    def lay_out(self, name, folder):
        for path, content in self.files[name].items():
            write(folder / path, content)


@pytest.fixture
def published(monkeypatch):
    """The small data sets, with `data` made to take them for the published ones."""
    small = Published()
    monkeypatch.setattr(data, "_ENERGY_MD5", md5(np.round(100 * small.table).astype("<i8").tobytes()))
    sums = {name: (md5(small.files["mnist"][f"MNIST/raw/{name}.gz"]), md5(raw)) for name, raw in small.unpacked.items()}
    monkeypatch.setattr(data, "_MNIST_MD5", sums)
    monkeypatch.setattr(data, "_CIFAR10_IMAGES", 20)
    return small


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No folder but the test's own, and no download unless a test allows it."""
    monkeypatch.delenv("SEPSA_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)


@pytest.fixture
def pooch(monkeypatch):
    """The real pooch, which a test may use after all; it can reach no other machine."""
    monkeypatch.delitem(sys.modules, "pooch")
    pooch = pytest.importorskip("pooch")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return pooch


@pytest.fixture
def server(published, pooch, tmp_path_factory, monkeypatch):
    """The publishers, on this machine: the folder that they serve."""
    site = tmp_path_factory.mktemp("site")
    for name in ONE_FILE:
        published.lay_out(name, site)
    archive = site / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(site / "cifar-10-batches-bin", "cifar-10-batches-bin")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        home = f"http://127.0.0.1:{httpd.server_port}/"
        monkeypatch.setattr(data, "_ENERGY_URL", home + ONE_FILE["energy"])
        monkeypatch.setattr(data, "_MNIST_URL", home + "MNIST/raw/")
        monkeypatch.setattr(data, "_CIFAR10_URL", home + archive.name)
        monkeypatch.setattr(data, "_CIFAR10_MD5", md5(archive.read_bytes()))
        yield site
        httpd.shutdown()
        thread.join()


# ---------------------------------------------------------------------- preparation


def check_split(dataset, inputs, targets, *sizes):
    """Rows as the protocol splits them, and inputs scaled by what the training rows alone show."""
    assert (dataset.task, dataset.n_outputs) == ("regression", targets.shape[1])
    rest, i_test = train_test_split(np.arange(len(inputs)), test_size=0.2, random_state=123)
    i_train, i_validation = train_test_split(rest, test_size=0.2, random_state=123)
    assert (len(i_train), len(i_validation), len(i_test)) == sizes
    mean, std = inputs[i_train].mean(0), inputs[i_train].std(0)
    for part, rows in (("train", i_train), ("validation", i_validation), ("test", i_test)):
        x, y = getattr(dataset, f"{part}_inputs"), getattr(dataset, f"{part}_targets")
        assert x.dtype == y.dtype == torch.float32
        np.testing.assert_allclose(x.numpy(), (inputs[rows] - mean) / std, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(y.numpy(), targets[rows].astype(np.float32))


def check_classes(dataset):
    assert (dataset.task, dataset.n_outputs) == ("classification", 10)
    assert dataset.validation_inputs is dataset.validation_targets is None
    for x, y in ((dataset.train_inputs, dataset.train_targets), (dataset.test_inputs, dataset.test_targets)):
        assert x.dtype == y.dtype == torch.float32
        assert x.is_contiguous()
        assert len(x) == len(y)
        assert ((y == 0) | (y == 1)).all()
        assert (y.sum(1) == 1).all()


def test_diabetes_needs_no_file():
    inputs, targets = load_diabetes(return_X_y=True)
    check_split(load("diabetes"), inputs, targets[:, None], 282, 71, 89)


def test_the_environment_names_the_folder_and_the_argument_goes_before_it(published, tmp_path, monkeypatch):
    published.lay_out("energy", tmp_path / "good")
    monkeypatch.setenv("SEPSA_DATA", str(tmp_path / "good"))
    check_split(load("energy"), published.table[:, :8], published.table[:, 8:], 491, 123, 154)
    monkeypatch.setenv("SEPSA_DATA", str(tmp_path / "empty"))
    assert load("energy", tmp_path / "good").name == "energy"
    with pytest.raises(FileNotFoundError, match="empty"):
        load("energy")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("cifar10", 0.5, 0.5)])
def test_images_in_small(published, tmp_path, name, mean, std, packed):
    published.lay_out(name, tmp_path)
    for path in list(tmp_path.rglob("*.gz")):  # by another compressor than the publisher's, or by none
        raw = gzip.decompress(path.read_bytes())
        path.unlink()
        write(path if packed else path.with_suffix(""), gzip.compress(raw, 1) if packed else raw)
    dataset = load(name, tmp_path)
    check_classes(dataset)
    for part in ("train", "test"):
        expected = (torch.tensor(published.pixels[name, part]).float() / 255 - mean) / std
        torch.testing.assert_close(getattr(dataset, f"{part}_inputs"), expected, rtol=0, atol=0)
        assert getattr(dataset, f"{part}_targets").argmax(1).tolist() == published.labels[name, part].tolist()


# ---------------------------------------------------------------------- wrong files

DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "longer": lambda content: content + b"x",
}


@pytest.mark.parametrize("name", ONE_FILE)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name(published, tmp_path, name, damage):
    published.lay_out(name, tmp_path)
    path = tmp_path / ONE_FILE[name]
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    # Twenty images of label 0 are a sound file of their own, so there the set is refused, from its first file on.
    shown = path.parent if (name, damage) == ("cifar10", "zeros") else path
    with pytest.raises(ValueError, match="remove it") as caught:
        load(name, tmp_path)
    assert str(shown) in str(caught.value)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)


def test_energy_says_what_is_wrong(published, tmp_path):
    table = published.table
    nan, shifted = table.copy(), table.copy()
    nan[3, 4] = np.nan
    shifted[3, 8] += 0.01
    for content, words in (
        (csv_of(table[:-1]), r"768 rows of 10 numbers, got shape \(767, 10\)"),
        (csv_of(table, data._ENERGY_COLUMNS[::-1]), "its columns must be X1,X2"),
        (csv_of(nan), "NaN or Inf"),
        (csv_of(shifted), "its numbers must have the md5"),
        (csv_of(table[[1, 0, *range(2, 768)]]), "its numbers must have the md5"),
    ):
        write(tmp_path / ONE_FILE["energy"], content)
        with pytest.raises(ValueError, match=f"is damaged or another file: .*{words}"):
            load("energy", tmp_path)


# ---------------------------------------------------------------------- missing files


def missing(name, folder):
    """The one error for a file that cannot be had, which names it and shows no other error behind it."""
    with pytest.raises(FileNotFoundError, match=r"^[^\n]* is missing, and http[^\n]*SEPSA_DATA[^\n]*$") as caught:
        load(name, folder)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    return str(caught.value)


@pytest.mark.parametrize("name", ONE_FILE)
def test_a_missing_file_without_a_network(published, pooch, tmp_path, monkeypatch, name):
    import requests

    def retrieve(url, **options):
        raise requests.exceptions.ConnectionError(f"HTTPSConnectionPool: Max retries exceeded with url: {url}")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    published.lay_out(name, tmp_path)
    (tmp_path / ONE_FILE[name]).unlink()
    before = files_under(tmp_path)
    message = missing(name, tmp_path)
    assert message.startswith(f"{tmp_path / ONE_FILE[name]} is missing")
    assert "(ConnectionError)" in message
    assert "Max retries" not in message
    assert files_under(tmp_path) == before


@pytest.mark.parametrize("name", ONE_FILE)
def test_missing_files_are_downloaded_once(server, published, tmp_path, name):
    first = load(name, tmp_path / "new" / "folder")
    assert files_under(tmp_path / "new" / "folder") == sorted(published.files[name])
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in tmp_path.rglob("*") if path.is_file())
    shutil.rmtree(server)
    again = load(name, tmp_path / "new" / "folder")
    torch.testing.assert_close(first.train_inputs, again.train_inputs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ONE_FILE)
def test_a_download_of_wrong_bytes_leaves_nothing(server, tmp_path, name):
    for file in files_under(server):
        write(server / file, DAMAGE["truncated"]((server / file).read_bytes()))
    message = missing(name, tmp_path)
    assert ("it must have 768 rows" if name == "energy" else "hash") in message or "it is not a table" in message
    assert files_under(tmp_path) == []


def test_an_incomplete_cifar10_is_replaced_whole(server, published, tmp_path):
    """Files of two copies would make no set: the same image could be in both."""
    published.lay_out("cifar10", tmp_path)
    place = tmp_path / "cifar-10-batches-bin"
    (place / "data_batch_4.bin").unlink()
    (place / "data_batch_1.bin").write_bytes(b"of another copy")
    assert load("cifar10", tmp_path).train_inputs.shape == (100, 3, 32, 32)


def test_a_download_cut_short_leaves_nothing_under_a_true_name(published, pooch, tmp_path, monkeypatch):
    def retrieve(url, known_hash, fname, path):
        write(Path(path) / fname, b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    for name in ONE_FILE:
        with pytest.raises(KeyboardInterrupt):
            load(name, tmp_path)
    assert files_under(tmp_path) == []


@beside
def test_mnist_as_published():
    dataset = load("mnist", SHARED)
    check_classes(dataset)
    assert dataset.train_inputs.shape == (60_000, 1, 28, 28)
    assert dataset.test_inputs.shape == (10_000, 1, 28, 28)
    # 0.1307 and 0.3081 are the mean and the deviation of the training images.
    assert dataset.train_inputs.mean().item() == pytest.approx(0, abs=1e-3)
    assert dataset.train_inputs.std().item() == pytest.approx(1, abs=1e-3)
    assert dataset.train_targets.argmax(1)[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert dataset.test_targets.argmax(1)[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
