"""The four data sets: their splits, their preparation, and what happens to files that are missing or wrong.

Small synthetic files stand for the published ones, with the checksums and sizes set to theirs; the tests of the
published files themselves look for them in ../shared/data. No test reaches beyond this machine.
"""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from sepsa.paper import data
from sepsa.paper.data import load

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
beside = pytest.mark.skipif(not SHARED.exists(), reason="the data sets are not beside the repository")

MNIST = list(data._MNIST_MD5)
CIFAR10 = data._CIFAR10_TRAIN + data._CIFAR10_TEST
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


def csv_of(table):
    lines = [",".join(data._ENERGY_COLUMNS), *(",".join(map(repr, row)) for row in table.tolist())]
    return ("\n".join(lines) + "\n").encode()


class Published:
    """Small data sets in the layouts of the real ones, and what they hold."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.table = rng.normal(3, 2, size=(768, 10)).round(2)
        self.images = {n: rng.integers(0, 256, size=(n, 28, 28), dtype=np.uint8) for n in (12, 5)}
        self.labels = {n: rng.integers(0, 10, size=n, dtype=np.uint8) for n in (12, 5)}
        self.unpacked = {name: idx(array) for name, array in zip(MNIST, self._mnist(), strict=True)}
        # Each file has its own mixture of the classes, as the published ones do: only all five have as many of each.
        train = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), 10)).reshape(5, 20)
        self.records = {}
        for name, labels in zip(CIFAR10, [*train, np.repeat(np.arange(10, dtype=np.uint8), 2)], strict=True):
            pixels = rng.integers(0, 256, size=(20, 3072), dtype=np.uint8)
            self.records[name] = np.concatenate([labels[:, None], pixels], 1)
        self.files = {"energy": {ONE_FILE["energy"]: csv_of(self.table)}}
        self.files["mnist"] = {f"MNIST/raw/{name}.gz": gzip.compress(raw) for name, raw in self.unpacked.items()}
        self.files["cifar10"] = {f"cifar-10-batches-bin/{name}": rows.tobytes() for name, rows in self.records.items()}

    def _mnist(self):
        return [self.images[12], self.labels[12], self.images[5], self.labels[5]]

    def archive(self):
        """cifar-10-binary.tar.gz"""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            for path, content in self.files["cifar10"].items():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return out.getvalue()

    def lay_out(self, name, folder):
        for path, content in self.files.get(name, {}).items():
            write(folder / path, content)


@pytest.fixture(scope="session")
def small():
    return Published()


@pytest.fixture
def published(small, monkeypatch):
    """The small data sets, with `data` made to take them for the published ones."""
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
def server(published, pooch, monkeypatch):
    """The publishers, on this machine: a dict of what they serve, by file name."""
    offers = {Path(path).name: content for path, content in published.files["mnist"].items()}
    offers |= {"data.csv": published.files["energy"][ONE_FILE["energy"]], "cifar-10-binary.tar.gz": published.archive()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = offers.get(self.path.rsplit("/", 1)[1])
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        home = f"http://127.0.0.1:{httpd.server_port}/"
        monkeypatch.setattr(data, "_ENERGY_URL", home + "data.csv")
        monkeypatch.setattr(data, "_MNIST_URL", home)
        monkeypatch.setattr(data, "_CIFAR10_URL", home + "cifar-10-binary.tar.gz")
        monkeypatch.setattr(data, "_CIFAR10_MD5", md5(offers["cifar-10-binary.tar.gz"]))
        yield offers
        httpd.shutdown()
        thread.join()


# ---------------------------------------------------------------------- preparation


def check_split(dataset, inputs, targets, train, validation, test):
    """Rows as the protocol splits them, and inputs scaled by what the training rows alone show."""
    from sklearn.model_selection import train_test_split

    rest, i_test = train_test_split(np.arange(len(inputs)), test_size=0.2, random_state=123)
    i_train, i_validation = train_test_split(rest, test_size=0.2, random_state=123)
    assert (len(i_train), len(i_validation), len(i_test)) == (train, validation, test)
    mean, std = inputs[i_train].mean(0), inputs[i_train].std(0)
    for part, rows in (("train", i_train), ("validation", i_validation), ("test", i_test)):
        x, y = getattr(dataset, f"{part}_inputs"), getattr(dataset, f"{part}_targets")
        assert x.dtype == y.dtype == torch.float32
        np.testing.assert_allclose(x.numpy(), (inputs[rows] - mean) / std, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(y.numpy(), targets[rows].astype(np.float32))


def check_classes(dataset):
    assert dataset.task == "classification"
    assert dataset.n_outputs == 10
    assert dataset.validation_inputs is None
    assert dataset.validation_targets is None
    for x, y in ((dataset.train_inputs, dataset.train_targets), (dataset.test_inputs, dataset.test_targets)):
        assert x.dtype == y.dtype == torch.float32
        assert x.is_contiguous()
        assert len(x) == len(y)
        assert ((y == 0) | (y == 1)).all()
        assert (y.sum(1) == 1).all()


def test_diabetes_needs_no_file():
    from sklearn.datasets import load_diabetes

    inputs, targets = load_diabetes(return_X_y=True)
    dataset = load("diabetes")
    assert (dataset.name, dataset.task, dataset.n_outputs) == ("diabetes", "regression", 1)
    check_split(dataset, inputs, targets[:, None], 282, 71, 89)


def test_energy_in_small(published, tmp_path):
    published.lay_out("energy", tmp_path)
    dataset = load("energy", tmp_path)
    assert (dataset.name, dataset.task, dataset.n_outputs) == ("energy", "regression", 2)
    check_split(dataset, published.table[:, :8], published.table[:, 8:], 491, 123, 154)


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_in_small(published, tmp_path, packed):
    for name, raw in published.unpacked.items():
        write(tmp_path / "MNIST" / "raw" / (name + ".gz" * packed), gzip.compress(raw, 1) if packed else raw)
    dataset = load("mnist", tmp_path)
    check_classes(dataset)
    for part, n in (("train", 12), ("test", 5)):
        expected = (torch.tensor(published.images[n]).float() / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(getattr(dataset, f"{part}_inputs"), expected[:, None], rtol=0, atol=0)
        assert getattr(dataset, f"{part}_targets").argmax(1).tolist() == published.labels[n].tolist()


def test_cifar10_in_small(published, tmp_path):
    published.lay_out("cifar10", tmp_path)
    dataset = load("cifar10", tmp_path)
    check_classes(dataset)
    for part, names in (("train", data._CIFAR10_TRAIN), ("test", data._CIFAR10_TEST)):
        rows = torch.tensor(np.concatenate([published.records[name] for name in names]))
        expected = ((rows[:, 1:].float() / 255 - 0.5) / 0.5).reshape(-1, 3, 32, 32)
        torch.testing.assert_close(getattr(dataset, f"{part}_inputs"), expected, rtol=0, atol=0)
        assert getattr(dataset, f"{part}_targets").argmax(1).tolist() == rows[:, 0].tolist()


# ---------------------------------------------------------------------- which folder


def test_the_environment_names_the_folder_and_the_argument_goes_before_it(published, tmp_path, monkeypatch):
    published.lay_out("energy", tmp_path / "good")
    monkeypatch.setenv("SEPSA_DATA", str(tmp_path / "good"))
    assert load("energy").n_outputs == 2
    monkeypatch.setenv("SEPSA_DATA", str(tmp_path / "empty"))
    assert load("energy", tmp_path / "good").n_outputs == 2
    with pytest.raises(FileNotFoundError, match="empty"):
        load("energy")


# ---------------------------------------------------------------------- wrong files


@pytest.mark.parametrize("name", ONE_FILE)
@pytest.mark.parametrize("damage", ["truncated", "empty", "zeros", "longer"])
def test_a_damaged_file_is_refused_by_name(published, tmp_path, name, damage):
    published.lay_out(name, tmp_path)
    path = tmp_path / ONE_FILE[name]
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "empty": b"",
            "zeros": bytes(len(content)),
            "longer": content + b"x",
        }[damage]
    )
    # Twenty images of label 0 are a sound file of their own, so there the set is refused, from its first file on.
    shown = path.parent if (name, damage) == ("cifar10", "zeros") else path
    with pytest.raises(ValueError, match="remove it") as caught:
        load(name, tmp_path)
    assert str(shown) in str(caught.value)
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)


def refusal(name, folder):
    with pytest.raises(ValueError, match="is damaged or another file") as caught:
        load(name, folder)
    return str(caught.value)


def test_energy_says_what_is_wrong(published, tmp_path):
    path = tmp_path / ONE_FILE["energy"]

    def message(table, columns=data._ENERGY_COLUMNS):
        header = ",".join(data._ENERGY_COLUMNS).encode()
        write(path, csv_of(table).replace(header, ",".join(columns).encode()))
        return refusal("energy", tmp_path)

    table = published.table
    assert "768 rows of 10 numbers, got shape (767, 10)" in message(table[:-1])
    assert "its columns must be X1,X2" in message(table, data._ENERGY_COLUMNS[::-1])
    nan = table.copy()
    nan[3, 4] = np.nan
    assert "NaN or Inf" in message(nan)
    shifted = table.copy()
    shifted[3, 8] += 0.01
    assert "its numbers must have the md5" in message(shifted)
    swapped = table[[1, 0, *range(2, 768)]]
    assert "its numbers must have the md5" in message(swapped)


# ---------------------------------------------------------------------- missing files


def missing(name, folder):
    """The one error for a file that cannot be had, which names it and shows no other error behind it."""
    with pytest.raises(FileNotFoundError) as caught:
        load(name, folder)
    error = caught.value
    assert error.__cause__ is None
    assert error.__suppress_context__
    message = str(error)
    assert "\n" not in message
    assert "is missing, and http" in message
    assert "SEPSA_DATA" in message
    return message


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


# ---------------------------------------------------------------------- downloads, from a server on this machine


@pytest.mark.parametrize("name", ONE_FILE)
def test_missing_files_are_downloaded_once(server, published, tmp_path, name):
    first = load(name, tmp_path / "new" / "folder")
    assert files_under(tmp_path / "new" / "folder") == sorted(published.files[name])
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in tmp_path.rglob("*") if path.is_file())
    server.clear()
    again = load(name, tmp_path / "new" / "folder")
    torch.testing.assert_close(first.train_inputs, again.train_inputs, rtol=0, atol=0)


@pytest.mark.parametrize("name", ONE_FILE)
def test_a_download_of_wrong_bytes_leaves_nothing(server, tmp_path, name):
    for file in server:
        server[file] = server[file][: len(server[file]) // 2]
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


# ---------------------------------------------------------------------- the published files


@beside
def test_energy_as_published(tmp_path):
    write(tmp_path / ONE_FILE["energy"], (SHARED / "ENB2012_data.csv").read_bytes())
    table = np.genfromtxt(SHARED / "ENB2012_data.csv", delimiter=",", skip_header=1)
    check_split(load("energy", tmp_path), table[:, :8], table[:, 8:], 491, 123, 154)


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
