"""Builds the library of compiled kernels where the package is built, and names the platform of the wheel that holds it.

`SEPSA_KERNELS=0`, a processor or system without a library, and a machine without a C compiler make a wheel for any
platform, whose kernels are compiled by numba.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NUMBA = ["numba==0.68.*", "numpy>=2.0"]  # the release with which the builder was tested
SOURCE = Path(__file__).parent / "src"
PLATFORMS = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")}


def hindrance() -> str:
    """Why no library is built here; empty where one is."""
    if os.environ.get("SEPSA_KERNELS") == "0":
        return "SEPSA_KERNELS is 0"
    system, machine = platform.system(), platform.machine()
    if (system, machine) not in PLATFORMS or sys.implementation.name != "cpython" or sys.version_info >= (3, 15):
        return f"there is none for {platform.python_implementation()} {platform.python_version()} on {system} {machine}"
    if shutil.which(os.environ.get("CC", "cc")) is None:
        return "there is no C compiler: install one, or set CC"
    return ""


def present() -> Path | None:
    """The library of these sources that is there already."""
    sys.path.insert(0, str(SOURCE))
    try:
        from sepsa.compiled import library
    finally:
        sys.path.pop(0)
    return library.find()[0]


def tag(file: Path) -> str:
    """The tag of a wheel that holds this library: of the least glibc that has all that it needs."""
    name = re.sub(r"[-.]", "_", sysconfig.get_platform())
    if platform.system() != "Linux":
        return f"py3-none-{name}"
    needs = subprocess.run(["nm", "-D", "-u", file], capture_output=True, text=True, check=True).stdout
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"@GLIBC_(\d+)\.(\d+)", needs)]
    major, minor = max(versions, default=(0, 0))
    return f"py3-none-manylinux_{major}_{minor}_{platform.machine()}" if versions else f"py3-none-{name}"


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc]
    """The hook of hatchling."""

    def dependencies(self) -> list[str]:
        return [] if hindrance() or present() else NUMBA

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if why := hindrance():
            self.app.display_warning(f"the wheel holds no library of compiled kernels: {why}")
            return
        if present() is None:
            environment = os.environ | {"PYTHONPATH": str(SOURCE)}
            subprocess.run([sys.executable, "-m", "sepsa.compiled.build"], check=True, env=environment)
        file = present()
        if file is None:
            raise RuntimeError(
                "the library of compiled kernels that was just built is not found: remove src/sepsa/compiled/*.so"
            )
        build_data |= {"pure_python": False, "tag": tag(file)}
        build_data["artifacts"].append(f"/src/sepsa/compiled/{file.name}")
