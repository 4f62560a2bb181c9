"""Saved states of the compiled engine, by the names of experts and parts.

What is saved of a part, and what is checked, follows
from its declaration (`sepsa.learner.memory.memory`). Growth is here as well: it reads one state and writes another.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sepsa.learner.engine.core import EngineState, Form, body_weights, started
from sepsa.learner.experts import EXPERTS, trees
from sepsa.learner.experts.tree_parts import room_for, window
from sepsa.learner.memory.memory import shapes_of
from sepsa.learner.options import ACTIVATIONS
from sepsa.states import schema


def settings(core: EngineState) -> dict[str, Any]:
    """The network's form and the options of learning, which a state that is loaded must share."""
    form, own = core.form, core.form.settings
    return {
        "hidden": list(form.hidden),
        "heads": form.heads,
        "loss": "huber" if own["robust"] else "squared",
        "classes": bool(own["classes"]),
        "activation": next(name for name, code in ACTIVATIONS.items() if code == own["activation"]),
        "standardize": bool(own["standardize"]),
        "batch": own["batch"],
        "options": list(core.options.item()),
        "experts": core.names,
    }


def state_dict(core: EngineState) -> dict[str, Any]:
    """The state as plain data: that of the network, of its heads, of the other experts and of their mixture."""
    return {
        "settings": settings(core),
        "inputs": core.form.inputs,
        "outputs": core.form.outputs,
        "parts": core.memory.state_dict(),
        "generator": core.rng.bit_generator.state,
    }


def loaded(core: EngineState, state: Any, entry: str) -> EngineState:
    """An engine like this one in a saved state; a ValueError names the wrong entry."""
    new = schema.read(entry, state, {"settings", "inputs", "outputs", "parts", "generator"})
    wanted = settings(core)
    own = new.entries("settings", set(wanted))
    for name, value in wanted.items():
        own.equal(name, value)
    form = core.form.with_settings(**sizes_of(new["parts"], new.path("parts")))
    other = core.of_form(form._replace(inputs=new["inputs"], outputs=new["outputs"]))
    other.memory.load_state_dict(new["parts"], new.path("parts"))
    other.rng.bit_generator.state = new["generator"]
    return other


def sizes_of(states: Any, entry: str) -> dict[str, int]:
    """The number of saved trees, and the rows for which they have room."""
    if "trees" not in states:
        return {}
    shapes = shapes_of(trees.EXPERT.group, schema.Entries(f"{entry}['trees']", states["trees"]))
    return dict(zip(("trees", "room"), shapes["LEAF_OF_ROW"][0], strict=True))


# ---------------------------------------------------------------------- pickles


def pickled(core: EngineState) -> dict[str, Any]:
    """What a pickle holds: what makes an engine of the same form, and its state."""
    form = core.form._asdict() | {"table": [expert.name for expert in core.form.table]}
    return {"form": form, "options": core.options, "state": state_dict(core)}


def unpickled(state: dict[str, Any]) -> EngineState:
    """The engine of which `pickled` returned this; a pickle of another development version is refused."""
    new = schema.read("the pickle", state, {"form", "options", "state"})
    form = dict(new.entries("form", set(Form._fields)).values)
    form["table"] = tuple(expert for expert in EXPERTS if expert.name in form["table"])
    return loaded(started(Form(**form), new["options"], np.random.default_rng()), new["state"], "the pickle")


# ---------------------------------------------------------------------- growth


def grown(core: EngineState, inputs: int, outputs: int) -> EngineState:
    """The engine with more inputs or outputs, which were zero in all rows so far; a tree in growth begins anew."""
    form = core.form._replace(inputs=inputs, outputs=outputs)
    if form.mixed:  # the same room, or less where memory is limited
        most = room_for(form.most_rows, inputs, form.most_rows)
        form = form.with_settings(room=min(form.settings["room"], most))
    other = core.of_form(form)
    other.memory.grow(core.memory)
    width = sum(form.hidden[:1])
    cut, end = core.form.inputs * width, inputs * width  # the first layer's weights, input by input
    other.memory("THETA", "network")[cut:end] = body_weights(other.rng, form.settings, end - cut, inputs)
    return other


def roomier(core: EngineState, rows: int) -> EngineState:
    """The engine with room for so many further rows, unless there is as much as there may be, in the same state.

    A tree begins anew if all places are taken.
    """
    if not core.form.mixed:
        core.spare = sys.maxsize
        return core
    form, stored = core.form, int(core.memory("STORED", "trees")["rows"])
    room, most = (room_for(needed, form.inputs, form.most_rows) for needed in (stored + rows, sys.maxsize))
    other = core
    if room > form.settings["room"]:
        other = core.of_form(form.with_settings(room=room))
        other.memory.grow(core.memory, in_order=stored == form.settings["room"])
    other.spare = window(room) - stored - rows if room < most else sys.maxsize
    return other
