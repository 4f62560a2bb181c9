"""Serve a learner over HTTP: one writer, many readers, regular checkpoints, a clean shutdown.

    python examples/serve.py model.sepsa 8000        # needs fastapi and uvicorn

POST /learn {"x": {"a": 1.0}, "y": 2.0} or /predict. SIGTERM saves; after a kill it restarts from the last checkpoint.
"""

import os
import sys
import threading
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from sepsa.checkpoint import inspect
from sepsa.river import SepSARegressor

PATH, PORT, EVERY = sys.argv[1], int(sys.argv[2]), 100  # samples between two checkpoints
writing = threading.Lock()  # one writer; readers need no lock and see the state before or after a sample
model, learned = SepSARegressor(seed=0), 0
if os.path.exists(PATH):
    model, learned = SepSARegressor.load(PATH), inspect(PATH).position


class Sample(BaseModel):
    x: dict[str, float | None]
    y: float | None = None


@asynccontextmanager
async def life(app: FastAPI):
    yield
    with writing:
        model.save(PATH, position=learned, keep=3)


app = FastAPI(lifespan=life)


@app.post("/predict")
def predict(sample: Sample) -> dict[str, float]:
    return {"y": model.predict_one(sample.x)}


@app.post("/learn")
def learn(sample: Sample) -> dict[str, int]:
    global learned
    try:
        with writing:
            model.learn_one(sample.x, sample.y)  # type: ignore[arg-type]  # it raises an error for None
            if (learned := learned + 1) % EVERY == 0:
                model.save(PATH, position=learned, keep=3)
            return {"learned": learned}
    except ValueError as error:  # it names the value and the cure, and nothing was learned
        raise HTTPException(422, str(error)) from None


uvicorn.run(app, port=PORT, log_level="warning")
