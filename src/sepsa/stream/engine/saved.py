"""Saved states of the compiled engine, by the names of experts and parts: an engine with more experts loads them.

An expert that a state lacks begins anew, at its prior weight. Growth by inputs or outputs is here as well: it reads one
state and writes another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, TypeAlias

import numpy as np

from sepsa.states import schema
from sepsa.states.plain import generator_state, read_generator
from sepsa.stream.engine import layout
from sepsa.stream.engine.options import ACTIVATIONS

Engine: TypeAlias = Any  # that of `compiled`, which imports this module

EMPTY: Mapping[str, int] = {}
MOST_TREES = 1000
BODY_PARTS = ("THETA", "FIRST", "SECOND")
POSITIVE = ("D", "RIDGE")
NOT_NEGATIVE = ("SECOND", "ENERGY", "SCALE", "TYPICAL", "USUAL", "LATE", "GAIN", "ERROR", "NUMBERS", "COUNTS")
BEST = 3  # the place in the mixture's counts of the expert with the largest weight
BY_EXPERT = ("GRAM", "MOMENT", "STACK", "LOSS", "WEIGHT")  # parts of the mixture with a place for each expert


# ---------------------------------------------------------------------- saving


def settings(engine: Engine) -> dict[str, Any]:
    """The network's form and the options of learning, which a state that is loaded must share."""
    own = engine._layout.settings
    return {
        "hidden": list(engine._layout.hidden),
        "heads": engine._heads,
        "loss": "huber" if engine.robust else "squared",
        "classes": bool(own["classes"]),
        "dtype": engine._dtype.name,
        "activation": next(name for name, code in ACTIVATIONS.items() if code == own["activation"]),
        "optimizer": own["optimizer"],
        "standardize": bool(own["standardize"]),
        "batch": engine.batch_size,
        "options": engine._options.tolist(),
    }


def state_dict(engine: Engine) -> dict[str, Any]:
    """The state as plain data: that of the network, and by their names those of the experts."""
    network = {
        "settings": settings(engine),
        "inputs": engine.inputs,
        "outputs": engine.outputs,
        "arrays": {name: part(engine, name).ravel().copy() for name in network_parts(engine)},
        "generator": generator_state(engine._rng),
    }
    if engine._models is None:
        return network
    return {
        "inputs": engine.inputs,
        "outputs": engine.outputs,
        "network": network,
        "experts": expert_arrays(engine),
        "mixture": {"experts": engine.expert_names} | arrays_of(engine, "mixture"),
        "models": engine._models.state_dict(),
    }


def part(engine: Engine, name: str) -> Any:
    """A part of the state by its name in the layout."""
    return engine._layout.part(engine._state, name)


def network_parts(engine: Engine) -> list[str]:
    """The names of the parts of the network and its heads."""
    return [name for name in engine._layout.parts if "/" not in name]


def arrays_of(engine: Engine, group: str) -> dict[str, Any]:
    """Copies of the parts of an expert or of the mixture."""
    return {name: engine._view(name, group).copy() for name in engine._layout.names_of(group)}


def expert_arrays(engine: Engine) -> dict[str, dict[str, Any]]:
    """The parts of all experts but the network."""
    return {expert.name: arrays_of(engine, expert.name) for expert in engine._table[1:]}


# ---------------------------------------------------------------------- loading


def loaded(engine: Engine, state: Any, entry: str) -> Engine:
    """An engine like this one in a saved state; a ValueError names the wrong entry."""
    if engine._models is None:
        return load_network(engine, state, entry)
    new = schema.read(
        entry,
        of_version_0_2(state, engine._models.names, entry),
        {"inputs", "outputs", "network", "experts", "mixture", "models"},
    )
    experts = upgraded(new["experts"], new.path("experts"))
    other = load_network(engine, new["network"], new.path("network"), sizes_of(experts))
    for name, size in (("inputs", other.inputs), ("outputs", other.outputs)):
        new.equal(name, size)
    load_experts(other, experts, new.path("experts"))
    load_mixture(other, new["mixture"], new.path("mixture"))
    lacking = {*new["mixture"]["experts"]} - {*new["experts"], *engine.expert_names[:1], *engine._models.names}
    if lacking:
        raise new.damaged(
            "experts", f"states of {sorted(lacking)} too, which the mixture weighs", sorted(new["experts"])
        )
    other._models = engine._models.loaded(new["models"], new.path("models"))
    return other


