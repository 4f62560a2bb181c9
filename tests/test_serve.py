"""examples/serve.py with a real client: many at once, a clean stop, and a kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from sepsa.checkpoint import inspect

SERVE = Path(__file__).parents[1] / "examples" / "serve.py"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def served(path):
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, str(SERVE), str(path), str(port)],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(600):
                try:
                    client.get("/openapi.json")
                    break
                except httpx.TransportError:
                    assert server.poll() is None, server.stderr.read()
                    time.sleep(0.1)
            yield server, client
    finally:
        if server.poll() is None:
            server.kill()
        server.wait()
        server.stderr.close()


def sample(i):
    x = {"a": (i % 17) / 4, "b": float(i % 5)}
    return {"x": x, "y": 3 * x["a"] - x["b"]}


def learn(client, numbers):
    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(lambda i: client.post("/learn", json=sample(i)), numbers))
    assert all(answer.status_code == 200 for answer in told)
    return sorted(answer.json()["learned"] for answer in told)


def test_a_served_learner_loses_nothing(tmp_path):
    path = tmp_path / "model.sepsa"
    with served(path) as (server, client):
        assert learn(client, range(320)) == list(range(1, 321))  # each counted once
        assert client.post("/predict", json={"x": {"a": 2.0, "b": 1.0}}).json()["y"] == pytest.approx(5, abs=0.5)
        refused = client.post("/learn", json={"x": {"a": 1.0}})
        assert refused.status_code == 422
        assert "y must be a finite number" in refused.json()["detail"]
        before = client.post("/predict", json={"x": {"a": 3.0, "b": 0.0}}).json()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) in (0, -signal.SIGTERM)  # uvicorn ends by the signal once all is shut down
    assert inspect(path).position == 320
    with served(path) as (server, client):
        assert client.post("/predict", json={"x": {"a": 3.0, "b": 0.0}}).json() == before
        assert learn(client, range(320, 450))[-1] == 450
        server.kill()
        server.wait()
    assert inspect(path).position == 400
