"""Work that saves as it goes and resumes where it was, killed at random instants until it is done.

`python victim.py KINDS FOLDER KILLS SEED ROWS` forks the work of each kind, kills it by SIGKILL, forks it again, so
often, and lets it finish; beside it the same work runs undisturbed. It fails where the two do not end in the same bits.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

import sepsa
from sepsa import checkpoint
from sepsa.states.file import read_path, view
from sepsa.states.tree import Tree

ROWS = int(sys.argv[5]) if __name__ == "__main__" else 1500
EVERY = 20


def table():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(ROWS, 4))
    return X, X @ np.arange(1.0, 5.0) + 0.1 * rng.normal(size=ROWS)


def learn_torch(folder, slow):
    torch.manual_seed(0)
    X, y = (torch.from_numpy(part).float() for part in table())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = sepsa.SepSA(model, torch.optim.Adam, lr=1e-3)
    optimizer.head_fraction = 0.5
    at, path = 0, folder / "model.sepsa"
    if path.exists():
        run = sepsa.load(path, into={"optimizer": optimizer})
        torch.set_rng_state(run["rng"])
        at = run["at"]
    while at < ROWS:
        optimizer.learn(X[at : at + 4], y[at : at + 4, None])
        at += 4
        if at % EVERY == 0:
            sepsa.save({"optimizer": optimizer, "rng": torch.get_rng_state(), "at": at}, path)
            time.sleep(slow)
    return 0


def learn_sklearn(folder, slow):
    X, y = table()
    path = folder / "model.sepsa"
    model, at = sepsa.SepSARegressor(random_state=0), 0
    if path.exists():
        model, at = sepsa.SepSARegressor.load(path), checkpoint.inspect(path).position
    while at < ROWS:
        model.partial_fit(X[at : at + 5], y[at : at + 5])
        at += 5
        if at % EVERY == 0:
            model.save(path, position=at)
            time.sleep(slow)
    return 0


def learn_river(folder, slow):
    from sepsa.river import SepSAClassifier

    X, y = table()
    path = folder / "model.sepsa"
    model, at = SepSAClassifier(seed=0), 0
    if path.exists():
        model, at = SepSAClassifier.load(path), checkpoint.inspect(path).position
    while at < ROWS:
        model.learn_one(dict(zip("abcd", X[at].tolist(), strict=True)), "up" if y[at] > 0 else "down")
        at += 1
        if at % EVERY == 0:
            model.save(path, position=at, keep=2)
            time.sleep(slow)
    return 0


def learn_keyed(folder, slow):
    """Learners by key, most of them in the file, where evicted ones lie before they are committed."""
    from sepsa.stream.keyed import KeyedLearner

    X, y = table()
    keys = np.random.default_rng(2).integers(12, size=ROWS)
    with KeyedLearner(sepsa.SepSARegressor(random_state=0), folder / "keyed.sqlite", in_memory=3) as keyed:
        for at in range(keyed.position or 0, ROWS, EVERY):
            some = slice(at, at + EVERY)
            keyed.prequential(keys[some], X[some], y[some])
            time.sleep(slow)
            keyed.commit(at + EVERY)
        sepsa.save({str(key): keyed[key].state_dict() for key in keyed}, folder / "model.sepsa")
    return 0


def learn_command(folder, slow):
    from sepsa.stream.tables import command, source

    source.CHUNK = 700  # some rows a block, so that there are many
    real = command.StreamRun.save

    def save(self):
        real(self)
        time.sleep(slow)

    command.StreamRun.save = save
    return command.stream(
        command.StreamOptions(
            folder.parent / "table.csv",
            target="y",
            predictions=folder / "out.csv",
            checkpoint=folder / "model.sepsa",
            quarantine=folder / "bad.csv",
            every=EVERY,
        )
    )


def write_table(path):
    """Numbers, texts, dates and rows that cannot be used."""
    X, y = table()
    rng = random.Random(0)
    lines = ["a,b,c,d,when,colour,y"]
    for i in range(ROWS):
        cells = [f"{v:.6f}" for v in X[i]]
        cells += [f"2026-01-{1 + i % 28:02d}", rng.choice(["red", "green", f"shade {i % 60}"]), f"{y[i]:.6f}"]
        if i % 97 == 5:
            cells = cells[: rng.randrange(1, 7)]
        elif i % 89 == 7:
            cells[-1] = rng.choice(["", "many", "1e999"])
        elif i % 71 == 3:
            cells[rng.randrange(4)] = ""
        lines.append(",".join(cells))
    path.write_text("\n".join(lines) + "\n")


KINDS = {
    "torch": learn_torch,
    "sklearn": learn_sklearn,
    "river": learn_river,
    "command": learn_command,
    "keyed": learn_keyed,
}


def fork(work, folder, slow):
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            code = work(folder, slow)
        finally:
            os._exit(code)
    return pid


def contents(folder):
    """All that the work has left: the state of the model, and the other files to the byte."""
    header, state = read_path(folder / "model.sepsa")
    tree = Tree()
    # Paths of other files are part of the position; their folders are not the same.
    told = tree.encode([header.kind, header.configuration, state], "state")
    position = header.position["table"] if isinstance(header.position, dict) else header.position
    arrays = [bytes(view(array)) for array in tree.tensors]
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.csv"))}
    return json.dumps(told), json.dumps(position), arrays, files


def torment(kind, place, kills, rng):
    """Kill the work so often, and compare its end with that of work that was left alone."""
    work = KINDS[kind]
    whole, killed, warm = place / "whole", place / "killed", place / "warm"
    for folder in (whole, killed, warm):
        folder.mkdir(parents=True)
    if kind == "command":
        write_table(place / "table.csv")
    work(warm, 0.0)  # so that no child has to load the compiled code again
    start = time.monotonic()
    assert os.waitpid(fork(work, whole, 0.0), 0)[1] == 0, "the undisturbed work failed"
    took = time.monotonic() - start
    done = unfinished = finished = 0
    left = set()  # temporary files that kills left
    while done < kills:
        pid = fork(work, killed, 0.002)  # slowed down so that some kills fit into one run
        time.sleep(rng.uniform(0.0, 0.8 * took + 0.1))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):  # it was done before: it begins anew
            assert status == 0, f"resumed work failed with {status}"
            finished += 1
            assert contents(killed) == contents(whole), "a run that was killed ended otherwise"
            for path in killed.iterdir():
                path.unlink()
            continue
        done += 1
        now = set(killed.glob("model.sepsa.*.tmp"))
        unfinished += bool(now - left)
        left |= now
        if (killed / "model.sepsa").exists():
            checkpoint.inspect(killed / "model.sepsa")  # whole, whatever the instant
    assert os.waitpid(fork(work, killed, 0.0), 0)[1] == 0, "the work that was resumed last failed"
    assert contents(killed) == contents(whole), "a run that was killed ended otherwise"
    assert not list(killed.glob("*.tmp")), "what a kill left is still there"
    return {"kills": done, "while writing": unfinished, "runs": finished + 1}


def main():
    kinds, place, kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    rng = random.Random(seed)
    for kind in kinds.split(","):
        print(json.dumps({"kind": kind, **torment(kind, place / kind, kills, rng)}), flush=True)


if __name__ == "__main__":
    main()