def load_network(engine: Engine, state: Any, entry: str, sizes: Mapping[str, int] = EMPTY) -> Engine:
    """An engine like this one, with the network in a saved state and all other experts at their start."""
    new = schema.read(entry, state, {"settings", "inputs", "outputs", "arrays", "generator"})
    wanted = settings(engine)
    saved = new.entries("settings", set(wanted))
    for name, value in wanted.items():
        saved.equal(name, value)
    other = engine.resized(new.integer("inputs", 1), new.integer("outputs", 1), **sizes)
    other._start()
    names = network_parts(other)
    arrays = new.entries("arrays", set(names))
    for name in names:
        view, kind = part(other, name), name.rstrip("0123456789")
        low = 0.0 if kind in NOT_NEGATIVE else np.finfo(float).tiny if kind in POSITIVE else -math.inf
        view[...] = arrays.array(name, (view.size,), view.dtype, low=low).reshape(view.shape)
    for h, p in enumerate(other._layout.head_features):
        if other._view("NUMBERS", h)[layout.H_CURSOR] >= p:
            raise ValueError(f"{arrays.path(f'NUMBERS{h}')} must point at one of {p} features")
    if other._view("COUNTS")[layout.C_BEST] >= len(engine._heads):
        raise ValueError(f"{arrays.path('COUNTS')} must point at one of {len(engine._heads)} heads")
    other._rng = read_generator(new.path("generator"), new["generator"])
    return other


def upgraded(states: Any, entry: str) -> Any:
    """States of the experts with the trees in the form of today, and the rows of a window of today's length."""
    try:
        return resolve_name("sepsa.stream.experts.earlier").upgraded(states)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise schema.damaged(entry, "the states of experts", repr(error)) from error


def sizes_of(states: Any) -> dict[str, int]:
    """The number of saved trees, and the rows for which they have room; none where the state does not say."""
    trees = states.get("trees") if isinstance(states, dict) else None
    leaves = trees.get("LEAF_OF_ROW") if isinstance(trees, dict) else None
    known = isinstance(leaves, np.ndarray) and leaves.ndim == 2 and 0 < len(leaves) < MOST_TREES
    return {"trees": len(leaves), "room": leaves.shape[1]} if known else {}  # type: ignore[union-attr, arg-type]


def load_experts(engine: Engine, states: Any, entry: str) -> None:
    """Load the experts that the state has; others stay at their start."""
    own = expert_arrays(engine)
    unknown = sorted(set(states) - set(own)) if isinstance(states, dict) else ["no dict"]
    if unknown:
        raise ValueError(
            f"{entry} has experts that this version does not know, {unknown}: load it with the version that saved it"
        )
    for expert in engine._table[1:]:
        if expert.name in states:
            arrays = schema.read(f"{entry}[{expert.name!r}]", states[expert.name], set(own[expert.name]))
            for name in own[expert.name]:
                view = engine._view(name, expert.name)
                view[...] = arrays.array(name, view.shape, view.dtype)
            wrong = expert.wrong(engine.parts_of(expert.name))
            if wrong:
                raise arrays.damaged(wrong[0], wrong[1], engine._view(wrong[0], expert.name))


