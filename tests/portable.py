"""Run the numerical tests, the goldens and the pages under other arithmetic: a verdict that changes is no verdict.

    python tests/portable.py                       # everything, before a release: `make portable`
    python tests/portable.py --short               # a minute of it, for each change: .ci/run
    python tests/portable.py --only perturbed -- tests/heads -x    # one setting, with arguments of pytest

Another processor rounds differently because its libraries choose other kernels; each setting makes them choose others
here. `perturbed` changes the data instead: `pytest --perturb` multiplies what tests and pages draw at random by
1 + 1e-13 sin(1e7 x), and what they draw in float32 by 1 + 1e-7 sin(1e7 x), which is about one unit of the last digit.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
NUMERICAL = (
    "tests/test_goldens.py", "tests/test_docs.py", "tests/test_tutorials.py", "tests/test_examples.py",
    "tests/test_reference.py", "tests/benchmarks/test_prequential.py",
    *(f"tests/{room}" for room in (
        "engines", "forecast", "heads", "interfaces", "learner", "ranks", "reproduction", "shell", "states", "testing",
        "training",
    )),
)  # fmt: skip
# A golden, a page, and solvers of several kinds.
SHORT = (
    "tests/test_docs.py::test_the_code_on_a_page_prints_what_the_page_shows[docs/how-to/choose.md]",
    "tests/test_goldens.py", "tests/heads/test_exactness.py", "tests/heads/test_lbfgs.py",
    "tests/heads/test_logistic.py", "tests/reproduction/test_slimtik.py",
)  # fmt: skip

ARM = platform.machine() in ("aarch64", "arm64")
# OpenBLAS takes a name of its own architecture and ignores others.
OLDER, NEWER = ("ARMV8", "THUNDERX2T99") if ARM else ("Nehalem", "Haswell")
SETTINGS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "two threads": {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "torch default": {
        "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "DEFAULT" if ARM else "SSE41"
    },
    f"OpenBLAS {OLDER}": {"OPENBLAS_CORETYPE": OLDER},
    f"OpenBLAS {NEWER}": {"OPENBLAS_CORETYPE": NEWER},
    "perturbed": {},
}  # fmt: skip
SHORT_SETTINGS = (f"OpenBLAS {OLDER}", "perturbed")


def run(setting: str, arguments: list[str]) -> tuple[int, list[str]]:
    """Run pytest under a setting; return the number of tests that ran and the names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        if setting == "perturbed":
            command.append("--perturb")
        if setting == "torch default" and ARM:
            command += ["-k", "not inductor"]  # torch 2.13 writes C++ there that does not compile
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | SETTINGS[setting], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        if not report.exists():
            sys.exit(f"{setting}: pytest did not run\n{done.stdout}")
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if failed:
        print(done.stdout)
    return len(cases), failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few files and two settings")
    parser.add_argument("--only", choices=SETTINGS, action="append", help="this setting; several may be given")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest instead of the numerical tests")
    options = parser.parse_args()
    arguments = options.pytest or ["-n", "auto", "--dist", "worksteal", *(SHORT if options.short else NUMERICAL)]
    rows, names = [], set()
    for setting in options.only or (SHORT_SETTINGS if options.short else SETTINGS):
        began = time.monotonic()
        ran, failed = run(setting, arguments)
        rows.append(f"{setting:24} {ran:6,} tests {len(failed):4} failures {time.monotonic() - began:6.0f} s")
        names |= set(failed)
        print(rows[-1], flush=True)
    if len(rows) > 1:
        print("", *rows, sep="\n")
    if names:
        sys.exit("\n".join(["", "failed under at least one setting:", *sorted(names)]))


# ---------------------------------------------------------------------- the setting "perturbed"


def perturb() -> None:
    """Let generators that a test, a page or an example calls return numbers with other last digits.

    Here, and in Python processes that it starts and that call `perturb_as_told`.

    The change is a function of the number, so that equal draws stay equal. What the library draws stays as it is.
    """
    import numpy as np
    import torch

    os.environ["SEPSA_PERTURB"] = "1"

    def ours() -> bool:
        file = sys._getframe(2).f_code.co_filename
        return "site-packages" not in file and f"{os.sep}src{os.sep}" not in file

    class Generator(np.random.Generator):
        pass

    def drawing(method):
        def drawn(self, *args, **options):
            x = method(self, *args, **options)
            size = 1e-7 if getattr(x, "dtype", None) == np.float32 else 1e-13
            y = x * (1 + size * np.sin(1e7 * np.asarray(x, np.float64)))
            return y.astype(x.dtype) if isinstance(x, np.ndarray) else type(x)(y)

        return drawn

    for name in ("normal", "standard_normal", "random", "uniform", "exponential", "standard_t", "standard_cauchy"):
        setattr(Generator, name, drawing(getattr(np.random.Generator, name)))

    default_rng = np.random.default_rng

    @functools.wraps(default_rng)
    def perturbed_rng(*args, **options):
        made = default_rng(*args, **options)
        return Generator(made.bit_generator) if ours() else made

    np.random.default_rng = perturbed_rng

    def filling(function):
        def filled(*args, **options):
            x = function(*args, **options)
            if ours() and x.dtype in (torch.float32, torch.float64):
                size = 1e-7 if x.dtype == torch.float32 else 1e-13
                with torch.no_grad():
                    x.copy_(x.double() * (1 + size * torch.sin(1e7 * x.double())))
            return x

        return filled

    for name in ("randn", "rand", "randn_like", "rand_like"):
        setattr(torch, name, filling(getattr(torch, name)))


def perturb_as_told() -> None:
    """Do what the process that started this one does."""
    if "SEPSA_PERTURB" in os.environ:
        perturb()


if __name__ == "__main__":
    main()
