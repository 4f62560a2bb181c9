"""Work that saves as it goes and resumes where it was, killed at random instants until it is done.

`python victim.py KINDS FOLDER KILLS SEED ROWS` forks the work of each kind, kills it by SIGKILL, forks it again, so
often, and lets it finish; beside it the same work runs undisturbed. It fails where the two do not end in the same bits.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from breaking.damage import same
from learners import CASES, Command, River
from sepsa import checkpoint
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.shell import command, source

KINDS = {
    "torch": "sepsa-run.sepsa",
    "sklearn": "regressor.sepsa",
    "river": "river-classifier.sepsa",
    "command": "stream.sepsa",
    "keyed": "keyed.sqlite",
}
EVERY = 20


def learn(kind, folder, rows, slow):
    """Learn from the last checkpoint of the folder to the last row; sleep `slow` seconds after each checkpoint."""
    path = folder / "model.sepsa"
    if isinstance(kind, Command):
        real, source.CHUNK = command.StreamRun.save, 700  # some rows a block, so that there are many

        def save(self):
            real(self)
            time.sleep(slow)

        command.StreamRun.save, kind.options = save, kind.options | {"save_every": EVERY}
        kind.learn(path, 0, rows)
    elif isinstance(kind, River) and kind.keys:
        with KeyedLearner(River(kind.kind, kind.options).make(), path, in_memory=1) as model:
            for at in range(model.position or 0, rows, EVERY):
                kind.learn(model, at, at + EVERY)
                time.sleep(slow)
    else:
        model, at = (kind.load(path), checkpoint.inspect(path).position) if path.exists() else (kind.make(), 0)
        for start in range(at, rows, EVERY):
            kind.learn(model, start, start + EVERY)
            kind.save(model, path, position=start + EVERY)
            time.sleep(slow)


def fork(*arguments):
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            learn(*arguments)
            code = 0
        finally:
            os._exit(code)
    return pid


def contents(kind, folder):
    """All that the work has left: the state of the model, and for the command its position and its files."""
    model = kind.load(folder / "model.sepsa")
    state = kind.state(model)
    if isinstance(model, KeyedLearner):
        model.close()
    return state


def torment(kind, place, kills, rows, rng):
    """Kill the work so often, and compare its end with that of work that was left alone."""
    whole, killed, warm = place / "whole", place / "killed", place / "warm"
    for folder in (whole, killed, warm):
        folder.mkdir(parents=True)
    learn(kind, warm, rows, 0.0)  # so that no child has to load the compiled code again
    start = time.monotonic()
    assert os.waitpid(fork(kind, whole, rows, 0.0), 0)[1] == 0, "the undisturbed work failed"
    took = time.monotonic() - start
    done = unfinished = finished = 0
    left = set()  # temporary files that kills left
    while done < kills:
        pid = fork(kind, killed, rows, 0.002)  # slowed down so that some kills fit into one run
        time.sleep(rng.uniform(0.0, 0.8 * took + 0.1))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):  # it was done before: it begins anew
            assert status == 0, f"resumed work failed with {status}"
            finished += 1
            assert same(contents(kind, killed), contents(kind, whole)), "a run that was killed ended otherwise"
            for path in killed.iterdir():
                path.unlink()
            continue
        done += 1
        now = set(killed.glob("model.sepsa.*.tmp"))
        unfinished += bool(now - left)
        left |= now
        if (killed / "model.sepsa").exists() and not getattr(kind, "keys", 0):
            checkpoint.inspect(killed / "model.sepsa")  # whole, whatever the instant
    assert os.waitpid(fork(kind, killed, rows, 0.0), 0)[1] == 0, "the work that was resumed last failed"
    assert same(contents(kind, killed), contents(kind, whole)), "a run that was killed ended otherwise"
    assert not list(killed.glob("*.tmp")), "what a kill left is still there"
    return {"kills": done, "while writing": unfinished, "runs": finished + 1}


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds, place, kills, seed, rows = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    for name in kinds.split(","):
        told = torment(CASES[KINDS[name]], place / name, kills, rows, random.Random(seed))
        print(json.dumps({"kind": name, **told}), flush=True)
