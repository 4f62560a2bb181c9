"""What the trees store: the last rows, the trees, and the tree in growth."""

from __future__ import annotations

import numpy as np

from sepsa.learner.experts.frame import alike, given
from sepsa.learner.memory.parts import Field, Part, Record, Rule, work
from sepsa.learner.memory.views import Group

TREES, FEWEST_TREES = 32, 16  # in a stream
LEAVES = 32
BINS = 64
INPUTS = 32  # at most, of a tree
SAMPLE = 1024  # latest values of each input, from which edges are drawn
RATE = 300  # in thousandths
TABLE_TREES, TABLE_RATE = 120, 150  # of `fit`, where each tree is grown once on all rows
NOWHERE = np.float32(2.0**99)  # an edge above all values, or a missing value
LEAST_ROOM = 512
MEMORY = 2**25  # bytes of rows at most, at one for each input and `ROW_BYTES`
ROW_BYTES = 48 + TREES

# What is done next: begin a tree, draw the edges of an input, take the residuals, count all rows, divide a leaf, count
# one of its parts, collect the value of a leaf, add it to the sums of its rows.
BEGIN, DRAW, RESIDUALS, ROOT, DIVIDE, COUNT, COLLECT, UPDATE = range(8)


def room_for(rows: int, inputs: int, most: int) -> int:
    """The room for a window of so many rows or more, but at most this many.

    A ninth of it is for rows that come while a tree is grown on the others.
    """
    most = min(most, max(MEMORY // (inputs + ROW_BYTES), LEAST_ROOM))
    length = min(max(1 << (rows - 1).bit_length() if rows else 0, LEAST_ROOM), most)
    return length + (length + 7) // 8


def window(room: int) -> int:
    """The rows on which a tree is grown at most."""
    return room * 8 // 9


def divides(part):
    """Whether the leaf that is divided, if one is, exists, and rows that went left are among its own."""
    growth = part("GROWTH")
    leaf, leaves = int(growth["leaf"]), int(growth["leaves"])
    if growth["phase"] not in (DIVIDE, COUNT):
        return True
    return leaf < leaves < LEAVES and bool(growth["left"] <= part("LEAF_ROWS")[leaf])


def cuts(part):
    """Whether the code at which a leaf is divided leaves rows for both sides, of those seen so far."""
    growth = part("GROWTH")
    if growth["phase"] != DIVIDE:
        return True
    return bool(part("LEAF_CUTS")[growth["leaf"]] % BINS < BINS - 1 and growth["left"] <= growth["cursor"])


def come_later(part):
    """Whether the splits below a split have larger numbers, so that a row reaches a leaf."""
    children = part("CHILDREN")
    return not ((children >= 0) & (children <= np.arange(LEAVES - 1)[:, None])).any()


GROWTH = Record(
    tree=Field(int, bounds=(0, "trees - 1")),  # the one that is grown anew
    trees=Field(int, bounds=(0, "trees")),  # how many there are
    phase=Field(int, start=BEGIN, bounds=(0, UPDATE), restarts=True),  # what is done next
    cursor=Field(int, bounds=(0, "room"), restarts=True),  # the next row of the pass
    random=Field(int, start=1),  # the state of the generator
    weight=float,  # the units of weights and of residuals in the histograms
    residual=float,
    rows=Field(int, bounds=(0, "room"), restarts=True),  # of the tree in growth, and the place of the first
    first=Field(int, bounds=(0, "room - 1")),
    leaves=Field(int, bounds=(0, LEAVES)),
    leaf=Field(int, bounds=(0, LEAVES)),  # that is divided or gets its value
    left=Field(int, bounds=(0, "room")),  # its rows that went left
    top=float,  # the gain of the first split
)
STORED = Record(
    rows=Field(int, bounds=(0, "room")),
    next=Field(int, bounds=(0, "room - 1")),  # the place of the next row
    late=Field(int, bounds=(0, "room"), restarts=True),  # rows since the tree in growth began
    ever=int,  # all that ever were
)
parts = Group(
    given,
    "trees",
    Part("GROWTH", GROWTH),
    Part("STORED", STORED),
    Part("CHOSEN", np.int64, ("tree_inputs",), bounds=(0, "inputs - 1")),
    Part("DIRECTION", float, ("outputs",)),
    Part("GAINS", float, ("inputs",)),  # recent gains of splits of each input
    Part("EDGES", np.float32, ("inputs", BINS - 2), start=NOWHERE),
    Part("DRAWN", float, ("inputs",)),  # the rows from which the edges were drawn
    Part("LATEST", np.float32, ("inputs", SAMPLE), start=NOWHERE),
    # 1 where an input was ever missing; else one that is missing counts as its mean
    Part("MISSED", np.uint8, ("inputs",)),
    Part("SPLIT_INPUTS", np.uint32, ("tree_slots", LEAVES - 1), bounds=(0, "inputs - 1")),
    Part("SPLIT_THRESHOLDS", np.float32, ("tree_slots", LEAVES - 1), start=NOWHERE),
    # a split, or -1 - a leaf
    Part("CHILDREN", np.int8, ("tree_slots", LEAVES - 1, 2), start=-1, bounds=(-LEAVES, LEAVES - 2)),
    Part("VALUES", float, ("tree_slots", LEAVES, "outputs")),
    Part("CUTS", np.uint8, (LEAVES - 1,), bounds=(0, BINS - 2)),  # the codes at which the tree in growth divides
    *alike("LEAF_STARTS LEAF_ROWS", np.int64, (LEAVES,), bounds=(0, "room")),
    Part("LEAF_CUTS", np.int64, (LEAVES,), bounds=(-1, "tree_cells - 1")),
    *alike("LEAF_GAINS LEAF_COUNTS", float, (LEAVES,)),
    Part("LEAF_ABOVE", np.int64, (LEAVES,), bounds=(-1, 2 * LEAVES - 3)),
    Part("HISTOGRAMS", np.int64, (LEAVES, "tree_inputs", BINS)),
    Part("CODES", np.uint8, ("inputs", "room"), bounds=(0, BINS - 1)),
    Part("TARGETS", np.float32, ("room", "outputs")),
    Part("WEIGHTS", np.float32, ("room",)),
    Part("SUMS", np.float32, ("room", "outputs")),
    Part("PACKED", np.int64, ("room",)),
    Part("ORDER", np.uint32, ("room",), bounds=(0, "room - 1")),
    Part("OTHERS", np.uint32, ("room",)),
    Part("LEAF_OF_ROW", np.uint8, ("trees", "room"), bounds=(0, LEAVES - 1)),
    work("LEAVES", np.int64, ("trees",)),
    work("TOLD", float, ("outputs",)),
    work("MERGED", float, (3, SAMPLE + BINS)),
    work("ASKED", np.float32, ("inputs",)),
    sizes={
        "tree_inputs": lambda sizes: min(sizes["inputs"], INPUTS),
        "tree_cells": lambda sizes: min(sizes["inputs"], INPUTS) * BINS,
        "fewest_trees": lambda sizes: FEWEST_TREES if sizes["trees"] == TREES else sizes["trees"],  # for a table all
    },
    rings={"room": "STORED"},
    rules=(
        Rule("CHILDREN", "splits that come later", come_later),
        Rule(
            "LEAF_ROWS",
            "rows among those stored",
            lambda part: bool((part("LEAF_STARTS") + part("LEAF_ROWS") <= part("WEIGHTS").size).all()),
        ),
        Rule("GROWTH", "a leaf that is divided", divides),
        Rule("LEAF_CUTS", "the code at which a leaf is divided", cuts),
    ),
)

# What the trees are, whose rows stay when they are removed, and what only the tree in growth needs.
GROWN = ("VALUES", "SUMS", "LEAF_OF_ROW", "SPLIT_INPUTS", "SPLIT_THRESHOLDS", "CHILDREN")
GROWING = ("HISTOGRAMS", "PACKED", "ORDER", "OTHERS", "GROWTH")
