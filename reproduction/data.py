"""The paper's four data sets, prepared as in its experiments.

Files have the layouts of their publishers, under one folder: `folder`, or the environment variable SEPSA_DATA, or the
user's cache folder. Missing files are downloaded, and all files are checked before use.

    energy/ENB2012_data.csv
    MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]
    cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

REGRESSIONS, CLASSIFICATIONS = ("energy", "diabetes"), ("mnist", "cifar10")
NAMES = (*REGRESSIONS, *CLASSIFICATIONS)
TITLES = {"energy": "Energy", "diabetes": "Diabetes", "mnist": "MNIST", "cifar10": "CIFAR-10"}
Metric = Literal["mse", "accuracy"]
_CLASSES = 10

# UCI's own csv file. UCI may reformat the numbers, so the md5 is that of the table in hundredths, as 64-bit integers.
_ENERGY_URL = "https://archive.ics.uci.edu/static/public/242/data.csv"
_ENERGY_COLUMNS = ["X1", "X2", "X3", "X4", "X5", "X6", "X7", "X8", "Y1", "Y2"]
_ENERGY_ROWS = 768
_ENERGY_MD5 = "6698c6b0c04e7407a4907d3ea9a6fa4e"

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# file: md5 of the publisher's .gz, md5 of the unpacked bytes, which does not depend on the compressor.
_MNIST_MD5 = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
_MNIST_MEAN, _MNIST_STD = 0.1307, 0.3081

_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR10_FOLDER = "cifar-10-batches-bin"
_CIFAR10_TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]
_CIFAR10_TEST = ["test_batch.bin"]
_CIFAR10_IMAGES = 10_000  # in each file
_CIFAR10_RECORD = 1 + 3 * 32 * 32  # bytes: the label, then the red, green and blue plane
_CIFAR10_MEAN, _CIFAR10_STD = 0.5, 0.5
_CIFAR10_SPREAD = 64.15 / 127.5  # of the publisher's training pixels, after the preparation
_CIFAR10_NOTE = (
    "The CIFAR-10 pixels are not the publisher's own: the same 60,000 images after a lossy re-encoding, "
    "a little smoother than the originals."
)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set in float32, split as in the paper.

    Inputs are (n, features) or (n, channels, height, width), targets (n, n_outputs). Those of a classification are
    one-hot: `targets.argmax(1)` gives the labels. The regressions have validation rows, which the paper leaves unused.
    """

    name: str
    task: Literal["regression", "classification"]
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    validation_inputs: Tensor | None = None
    validation_targets: Tensor | None = None
    note: str = ""  # a remark on these files for readers of the results

    @property
    def n_outputs(self) -> int:
        return self.train_targets.shape[1]


def metric(name: str) -> Metric:
    """What is reported on the data set: the mean squared error of regressions, the accuracy of classifications."""
    return "mse" if name in REGRESSIONS else "accuracy"


