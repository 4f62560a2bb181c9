"""Flower: a round equals central training, a client is unlearned to the last bit, and a server continues with them."""

import numpy as np
import pytest
import torch

import sepsa
from sepsa.engines.shards import as_rows, merged, zero_head

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'sepsa[flower]'")

from flwr.app import Error, Message, RecordDict

from sepsa.engines.flower import MergeDeltas, reply


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """The identity of a running server, without which Flower makes no messages."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def rows(node, number):
    rng = np.random.default_rng([node, number])
    x = node * (1 + rng.normal(size=(20 * node, 4)))
    return as_rows(x), as_rows(x @ [1.0, -2.0, 3.0, 0.5] + rng.normal(size=len(x)))


def answer(node, number, ridge=0.1):
    """The answer of a node's client to the message of a round."""
    head = zero_head(4, ridge=ridge)
    head.update(*rows(node, number))
    return reply(Message(RecordDict(), dst_node_id=node, message_type="train"), head)


def strategy(nodes, **options):
    made = MergeDeltas(zero_head(4, ridge=0.1), **options)
    for number in (1, 2):
        made.aggregate_train(number, [answer(node, number) for node in nodes])
    return made


def weights(made):
    return torch.cat([made.head.linear.weight[0], made.head.linear.bias]).detach()


def test_rounds_equal_central_training():
    central = zero_head(4, ridge=0.1)
    for number in (1, 2):
        for node in (1, 2, 3):
            central.update(*rows(node, number))
    made = strategy([3, 1, 2])
    expected = torch.cat([central.linear.weight[0], central.linear.bias]).detach()
    torch.testing.assert_close(weights(made), expected, rtol=1e-9, atol=1e-12)
    assert made.head.samples == central.samples == 240


def test_the_order_of_arrival_changes_no_bit():
    assert torch.equal(weights(strategy([1, 2, 3])), weights(strategy([3, 2, 1])))


def test_an_unlearned_client_leaves_the_bits_of_a_server_that_never_saw_it():
    made = strategy([1, 2, 3])
    with pytest.raises(ValueError, match=r"node must be one of \[1, 2, 3\], which have sent deltas, got 4"):
        made.unlearn(4)
    made.unlearn(2)
    assert torch.equal(weights(made), weights(strategy([1, 3])))
    assert made.head.samples == 160


def test_a_server_that_starts_again_continues_with_the_same_bits(tmp_path):
    made = strategy([1, 2])
    sepsa.save({"rounds": made.rounds}, tmp_path / "server")
    again = MergeDeltas(zero_head(4, ridge=0.1), rounds=sepsa.load(tmp_path / "server")["rounds"])
    last = answer(3, 3)
    for one in (made, again):
        one.aggregate_train(3, [last])
    assert torch.equal(weights(again), weights(made))
    assert again.rounds == made.rounds


def test_a_client_that_fails_is_left_out_and_one_that_does_not_fit_is_named():
    made = strategy([1])
    before = weights(made)
    with pytest.raises(ValueError, match="the delta of node 3 cannot be merged: other must have started from the same"):
        made.aggregate_train(3, [answer(2, 3), answer(3, 3, ridge=7.0)])
    assert torch.equal(weights(made), before)
    assert len(made.rounds) == 2
    empty = Message(RecordDict(), reply_to=Message(RecordDict(), dst_node_id=4, message_type="train"))
    with pytest.raises(ValueError, match="the answer of node 4 has no delta: let its client return"):
        made.aggregate_train(3, [answer(2, 3), empty])
    assert len(made.rounds) == 2
    failed = Message(
        Error(code=0, reason="killed"), reply_to=Message(RecordDict(), dst_node_id=3, message_type="train")
    )
    made.aggregate_train(3, [answer(2, 3), failed])
    assert set(made.rounds[-1]) == {2}
    expected = merged(strategy([1]).head, [answer(2, 3).content["sepsa.delta"]["sepsa.delta"]])
    assert torch.equal(weights(made)[:-1], expected.linear.weight.detach()[0])
