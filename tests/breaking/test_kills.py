"""SIGKILL at random instants, in learning and in writing: what is resumed ends in the same bits as what was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from river_models import THERE

VICTIM = Path(__file__).with_name("victim.py")
KINDS = ["torch", "sklearn", "command", *(["river", "keyed"] if THERE else [])]


def kill(python, kinds, folder, kills, seed, rows):
    paths = os.pathsep.join([str(VICTIM.parents[1]), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LOKY_MAX_CPU_COUNT": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [python, str(VICTIM), ",".join(kinds), str(folder), str(kills), str(seed), str(rows)],
        env=environment, capture_output=True, text=True, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_killed_work_ends_in_the_same_bits(tmp_path, tally, preloaded_bin):
    for told in kill(preloaded_bin / "python", KINDS, tmp_path, kills=2, seed=1, rows=160):
        tally(f"SIGKILL, {told['kind']}", told["kills"], writing=told["while writing"])
        assert told["kills"] == 2


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_killed_a_hundred_times(kind, tmp_path, tally):
    (told,) = kill(sys.executable, [kind], tmp_path, kills=100, seed=2, rows=1500)
    tally(f"SIGKILL, {kind}", told["kills"], writing=told["while writing"])
    assert told["kills"] == 100