def load(name: str, folder: Path | None = None) -> Dataset:
    """The data set `name`: "energy", "diabetes", "mnist" or "cifar10".

    `folder` holds the files; without it the environment variable SEPSA_DATA names the folder, and without that it is
    the user's cache folder. Missing files are downloaded into it; a file that is not what it should be is refused.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    if name == "diabetes":
        inputs, targets = _extra("sklearn.datasets").load_diabetes(return_X_y=True)
        return _regression("diabetes", inputs, targets[:, None])
    return {"energy": _energy, "mnist": _mnist, "cifar10": _cifar10}[name](_data_folder(folder))


def _energy(folder: Path) -> Dataset:
    path = folder / "energy" / "ENB2012_data.csv"
    if not path.exists():
        with _downloaded(_ENERGY_URL, None, path, check=lambda file: _energy_table(file.read_bytes())) as file:
            os.replace(file, path)
    try:
        table = _energy_table(path.read_bytes())
    except ValueError as error:
        raise _refused(path, str(error)) from None
    return _regression("energy", table[:, :8], table[:, 8:])


def _energy_table(data: bytes) -> npt.NDArray[np.float64]:
    """The 768 rows of X1..X8, Y1, Y2; raises ValueError if the bytes are something else."""
    try:
        header, *rows = filter(None, csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))
        table = np.array(rows, dtype=np.float64)
    except (ValueError, csv.Error):
        raise ValueError("it is not a table of numbers under one line of names") from None
    if header != _ENERGY_COLUMNS:
        raise ValueError(f"its columns must be {','.join(_ENERGY_COLUMNS)}, got {','.join(header)[:80]}")
    if table.shape != (_ENERGY_ROWS, len(header)):
        raise ValueError(f"it must have {_ENERGY_ROWS} rows of {len(header)} numbers, got shape {table.shape}")
    if not np.isfinite(table).all():
        raise ValueError("it holds NaN or Inf")
    md5 = _md5(np.round(100 * table).astype("<i8").tobytes())
    if md5 != _ENERGY_MD5:
        raise ValueError(f"its numbers must have the md5 {_ENERGY_MD5}, got {md5}")
    return table


def _regression(name: str, inputs: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]) -> Dataset:
    """A fifth for testing, a fifth of the rest for validation, and inputs standardized by the training rows."""
    split = _extra("sklearn.model_selection").train_test_split
    x, x_test, y, y_test = split(inputs, targets, test_size=0.2, random_state=123)
    x_train, x_validation, y_train, y_validation = split(x, y, test_size=0.2, random_state=123)
    standardize = _extra("sklearn.preprocessing").StandardScaler().fit(x_train).transform

    def tensors(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        return torch.tensor(standardize(x), dtype=torch.float32), torch.tensor(y, dtype=torch.float32)

    train, test = tensors(x_train, y_train), tensors(x_test, y_test)
    return Dataset(name, "regression", *train, *test, *tensors(x_validation, y_validation))


def _mnist(folder: Path) -> Dataset:
    raw = folder / "MNIST" / "raw"

    def split(name: str) -> tuple[Tensor, Tensor]:
        pixels = _idx(_mnist_bytes(raw, f"{name}-images-idx3-ubyte"))[:, None]
        inputs = np.empty(pixels.shape, np.float32)
        _standardize(pixels, _MNIST_MEAN, _MNIST_STD, out=inputs)
        return torch.from_numpy(inputs), _one_hot(_idx(_mnist_bytes(raw, f"{name}-labels-idx1-ubyte")))

    return Dataset("mnist", "classification", *split("train"), *split("t10k"))


def _mnist_bytes(raw: Path, name: str) -> bytes:
    published, known = _MNIST_MD5[name]
    path = raw / name
    if not path.exists():
        path = raw / f"{name}.gz"
    if not path.exists():
        with _downloaded(_MNIST_URL + path.name, published, path) as file:
            os.replace(file, path)
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise _refused(path, f"it is not a complete gzip file ({error})") from None
    md5 = _md5(data)
    if md5 != known:
        raise _refused(path, f"its unpacked {len(data):,} bytes must have the md5 {known}, got {md5}")
    return data


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _idx(data: bytes) -> Bytes:
    """The bytes of an IDX file in their shape: two zeros, type, number of dimensions, sizes, values."""
    ndim = data[3]
    shape = np.frombuffer(data, ">u4", count=ndim, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape.tolist())


def _cifar10(folder: Path) -> Dataset:
    place = folder / _CIFAR10_FOLDER
    files = _CIFAR10_TRAIN + _CIFAR10_TEST
    missing = [name for name in files if not (place / name).exists()]
    if missing:
        with _downloaded(_CIFAR10_URL, _CIFAR10_MD5, place / missing[0]) as archive:
            _unpack(archive, files)
            # All six, not only the missing ones: the others may have another encoding or order.
            for name in files:
                os.replace(archive.parent / name, place / name)
    train = _cifar10_split([place / name for name in _CIFAR10_TRAIN])
    test = _cifar10_split([place / name for name in _CIFAR10_TEST])
    note = "" if abs(float(train[0].std()) - _CIFAR10_SPREAD) < 1e-3 else _CIFAR10_NOTE
    return Dataset("cifar10", "classification", *train, *test, note=note)


def _unpack(archive: Path, names: list[str]) -> None:
    """Extract the files of these names beside the archive."""
    with tarfile.open(archive) as tar:
        for name in names:
            source = tar.extractfile(f"{_CIFAR10_FOLDER}/{name}")
            assert source is not None, name  # ensured by the archive's md5
            with source, (archive.parent / name).open("wb") as target:
                shutil.copyfileobj(source, target)


def _cifar10_split(paths: list[Path]) -> tuple[Tensor, Tensor]:
    n, pixels = _CIFAR10_IMAGES, _CIFAR10_RECORD - 1
    values = np.empty((len(paths) * n, pixels), np.float32)
    labels = np.empty(len(paths) * n, np.uint8)
    for i, path in enumerate(paths):
        size = path.stat().st_size
        if size != n * _CIFAR10_RECORD:
            raise _refused(path, f"it must have {n * _CIFAR10_RECORD:,} bytes, got {size:,}")
        records = np.fromfile(path, np.uint8).reshape(n, _CIFAR10_RECORD)
        rows = slice(i * n, (i + 1) * n)
        labels[rows] = records[:, 0]
        if labels[rows].max() >= _CLASSES:
            raise _refused(path, f"its labels must be 0 to {_CLASSES - 1}, got {labels[rows].max()}")
        _standardize(records[:, 1:], _CIFAR10_MEAN, _CIFAR10_STD, out=values[rows])
    # No md5 here: copies converted from another image format are accepted, but each class must be complete.
    counts, each = np.bincount(labels, minlength=_CLASSES), len(labels) // _CLASSES
    if (counts != each).any():
        c = int((counts != each).argmax())
        names = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"
        raise _refused(names, f"class {c} must have {each:,} images, got {counts[c]:,}")
    return torch.from_numpy(values).reshape(-1, 3, 32, 32), _one_hot(labels)


def _standardize(pixels: Bytes, mean: float, std: float, out: Floats) -> None:
    """Write (pixels/255 - mean)/std in float32 to `out`, without a second copy of the large set in memory."""
    np.divide(pixels, np.float32(255), out=out)
    np.subtract(out, np.float32(mean), out=out)
    np.divide(out, np.float32(std), out=out)


def black(name: str) -> float:
    """The value of a black pixel in the standardized images of "mnist" or "cifar10"."""
    mean, std = {"mnist": (_MNIST_MEAN, _MNIST_STD), "cifar10": (_CIFAR10_MEAN, _CIFAR10_STD)}[name]
    return -mean / std


def _one_hot(labels: Bytes) -> Tensor:
    return torch.from_numpy(np.eye(_CLASSES, dtype=np.float32)[labels])


def _data_folder(folder: Path | None) -> Path:
    given = folder or os.environ.get("SEPSA_DATA")
    return Path(given).expanduser() if given else Path(_extra("pooch").os_cache("sepsa"))


@contextmanager
def _downloaded(
    url: str, md5: str | None, wanted: Path, check: Callable[[Path], object] = lambda file: None
) -> Iterator[Path]:
    """The downloaded and checked content of `url`, in a temporary folder beside `wanted`.

    The caller renames it to its place, so that an interrupted download leaves no partial file under the final name.
    """
    with ExitStack() as stack:
        try:
            pooch = _extra("pooch")
            wanted.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix=".download-", dir=wanted.parent))
            known = None if md5 is None else f"md5:{md5}"
            file = Path(pooch.retrieve(url, known_hash=known, fname=url.rsplit("/", 1)[1], path=temporary))
            check(file)
            file.chmod(0o644)  # pooch makes it readable by its owner only, but data folders are shared
        except (ImportError, OSError, ValueError) as error:
            raise FileNotFoundError(
                f"{wanted} is missing, and {url} cannot be downloaded ({_reason(error)}): try again with a network, "
                "or put the file there, or set SEPSA_DATA to a folder that holds it"
            ) from None
        yield file


def _reason(error: Exception) -> str:
    """The reason for a failed download, without urllib3's nested messages."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error).partition(". ")[0]


def _refused(path: Path | str, why: str) -> ValueError:
    return ValueError(f"{path} is damaged or another file: {why}; remove it, and the next load downloads it again")


def _extra(module: str) -> Any:
    """Import a module that comes with the extra `reproduction`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        cure = f"{package} is not installed: pip install 'sepsa[reproduction]'"
        raise ModuleNotFoundError(cure, name=package) from None
