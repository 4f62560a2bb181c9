"""Flower's clients learn heads that the server merges; one round equals central training, and a client is unlearned.

    python examples/engines/flower_clients.py

Each client has rows of its own, with another distribution, and sends what its head learned: a few kilobytes, no rows.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from sepsa.engines.flower import MergeDeltas, reply
from sepsa.engines.shards import as_rows, zero_head
from sepsa.heads import Delta

CLIENTS, FEATURES = 3, 5


def rows(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a client; clients differ in size and in the range of their features."""
    rng = np.random.default_rng(client)
    x = client + (1 + client) * rng.normal(size=(100 * (client + 1), FEATURES))
    return as_rows(x), as_rows(x @ np.arange(1, FEATURES + 1) + rng.normal(size=len(x)))


client_app = ClientApp()


@client_app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    head = zero_head(FEATURES, ridge=1e-3)
    head.update(*rows(int(context.node_config["partition-id"])))
    return reply(message, head)


server_app = ServerApp()


@server_app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    strategy = MergeDeltas(
        zero_head(FEATURES, ridge=1e-3), fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS
    )
    start = zero_head(FEATURES).linear
    assert start is not None
    strategy.start(grid=grid, initial_arrays=ArrayRecord(start.state_dict()), num_rounds=1)
    print(f"one round: {difference(strategy, range(CLIENTS)):.1e} from central training")
    assert difference(strategy, range(CLIENTS)) <= 1e-9
    (deltas,) = strategy.rounds
    smallest = min(deltas, key=lambda node: Delta.from_bytes(deltas[node]).samples)  # client 0
    strategy.unlearn(smallest)
    print(f"without client 0: {difference(strategy, range(1, CLIENTS)):.1e} from training without its rows")
    assert difference(strategy, range(1, CLIENTS)) <= 1e-9


def difference(strategy: MergeDeltas, clients: range) -> float:
    """Return the relative distance of the strategy's head from one that has learned all rows of these clients."""
    central = zero_head(FEATURES, ridge=1e-3)
    for client in clients:
        central.update(*rows(client))
    assert central.linear is not None
    assert strategy.head.linear is not None
    own, other = (torch.cat([h.weight[0], h.bias]).detach() for h in (strategy.head.linear, central.linear))
    return float(torch.linalg.vector_norm(own - other) / torch.linalg.vector_norm(other))


if __name__ == "__main__":
    run_simulation(
        server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
