"""examples/serve.py with a real client: many at once, a clean stop, and a kill."""

import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from sepsa.checkpoint import inspect
from sepsa.river import SepSARegressor

SERVE = Path(__file__).parents[1] / "examples" / "serve.py"
TOKEN = "of a test"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def served(path, programs):
    port = free_port()
    server = subprocess.Popen(
        [programs / "python", str(SERVE), str(path), str(port)],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "SEPSA_TOKEN": TOKEN},
    )  # fmt: skip
    try:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, headers=headers) as client:
            for _ in range(6000):
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


def test_a_served_learner_loses_nothing(tmp_path, preloaded_bin):
    path = tmp_path / "model.sepsa"
    with served(path, preloaded_bin) as (server, client):
        assert learn(client, range(320)) == list(range(1, 321))  # each counted once
        assert client.post("/predict", json={"x": {"a": 2.0, "b": 1.0}}).json()["y"] == pytest.approx(5, abs=0.5)
        refused = client.post("/learn", json={"x": {"a": 1.0}})
        assert refused.status_code == 422
        assert "y must be a finite number" in refused.json()["detail"]
        before = client.post("/predict", json={"x": {"a": 3.0, "b": 0.0}}).json()
        server.send_signal(signal.SIGTERM)
        assert server.wait(600) in (0, -signal.SIGTERM)  # uvicorn ends by the signal once all is shut down
    assert inspect(path).position == (320, {})
    with served(path, preloaded_bin) as (server, client):
        assert client.post("/predict", json={"x": {"a": 3.0, "b": 0.0}}).json() == before
        assert learn(client, range(320, 450))[-1] == 450
        server.kill()
        server.wait()
    assert inspect(path).position == (420, {})  # a hundred after the last save


def test_what_a_server_refuses_and_what_it_learns_once(tmp_path, preloaded_bin):
    path = tmp_path / "model.sepsa"
    in_the_way = tmp_path / "model.sepsa.lock"
    with served(path, preloaded_bin) as (_, client):
        for text, detail in (
            ('{"x": {"a": NaN}, "y": 1}', "a must be a finite number, or null where it is missing, got nan"),
            ('{"x": {"a": 1}, "y": Infinity}', "y must be a finite number, or null where it is missing, got inf"),
            ('{"x": {"a": "1e999"}, "y": 1}', "a must be a finite number, or null where it is missing, got inf"),
            ('{"x": NaN, "y": 1}', ["('body', 'x'): Input should be a valid dictionary"]),
        ):
            for route in ("/learn", "/predict"):
                refused = client.post(route, content=text, headers={"Content-Type": "application/json"})
                assert (refused.status_code, refused.json()["detail"]) == (422, detail)
        stranger = httpx.post(f"{client.base_url}/learn", json=sample(1), headers={"Authorization": "Bearer other"})
        assert stranger.status_code == 401
        connection = HTTPConnection(client.base_url.host, client.base_url.port)  # a body would come after the answer
        connection.request("POST", "/learn", headers={**client.headers, "Content-Length": "100001"})
        assert connection.getresponse().status == 413
        connection.close()
        assert client.post("/learn", content=iter([b"{", b"}"])).status_code == 413  # of unknown length
        learn(client, range(99))
        in_the_way.write_text("so that no checkpoint can be written")
        last = {"json": sample(99), "headers": {"Idempotency-Key": "the hundredth"}}
        for _ in range(2):
            failed = client.post("/learn", **last)
            assert failed.status_code == 503
            assert "done and not saved" in failed.json()["detail"]
        in_the_way.unlink()
        for _ in range(2):
            assert client.post("/learn", **last).json() == {"learned": 100}
        assert inspect(path).position == (100, {"the hundredth": 100})
    with served(path, preloaded_bin) as (_, client):  # the checkpoint has the key
        assert client.post("/learn", **last).json() == {"learned": 100}
        assert client.post("/learn", json=sample(100)).json() == {"learned": 101}


def test_a_client_whose_body_is_refused_before_it_is_read_sees_why(tmp_path, preloaded_bin):
    with served(tmp_path / "model.sepsa", preloaded_bin) as (_, client):
        large, host, port = b"x" * 20_000_000, client.base_url.host, client.base_url.port
        for body, authorization, status in (
            (large, client.headers["authorization"], 413),
            (iter([large[:1000], large]), client.headers["authorization"], 413),
            (large, "Bearer other", 401),
        ):
            for last in ({"Connection": "close"}, {}):
                connection = HTTPConnection(host, port, timeout=60)
                connection.request("POST", "/learn", body, {"Authorization": authorization, **last})
                answer = connection.getresponse()
                assert answer.status == status
                assert answer.read().startswith(b'{"detail": "')
                connection.close()
                body = large
        assert learn(client, range(10)) == list(range(1, 11))


def test_targets_come_later_by_identifier(tmp_path, preloaded_bin):
    path = tmp_path / "model.sepsa"
    with served(path, preloaded_bin) as (server, client):
        asked = [client.post("/predict", json={"x": sample(i)["x"], "id": f"order {i}"}) for i in range(105)]
        assert {answer.status_code for answer in asked} == {200}
        server.kill()
        server.wait()
    with served(path, preloaded_bin) as (server, client):  # the checkpoint has the first hundred
        told = [client.post("/learn", json={"id": f"order {i}", "y": sample(i)["y"]}) for i in range(105)]
        assert [answer.status_code for answer in told] == [200] * 100 + [422] * 5
        assert told[-1].json()["detail"].startswith("id 'order 104' is not open: ")
        told = [client.post("/learn", json=sample(i)) for i in range(100, 105)]  # with x instead, in order
        assert told[-1].json() == {"learned": 105}
        assert client.post("/predict", json={"x": {"a": 2.0}, "id": "again"}).status_code == 200
        twice = client.post("/predict", json={"x": {"a": 3.0}, "id": "again"})
        assert twice.status_code == 422
        assert "id 'again' is open for another sample" in twice.json()["detail"]
        later = client.post("/predict", json={"x": {"a": 2.0, "b": 1.0}}).json()
        assert client.post("/predict", json={}).status_code == 422
        assert client.post("/learn", json={"y": 1.0}).status_code == 422
    at_once = SepSARegressor(seed=0)
    for i in range(105):
        at_once.learn_one(*sample(i).values())
    assert later["y"] == at_once.predict_one({"a": 2.0, "b": 1.0})


def test_a_server_without_a_token_does_not_start(tmp_path, preloaded_bin):
    environment = {name: value for name, value in os.environ.items() if name != "SEPSA_TOKEN"}
    command = [preloaded_bin / "python", str(SERVE), str(tmp_path / "m"), "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "SEPSA_TOKEN must hold the token that clients send, got nothing\n"