def load_mixture(engine: Engine, state: Any, entry: str) -> None:
    """Load the weights of experts by their names; one that the state lacks has its prior weight from now on."""
    new = schema.read(entry, state, {"experts", *arrays_of(engine, "mixture")})
    names, saved = engine.expert_names, new.items("experts").values
    if saved[:1] != names[:1] or not all(type(name) is str for name in saved) or len({*saved} & {*names}) < len(saved):
        raise new.damaged("experts", "distinct names of experts, the network first", schema.brief(saved))
    count = len(saved)
    shapes = {"GRAM": (count - 1, count - 1), "MOMENT": (count - 1,), "STACK": (count - 1,)}
    for name in arrays_of(engine, "mixture"):
        view = engine._view(name, "mixture")
        if name not in BY_EXPERT:
            view[...] = new.array(name, view.shape, low=0.0 if name != "ERROR_RUN" else -math.inf)
            continue
        old = new.array(name, shapes.get(name, (count + 1,)))
        known = [e for e, each in enumerate(names) if each in saved]
        ours, theirs = np.array(known), np.array([saved.index(names[e]) for e in known])
        if name in shapes:  # differences from the network's answer, which is the first
            ours, theirs = ours[1:] - 1, theirs[1:] - 1
            view[...] = 0.0
            view[np.ix_(ours, ours) if view.ndim == 2 else ours] = old[
                np.ix_(theirs, theirs) if view.ndim == 2 else theirs
            ]
        else:
            view[:-1] = old[0] if name == "LOSS" else 0.0
            view[ours], view[-1] = old[theirs], old[-1]
    best = engine._view("COUNTS", "mixture")[BEST]
    if best > count or best != math.floor(best):
        raise new.damaged("COUNTS", f"numbers, the fourth up to {count}", best)
    if saved != names:
        order = [*saved, "stack"]
        chosen = order[int(best)]
        engine._view("COUNTS", "mixture")[BEST] = [*names, "stack"].index(chosen)


def of_version_0_2(state: Any, models: list[str], entry: str) -> Any:
    """A state of version 0.2 in the form of today: it had the parts of all experts in one dict, and no names."""
    old = state.get("experts") if isinstance(state, dict) and "mixture" not in state else None
    if not isinstance(old, dict) or "COUNTS" not in old:
        return state
    old = dict(old)
    try:
        counts, simple = np.asarray(old.pop("COUNTS")), np.asarray(old.pop("SIMPLE"))
        network = dict(state["network"])
        network["arrays"] = network["arrays"] | {"CALIBRATION": old.pop("CALIBRATION")}
        groups: dict[str, tuple[str, ...]] = {
            "neighbours": ("ROWS", "TARGETS", "WEIGHTS", "LOW", "HIGH", "BINARY"),
            "trees": (
                "GROWTH", "CHOSEN", "EDGES", "DIRECTION", "SPLIT_INPUTS", "SPLIT_THRESHOLDS", "VALUES", "CUTS",
                "LEAF_COUNTS", "HISTOGRAMS", "SUMS", "PACKED", "NODES", "LEAF_OF_ROW", "BINS",
            ),
            "products": ("W", "U", "D"),
            "last errors": ("KEYED",),
            "logistic": ("LOGIT_W", "LOGIT_U", "LOGIT_D"),
            "naive Bayes": ("CLASS_MEANS", "CLASS_COUNTS", "CLASS_SPREAD"),
        }  # fmt: skip
        experts: dict[str, Any] = {name: {key: old.pop(key) for key in keys} for name, keys in groups.items()}
        experts["neighbours"]["FILLED"] = counts[[1, 2]].astype(np.int64)
        experts["last target"] = {"VALUE": simple[0].copy()}
        experts["mean"] = {"VALUE": simple[1].copy(), "ROWS": counts[:1].copy()}
        experts["naive Bayes"]["CLASSED"] = counts[[7]]
        names = ["network", "neighbours", "trees", "products", "last target", "mean", "last errors"]
        if network["settings"]["classes"]:
            names += ["logistic", "naive Bayes"]
        else:
            del experts["logistic"], experts["naive Bayes"]
        mixture = {name: old.pop(name) for name in ("SCALE", "ERROR", "ERROR_RUN", *BY_EXPERT)}
        mixture["COUNTS"] = counts[[0, 3, 4, 5, 6]]
        mixture["experts"] = names + models
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise schema.damaged(f"{entry}['experts']", "the state that version 0.2 saved", repr(error)) from error
    return state | {"network": network, "experts": experts, "mixture": mixture}


