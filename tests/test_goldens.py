"""Bits and numbers against the goldens: see tests/goldens/record.py for what they are and how to record them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent / "goldens"
SPEC = importlib.util.spec_from_file_location("golden_record", FOLDER / "record.py")
record = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(record)


def test_heads_have_the_bits_and_the_numbers_of_the_record(tmp_path, preloaded_bin):
    machine, digests, numbers = record.in_a_process("heads", "cpu", tmp_path, preloaded_bin / "python")
    with np.load(record.HEADS) as known:
        assert set(known) == set(numbers)
        for name, value in numbers.items():
            np.testing.assert_allclose(value, known[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert_bits("heads", machine, digests)


def test_streams_have_the_bits_of_the_record(tmp_path, preloaded_bin):
    machine, digests, _ = record.in_a_process("stream", "cpu", tmp_path, preloaded_bin / "python")
    known = json.loads(record.DIGESTS.read_text())["stream"]
    assert all(set(digests) == set(cases) for cases in known.values())
    assert_bits("stream", machine, digests)


def assert_bits(kind, machine, digests):
    """Bits are compared on a machine that has a record; on another, what was compared before is all that can be."""
    known = json.loads(record.DIGESTS.read_text())[kind].get(machine)
    if known is None:
        pytest.skip(f"no record of bits for {machine}: python tests/goldens/record.py {kind} makes one")
    changed = [name for name in known if digests.get(name) != known[name]]
    assert not changed, f"other bits than recorded: {changed}"
