"""Goldens: what the library computes on fixed data, recorded, so that a change of structure shows that it is none.

    python tests/goldens/record.py heads [--device cuda]
    python tests/goldens/record.py stream

computes one kind in a process of its own, on one thread, and records it: a digest of the bits for this processor and
these versions in digests.json, and for `heads` on a CPU the numbers themselves in heads.npz, with which every other
machine is compared to rounding. Record anew only where a change of numbers is intended, and say so in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DIGESTS, HEADS = HERE / "digests.json", HERE / "heads.npz"


def machine(device: str) -> str:
    """The processor, or the GPU, and the versions on which bits depend."""
    import numba
    import numpy
    import torch

    from sepsa.bench import processor

    name = processor() if device == "cpu" else torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, numpy {numpy.__version__}, numba {numba.__version__}"


def compute(kind: str, device: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Digests and numbers of every case of a kind, in this process."""
    import numpy
    import torch

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(f"golden_{kind}", HERE / f"{kind}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if kind == "heads":
        cases = {name: {k: v.numpy() for k, v in parts.items()} for name, parts in module.compute(device).items()}
    else:
        cases = {name: {"value": value} for name, value in module.compute().items()}
    digests = {
        name: hashlib.sha256(b"".join(numpy.ascontiguousarray(parts[key]).tobytes() for key in sorted(parts)))
        for name, parts in cases.items()
    }
    numbers = {f"{name}|{key}": value for name, parts in cases.items() for key, value in parts.items()}
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}, numbers


def in_a_process(
    kind: str, device: str, folder: Path, python: Path | str = sys.executable
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The machine, digests and numbers, computed in a process of its own: other work in a process may change bits."""
    import numpy

    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "SEPSA_BACKEND": ""}
    command = [python, __file__, kind, "--device", device, "--into", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with numpy.load(folder / "numbers.npz") as numbers:
        told = json.loads((folder / "digests.json").read_text())
        return told["machine"], told["digests"], dict(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["heads", "stream"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--into", type=Path, help="a folder for the results, instead of recording them")
    options = parser.parse_args()
    digests, numbers = compute(options.kind, options.device)
    import numpy

    if options.into:
        told = {"machine": machine(options.device), "digests": digests}
        (options.into / "digests.json").write_text(json.dumps(told))
        numpy.savez(options.into / "numbers.npz", **numbers)
        return
    records = json.loads(DIGESTS.read_text()) if DIGESTS.is_file() else {}
    records.setdefault(options.kind, {})[machine(options.device)] = digests
    DIGESTS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    if options.kind == "heads" and options.device == "cpu":
        numpy.savez_compressed(HEADS, **numbers)


if __name__ == "__main__":
    main()
