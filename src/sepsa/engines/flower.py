"""Flower: a strategy that merges what clients have learned, instead of averaging their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from sepsa.engines.shards import merged
from sepsa.heads import RLS

KEY = "sepsa.delta"


def reply(message: Message, head: RLS) -> Message:
    """Return a client's answer to a training message: what its head has learned since `bind`.

    In a later round the client sends what is new: let a new head learn the rows that came since the last round.

    Args:
        message: The training message.
        head: An `RLS` that started from the weights and the ridge of the strategy's head.

    Returns:
        The reply, for `MergeDeltas`.
    """
    delta = ConfigRecord({KEY: head.delta_since().to_bytes()})
    return Message(content=RecordDict({KEY: delta}), reply_to=message)


def _sent(message: Message) -> bytes:
    """The delta in the answer of a client."""
    try:
        return bytes(message.content[KEY][KEY])
    except KeyError:
        node = message.metadata.src_node_id
        raise ValueError(
            f"the answer of node {node} has no delta: let its client return `reply(message, head)`"
        ) from None


class MergeDeltas(FedAvg):  # type: ignore[misc]
    """A Flower strategy whose head, after each round, is ridge regression on the rows of all clients so far.

    Choose it for a linear model, or for a linear head on features that all clients compute in the same way: one round
    equals central training, for clients of any sizes and distributions. Clients answer by `reply`.

    Args:
        head: An `RLS` at forgetting 1 with the weights and the ridge from which every client starts, such as
            `sepsa.engines.shards.zero_head`.
        rounds: The attribute `rounds` of an earlier run, to continue it with the same bits.
        **options: Arguments of Flower's `FedAvg`, which selects the clients.

    Attributes:
        head: The head that has merged all rounds.
        rounds: The deltas of each round by node, which `unlearn` needs; save them after a round.
    """

    def __init__(self, head: RLS, *, rounds: Iterable[Mapping[int, bytes]] = (), **options: Any) -> None:
        super().__init__(**options)
        self._start = head
        self.rounds = [dict(deltas) for deltas in rounds]
        self.head = self._merged(copy.deepcopy(head), self.rounds)

    @staticmethod
    def _merged(head: RLS, rounds: Iterable[Mapping[int, bytes]]) -> RLS:
        """The head, after it has merged these rounds, each in the order of the nodes."""
        for deltas in rounds:
            for node in sorted(deltas):
                try:
                    merged(head, [deltas[node]])
                except ValueError as error:
                    raise ValueError(f"the delta of node {node} cannot be merged: {error}") from error
        return head

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the deltas of a round. A delta that does not fit is an error that names its node, and nothing is
        merged.

        Args:
            server_round: Number of the round.
            replies: The clients' replies.

        Returns:
            The head's weights and the number of samples, as Flower's records.
        """
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        deltas = {message.metadata.src_node_id: _sent(message) for message in valid}
        self.head = self._merged(copy.deepcopy(self.head), [deltas])
        self.rounds.append(deltas)
        assert self.head.linear is not None
        return ArrayRecord(self.head.linear.state_dict()), MetricRecord({"samples": self.head.samples})

    def unlearn(self, node: int) -> None:
        """Remove everything that a client has sent: the head is then that of the other clients.

        Args:
            node: The client's node id.
        """
        known = sorted({known for deltas in self.rounds for known in deltas})
        if node not in known:
            raise ValueError(f"node must be one of {known}, which have sent deltas, got {node}")
        rest = [{other: data for other, data in deltas.items() if other != node} for deltas in self.rounds]
        self.head, self.rounds = self._merged(copy.deepcopy(self._start), rest), rest