# ---------------------------------------------------------------------- pickles


def pickled(engine: Engine) -> dict[str, Any]:
    """What a pickle holds: as `state_dict`, with the models themselves."""
    state: dict[str, Any] = {
        "hidden": engine._layout.hidden,
        "settings": engine._layout.settings,
        "heads": engine._heads,
        "options": engine._options,
        "dtype": engine._dtype,
        "models": engine._models,
        "max_rows": engine._most,
        "generator": engine._rng,
        "inputs": engine.inputs,
        "outputs": engine.outputs,
        "network": {name: part(engine, name).copy() for name in network_parts(engine)},
    }
    if engine._models is not None:
        state["experts"] = expert_arrays(engine)
        state["mixture"] = {"experts": engine.expert_names} | arrays_of(engine, "mixture")
    return state


def unpickle(engine: Engine, state: dict[str, Any]) -> None:
    """Make an engine, which has no attributes yet, from what `pickled` returned, or a pickle of version 0.2 or 0.1."""
    if "_network" in state:
        state = with_experts_of_version_0_2(state)
    elif "_layout" in state:
        state = alone_of_version_0_2(state)
    engine._heads, engine._options, engine._dtype = state["heads"], state["options"], state["dtype"]
    engine._models, engine._rng = state["models"], state["generator"]
    trees = resolve_name("sepsa.stream.experts.trees")
    engine._most = state.get("max_rows", trees.MOST_ROWS)
    experts = upgraded(state.get("experts", {}), "experts")
    form = {"room": 0, "trees": trees.TREES, "rate": trees.RATE} | state["settings"] | sizes_of(experts)
    engine._allocate(state["inputs"], state["outputs"], tuple(state["hidden"]), form)
    engine._start()
    for name, array in state["network"].items():
        view = part(engine, name)
        view[...] = array.reshape(view.shape)
    if engine._models is not None:
        load_experts(engine, experts, "experts")
        load_mixture(engine, state["mixture"], "mixture")


def alone_of_version_0_2(state: dict[str, Any]) -> dict[str, Any]:
    """The pickle of a network alone in the form of today; its layout knew starts and lengths by the names of parts."""
    old, vector, dtype = state["_layout"], state["_state"], state["_dtype_of_body"].dtype
    sizes = dict(
        zip(
            ("activation", "optimizer", "standardize", "batch", "robust", "classes"),
            old.numbers[8:14].tolist(),
            strict=True,
        )
    )
    arrays = {name: vector[start : start + length] for name, (start, length) in old.parts.items()}
    for name in BODY_PARTS:
        arrays[name] = arrays[name].view(dtype)[: old.body]
    return {
        "hidden": old.hidden, "settings": sizes, "heads": state["_heads"], "options": state["_options"], "dtype": dtype,
        "models": None, "generator": state["_rng"], "inputs": old.inputs, "outputs": old.outputs, "network": arrays,
    }  # fmt: skip


def with_experts_of_version_0_2(state: dict[str, Any]) -> dict[str, Any]:
    """The pickle of a network with experts in the form of today."""
    network, old = pickled(state["_network"]), state["_layout"]
    starts, arrays = old.numbers[-len(old.shapes) :], {}
    for start, (name, (dtype, shape)) in zip(starts, old.shapes.items(), strict=True):
        count, dtype = int(np.prod(shape)), np.dtype(dtype)
        cells = (count * dtype.itemsize + 7) // 8
        arrays[name] = state["_state"][start : start + cells].view(dtype)[:count].reshape(shape)
    parts = {"settings": network["settings"], "arrays": network["network"]}
    new = of_version_0_2({"network": parts, "experts": arrays}, state["_models"].names, "the pickle")
    return network | {
        "models": state["_models"], "experts": new["experts"], "mixture": new["mixture"],
        "network": new["network"]["arrays"],
    }  # fmt: skip


# ---------------------------------------------------------------------- growth


