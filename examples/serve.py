"""Serve a learner over HTTP: one writer, many readers, regular checkpoints, a clean shutdown.

    SEPSA_TOKEN=secret python examples/serve.py model.sepsa 8000        # needs fastapi and uvicorn

POST /learn {"x": {"a": 1.0}, "y": 2.0} or /predict, with "Authorization: Bearer secret". Where the target comes later,
/predict {"x": {"a": 1.0}, "id": "order 7"}, and then /learn {"id": "order 7", "y": 2.0}. SIGTERM saves; after a kill it
restarts from the last checkpoint: an id that came after it is not open, and 422 says so; send x with y then. A /learn
with an Idempotency-Key is learned once, however often it is sent: answers 413 and 422 have learned nothing, and after
503, a failed save, or no answer at all, send it again with the same key.
"""

import asyncio
import hmac
import json
import math
import os
import sys
import threading
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from sepsa.checkpoint import CheckpointError, inspect
from sepsa.river import Delayed, SepSARegressor

PATH, PORT, EVERY = sys.argv[1], int(sys.argv[2]), 100  # samples and new ids between two checkpoints
TOKEN = os.environ.get("SEPSA_TOKEN") or sys.exit("SEPSA_TOKEN must hold the token that clients send, got nothing")
LONGEST, KEYS = 100_000, 1000  # bytes of a request; the last keys, which a checkpoint holds too
PATIENCE = 20  # seconds in which a client that is refused may send the rest
writing = threading.Lock()  # one writer; readers need no lock: each answer is of the state before or after a sample
model, keys, learned, unsaved = Delayed(SepSARegressor(seed=0)), {}, 0, 0
if os.path.exists(PATH):
    model, (learned, keys) = Delayed.load(PATH), inspect(PATH).position


class Sample(BaseModel):
    x: dict[str, float | None] | None = None
    y: float | None = None
    id: str | None = None


def save() -> None:
    global unsaved
    model.save(PATH, position=(learned, keys))
    unsaved = 0


def save_if_due() -> None:
    if unsaved >= EVERY:
        try:
            save()
        except (OSError, CheckpointError) as error:
            raise HTTPException(503, f"done and not saved: {error}") from None


@asynccontextmanager
async def life(app: FastAPI):
    yield
    with writing:
        save()


app = FastAPI(lifespan=life)


class Guard:
    """Answers 401 and 413 at once, and reads on without keeping it: a client that still sends would lose the answer."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or not (refused := refusal(Request(scope))):
            await self.app(scope, receive, send)
            return
        status, detail = refused
        answer = json.dumps({"detail": detail}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(answer)), "connection": "close"}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": answer, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body"})


def refusal(request: Request) -> tuple[int, str] | None:
    """Why a request is refused before its body is read."""
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {TOKEN}".encode()):
        return 401, "send the header Authorization: Bearer TOKEN"
    if request.method == "POST" and int(request.headers.get("content-length", LONGEST + 1)) > LONGEST:
        return 413, f"a request must have a Content-Length of at most {LONGEST}"
    return None


app.add_middleware(Guard)


@app.exception_handler(RequestValidationError)  # FastAPI's own answer repeats the input, which fails for NaN
async def refuse(request: Request, error: RequestValidationError):
    return JSONResponse({"detail": [f"{one['loc']}: {one['msg']}" for one in error.errors()]}, 422)


def check(sample: Sample) -> None:
    for name, value in [*(sample.x or {}).items(), ("y", sample.y)]:
        if value is not None and not math.isfinite(value):
            raise HTTPException(422, f"{name} must be a finite number, or null where it is missing, got {value}")


@app.post("/predict")
def predict(sample: Sample) -> dict[str, float]:
    global unsaved
    check(sample)
    if sample.x is None:
        raise HTTPException(422, "x must be a dict of features, got null")
    if sample.id is None:
        return {"y": model.predict_one(sample.x)}
    with writing:
        try:
            answer = {"y": model.predict_one(sample.x, id=sample.id)}
        except ValueError as error:  # the id is open for another sample
            raise HTTPException(422, str(error)) from None
        unsaved += 1
        save_if_due()
        return answer


@app.post("/learn")
def learn(sample: Sample, idempotency_key: str | None = Header(None)) -> dict[str, int]:
    global learned, unsaved
    check(sample)
    with writing:
        if idempotency_key is None or idempotency_key not in keys:
            try:
                given = () if sample.x is None and sample.id is not None else (sample.x,)
                model.learn_one(*given, y=sample.y, id=sample.id)
            except (TypeError, ValueError) as error:  # it names the value and the cure, and nothing was learned
                raise HTTPException(422, str(error)) from None
            learned, unsaved = learned + 1, unsaved + 1
            if idempotency_key is not None:
                keys[idempotency_key] = learned
                if len(keys) > KEYS:
                    del keys[next(iter(keys))]
        save_if_due()
        return {"learned": keys.get(idempotency_key, learned)}


uvicorn.run(app, port=PORT, log_level="warning")
