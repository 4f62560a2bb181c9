"""SIGKILL at random instants, in learning and in writing: what is resumed ends in the same bits as what was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VICTIM = Path(__file__).with_name("victim.py")
KINDS = ["torch", "sklearn", "river", "command"]


def kill(kind, folder, kills, seed):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(VICTIM), kind, str(folder), str(kills), str(seed)],
        env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_killed_work_ends_in_the_same_bits(kind, tmp_path, tally):
    told = kill(kind, tmp_path, kills=6, seed=1)
    tally("SIGKILL", told["kills"], writing=told["while writing"])
    assert told["kills"] == 6


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_killed_a_hundred_times(kind, tmp_path, tally):
    told = kill(kind, tmp_path, kills=100, seed=2)
    tally("SIGKILL", told["kills"], writing=told["while writing"])
    assert told["kills"] == 100