def grown(engine: Engine, inputs: int, outputs: int) -> Engine:
    """The engine with more inputs or outputs, which were zero in all rows so far."""
    other = engine.resized(inputs, outputs, room=room_after_growth(engine, inputs))
    other._start()
    grow_heads(engine, other)
    old, new = engine._layout, other._layout
    cut = old.inputs * old.hidden[0] if old.hidden else 0  # the first layer's weights, input by input
    added = (inputs - old.inputs) * old.hidden[0] if old.hidden else 0
    for name in BODY_PARTS:
        before, view = engine._view(name), other._view(name)
        view[:cut], view[cut + added :] = before[:cut], before[cut:]
    other._view("THETA")[cut : cut + added] = other._start_weights(added, inputs)
    if engine._models is not None:
        grow_window_and_experts(engine, other)
    for name in network_parts(engine):
        if name[-1].isalpha() and name not in BODY_PARTS:
            before, view = part(engine, name), part(other, name)
            view[tuple(slice(0, length) for length in before.shape)] = before
    if not new.settings["standardize"]:
        other._view("SCALE")[:] = other._view("GAIN")[:] = 1.0
    if engine._models is not None:
        for expert in other._table:
            expert.start(other.parts_of(expert.name), old.inputs, old.outputs)
    return other


def grow_heads(engine: Engine, other: Engine) -> None:
    """Write the heads of an engine into a larger one; new inputs come last but one among the features, before 1."""
    outputs = engine.outputs
    for h, (before, p) in enumerate(zip(engine._layout.head_features, other._layout.head_features, strict=True)):
        keep = np.r_[0 : before - 1, p - 1]
        for name in ("D", "RIDGE"):
            other._view(name, h)[keep] = engine._view(name, h)
        for name in ("W", "PRIOR"):
            other._view(name, h)[:outputs, keep] = engine._view(name, h)
        U, old_U = other._view("U", h), engine._view("U", h)
        for j, column in enumerate(keep):
            U[column * (column - 1) // 2 + keep[:j]] = old_U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        other._view("ENERGY", h)[:outputs] = engine._view("ENERGY", h)
        other._view("NUMBERS", h)[:] = engine._view("NUMBERS", h)


RINGS = {"window": ("FILLED", "neighbours"), "room": ("STORED", "trees")}  # their numbers and places of rows


def room_after_growth(engine: Engine, inputs: int) -> int:
    """The room for rows with more inputs: the same, or less where memory is limited."""
    if engine._models is None:
        return 0
    most = resolve_name("sepsa.stream.experts.trees").room_for(engine._most, inputs, engine._most)
    return int(min(engine._layout.settings["room"], most))


def with_room(engine: Engine, room: int) -> Engine:
    """The engine with more room for rows, in the same state otherwise; a tree begins anew if all places are taken."""
    other = engine.resized(engine.inputs, engine.outputs, room=room)
    for name in engine._layout.parts:
        old, new = part(engine, name), part(other, name)
        new[tuple(slice(0, length) for length in old.shape)] = old
    if engine._view("STORED", "trees")[0] == engine._layout.settings["room"]:
        grow_window_and_experts(engine, other)
        for expert in other._table:
            expert.start(other.parts_of(expert.name), engine.inputs, engine.outputs)
    return other


def grow_window_and_experts(engine: Engine, other: Engine) -> None:
    """Write the experts' parts into those of a larger engine; of a shorter window the latest rows are kept."""
    latest = {}
    for ring, numbers in RINGS.items():
        rows, following = engine._view(*numbers)[:2].tolist()
        kept = min(rows, other._layout.sizes[ring])
        latest[ring] = (following - kept + np.arange(kept)) % engine._layout.sizes[ring]
    for group in other._layout.groups:
        if group.repeated or group.name == "network":
            continue
        for name, (_, shape) in group.state.items():
            old, new = engine._view(name, group.name), other._view(name, group.name)
            for ring in latest.keys() & shape:
                old = np.take(old, latest[ring], axis=shape.index(ring))
            new[tuple(slice(0, length) for length in old.shape)] = old
    for ring, numbers in RINGS.items():
        kept = len(latest[ring])
        other._view(*numbers)[:2] = kept, kept % other._layout.sizes[ring]
