"""Saved states of the compiled engine, by the names of experts and parts: an engine with more experts loads them.

An expert that a state lacks begins anew, at its prior weight. What is saved of a part, and what is checked, follows
from its declaration (`sepsa.stream.kernels.memory`). Growth is here as well: it reads one state and writes another.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sepsa.states import schema
from sepsa.states.plain import generator_state, read_generator
from sepsa.stream.engine.core import Core, Form, body_weights, started
from sepsa.stream.engine.options import ACTIVATIONS
from sepsa.stream.experts import EXPERTS, trees
from sepsa.stream.experts.frame import OPTIONS
from sepsa.stream.experts.tree_parts import MEMORY, room_for, window
from sepsa.stream.kernels.memory import SHAPES, Layout, Memory, saved, shapes_of

MOST_TREES = 1000


def settings(core: Core) -> dict[str, Any]:
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
    }


def state_dict(core: Core) -> dict[str, Any]:
    """The state as plain data: that of the network, and by their names those of the experts."""
    sizes = {"inputs": core.form.inputs, "outputs": core.form.outputs}
    network = {
        "settings": settings(core),
        **sizes,
        "arrays": network_arrays(core),
        "generator": generator_state(core.rng),
    }
    if core.models is None:
        return network
    return {**sizes, "network": network, **experts_and_mixture(core), "models": core.models.state_dict()}


def network_arrays(core: Core) -> dict[str, Any]:
    """The parts of the network and of its heads, whose number is a part of the name, as vectors."""
    arrays = core.memory.save("network")
    for h in range(len(core.form.heads)):
        arrays |= {f"{name}{h}": array for name, array in core.memory.save("heads", h).items()}
    return {name: array.ravel() for name, array in arrays.items()}


def experts_and_mixture(core: Core) -> dict[str, Any]:
    """The parts of the experts other than the network, and of their mixture."""
    return {
        "experts": {expert.name: core.memory.save(expert.name, whole=False) for expert in core.form.experts[1:]},
        "mixture": {"experts": core.names} | core.memory.save("mixture"),
    }


# ---------------------------------------------------------------------- loading


def loaded(core: Core, state: Any, entry: str) -> Core:
    """An engine like this one in a saved state; a ValueError names the wrong entry."""
    if core.models is None:
        return load_network(core, state, entry, {})
    new = schema.read(entry, state, {"inputs", "outputs", "network", "experts", "mixture", "models"})
    other = load_network(core, new["network"], new.path("network"), sizes_of(new["experts"], new.path("experts")))
    new.equal("inputs", other.form.inputs)
    new.equal("outputs", other.form.outputs)
    load_experts(other, new["experts"], new.path("experts"))
    load_mixture(other, new["mixture"], new.path("mixture"))
    lacking = {*new["mixture"]["experts"]} - {*new["experts"], *core.names[:1], *core.models.names}
    if lacking:
        raise new.damaged(
            "experts", f"states of {sorted(lacking)} too, which the mixture weighs", sorted(new["experts"])
        )
    other.models = core.models.loaded(new["models"], new.path("models"))
    return other


def load_network(core: Core, state: Any, entry: str, sizes: dict[str, int]) -> Core:
    """An engine like this one, with the network in a saved state and all other experts at their start."""
    new = schema.read(entry, state, {"settings", "inputs", "outputs", "arrays", "generator"})
    wanted = settings(core)
    own = new.entries("settings", set(wanted))
    for name, value in wanted.items():
        own.equal(name, value)
    form = core.form.with_settings(**sizes)
    other = core.of_form(form._replace(inputs=new.integer("inputs", 1), outputs=new.integer("outputs", 1)))
    load_arrays(other, new["arrays"], new.path("arrays"))
    other.rng = read_generator(new.path("generator"), new["generator"])
    return other


def load_arrays(core: Core, state: Any, entry: str) -> None:
    """Load what `network_arrays` returned."""
    arrays = schema.read(entry, state, set(network_arrays(core)))
    core.memory.load(arrays, "network", flat=True)
    for h in range(len(core.form.heads)):
        core.memory.load(arrays, "heads", h, f"{{}}{h}", flat=True)


def sizes_of(states: Any, entry: str) -> dict[str, int]:
    """The number of saved trees, and the rows for which they have room; none where the state does not say."""
    own = states.get("trees") if isinstance(states, dict) else None
    if not isinstance(own, dict):
        return {}
    shapes = shapes_of(trees.EXPERT.group, schema.Entries(f"{entry}['trees']", own))
    shape, _ = shapes.get("LEAF_OF_ROW", (getattr(own.get("LEAF_OF_ROW"), "shape", ()), ()))
    known = len(shape) == 2 and 0 < shape[0] < MOST_TREES and 0 < shape[1] <= MEMORY
    return {"trees": shape[0], "room": shape[1]} if known else {}


def load_experts(core: Core, states: Any, entry: str) -> None:
    """Load the experts that the state has; others stay at their start."""
    names = [expert.name for expert in core.form.experts[1:]]
    unknown = sorted(set(states) - set(names)) if isinstance(states, dict) else ["no dict"]
    if unknown:
        raise ValueError(
            f"{entry} has experts that this version does not know, {unknown}: load it with the version that saved it"
        )
    for name in names:
        if name in states:
            parts = set(core.memory.names(name))
            own = schema.read(f"{entry}[{name!r}]", states[name], parts, optional={SHAPES})
            core.memory.load(own, name)


def load_mixture(core: Core, state: Any, entry: str) -> None:
    """Load the weights of experts by their names; one that the state lacks has its prior weight from now on."""
    memory, names = core.memory, core.names
    new = schema.read(entry, state, {"experts", *memory.names("mixture")})
    own = new.items("experts").values
    if own[:1] != names[:1] or not all(type(name) is str for name in own) or len({*own} & {*names}) < len(own):
        raise new.damaged("experts", "distinct names of experts, the network first", schema.brief(own))
    layout, count = memory.layout, len(own)
    sizes = layout.sizes | {"experts": count, "stacked": count - 1, "candidates": count + 1}
    former = Memory(Layout(layout.frame, [layout.groups["mixture"]], sizes))
    former.load(new, "mixture")
    ours, theirs = [*names, "stack"], [*own, "stack"]
    known = [name for name in ours if name in theirs]
    axes = {"candidates": known, "stacked": known[1:-1]}  # differences from the network's answer, which is the first
    for part in layout.groups["mixture"].parts:
        if part.kept:
            into, array, by_expert = memory(part.name, "mixture"), former(part.name, "mixture"), {*axes} & {*part.shape}
            if part.name == "LOSS":
                into[:] = array[0]
            less = int("stacked" in part.shape)
            places = [
                np.ix_(*([order.index(name) - less for name in axes[axis]] for axis in part.shape if axis in axes))
                for order in (ours, theirs)
            ]
            into[places[0] if by_expert else ...] = array[places[1] if by_expert else ...]
    counts = memory("COUNTS", "mixture")
    counts["best"] = ours.index(theirs[counts["best"]])


# ---------------------------------------------------------------------- pickles


def pickled(core: Core) -> dict[str, Any]:
    """What a pickle holds: what makes an engine of the same form, with the models themselves, and its state."""
    own = core.form._asdict()
    own = {name: own[name] for name in ("inputs", "outputs", "hidden", "heads", "settings")}
    own |= {"max_rows": core.form.most_rows, "options": saved(core.options), "models": core.models}
    own |= {"table": [expert.name for expert in core.form.table]}
    own |= {"generator": core.rng, "network": network_arrays(core)}
    return own | (experts_and_mixture(core) if core.models is not None else {})


def unpickled(state: dict[str, Any]) -> Core:
    """The engine of which `pickled` returned this; a pickle of another development version is refused."""
    models, of_form = state["models"], ("inputs", "outputs", "hidden", "heads", "settings")
    more = {"experts", "mixture"} if models is not None else set[str]()
    others = {"max_rows", "options", "models", "table", "generator", "network"}
    schema.read("the pickle", state, {*of_form, *others, *more})
    own = {name: state[name] for name in of_form}
    table = tuple(expert for expert in EXPERTS if expert.name in state["table"])
    form = Form(**own, most_rows=state["max_rows"], table=table, models=None if models is None else len(models))
    options = np.array(tuple(state["options"].tolist()), OPTIONS.dtype)
    core = started(form, options, models, state["generator"])
    load_arrays(core, {name: array.ravel() for name, array in state["network"].items()}, "network")
    if models is not None:
        load_experts(core, state["experts"], "experts")
        load_mixture(core, state["mixture"], "mixture")
    return core


# ---------------------------------------------------------------------- growth


def grown(core: Core, inputs: int, outputs: int) -> Core:
    """The engine with more inputs or outputs, which were zero in all rows so far; a tree in growth begins anew."""
    form = core.form._replace(inputs=inputs, outputs=outputs)
    if core.models is not None:  # the same room, or less where memory is limited
        most = room_for(form.most_rows, inputs, form.most_rows)
        form = form.with_settings(room=min(form.settings["room"], most))
    other = core.of_form(form)
    other.memory.grow(core.memory)
    width = sum(form.hidden[:1])
    cut, end = core.form.inputs * width, inputs * width  # the first layer's weights, input by input
    other.memory("THETA", "network")[cut:end] = body_weights(other.rng, form.settings, end - cut, inputs)
    return other


def roomier(core: Core, rows: int) -> Core:
    """The engine with room for so many further rows, unless there is as much as there may be, in the same state.

    A tree begins anew if all places are taken.
    """
    if core.models is None:
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
