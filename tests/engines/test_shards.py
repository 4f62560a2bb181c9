"""Tables in shards: deltas of parts merge to the head of one process, whatever the parts are."""

import subprocess
from functools import partial

import numpy as np
import torch

from sepsa.engines.shards import as_rows, learned, merged, zero_head

new_head = partial(zero_head, 3, 2, ridge=0.1)


def test_parts_of_any_size_merge_to_the_head_of_one_process():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), rng.normal(size=(60, 2))
    parts = [slice(0, 0), slice(0, 1), slice(1, 50), slice(50, 60)]
    together = merged(new_head(), [learned(new_head, [(x[part], y[part])]) for part in parts])
    alone = merged(new_head(), [learned(new_head, [(x, y)])])
    for own, other in zip(together.linear.parameters(), alone.linear.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
    assert together.samples == alone.samples == 60


def test_arrays_that_are_read_only_or_reversed_are_copied_and_a_vector_of_targets_is_one_column():
    values = np.arange(6.0).reshape(2, 3)
    values.flags.writeable = False
    assert as_rows(values).tolist() == values.tolist()
    assert as_rows(values[::-1]).tolist() == values[::-1].tolist()
    new = partial(zero_head, 3)
    heads = [merged(new(), [learned(new, [(values, targets)])]) for targets in (np.ones(2), np.ones((2, 1)))]
    assert torch.equal(heads[0].linear.weight, heads[1].linear.weight)


def test_no_engine_is_imported_unless_its_function_is_called(preloaded_bin):
    code = """
import sys
import sepsa.engines.kafka, sepsa.engines.ray, sepsa.engines.spark
print(sorted({"confluent_kafka", "flwr", "pyspark", "ray"} & set(sys.modules)))
"""
    done = subprocess.run([preloaded_bin / "python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
