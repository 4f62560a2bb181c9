"""What `SepSA` saves and copies: the base optimizer's state, the solvers' states and its own, in one `state_dict`."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sepsa.heads import HeadSolver
from sepsa.training.base_state import check_base_state, check_own_state, numbered, packed, unpacked
from sepsa.training.observe import Observer


class SavedWithHeads(Optimizer):
    """The part of `SepSA` that saves, loads and copies, above a base optimizer whose groups and state it shares."""

    base: Optimizer
    head_fraction: float
    _observers: list[Observer]
    _several: bool  # whether `head` was a collection
    _dtype: Any  # of the first head

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state and, under "sepsa", the solvers' states and SepSA's own."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._follow_dtype()
        state = self.base.state_dict()
        own = {
            "head_fraction": self.head_fraction,
            "generator": self._observers[0].generator.get_state(),
            "body": self._body_shapes(),
            "samples": self._observers[0].samples,
        }
        if self._several:
            own["heads"] = {observer.name: observer.solver.state_dict() for observer in self._observers}
        else:
            own["head"] = self._observers[0].solver.state_dict()
        state["sepsa"] = own
        if "torch.distributed.checkpoint.state_dict" in sys.modules and state["param_groups"]:
            # Its get_optimizer_state_dict refuses what belongs to no parameter of the groups, as the head's do not, and
            # its set_optimizer_state_dict drops what belongs to a frozen one.
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            keys = [key for group in state["param_groups"] for key in group["params"]]
            learns = (k for k, parameter in zip(keys, parameters, strict=True) if parameter.requires_grad)
            first = next(learns, keys[0]) if keys else None
            if first is not None:
                state["state"] = state["state"] | {first: state["state"].get(first, {}) | {"sepsa": packed(own)}}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of a SepSA on a model of the same shape.

        Raises:
            ValueError: The state does not fit; nothing changed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        own = state_dict.pop("sepsa", None)
        entries = state_dict.get("state")
        entries = entries.items() if isinstance(entries, dict) else ()
        under = [key for key, value in entries if isinstance(value, dict) and "sepsa" in value]
        for key in under:
            entry = dict(state_dict["state"][key])
            carried = unpacked(f"state_dict['state'][{key!r}]['sepsa']", entry.pop("sepsa"))
            own = carried if own is None else own
            state_dict["state"] = state_dict["state"] | {key: entry}
        if own is None:
            raise ValueError(
                f"state_dict must come from SepSA.state_dict(), got the keys {sorted(state_dict)}: "
                "a plain base optimizer's state goes to optimizer.base.load_state_dict"
            )
        check_own_state(own, self._body_shapes())
        known = [observer.name for observer in self._observers]
        heads = own.get("heads") or {known[0]: own["head"]}
        if self._several != ("heads" in own) or set(heads) != set(known):
            raise ValueError(f"state_dict belongs to the heads {sorted(heads)}, this SepSA has {sorted(known)}")
        if under:
            state_dict = numbered(state_dict)
        check_base_state(state_dict, self.base)
        self._load_heads(heads)
        self.head_fraction = own["head_fraction"]
        for observer in self._observers:
            observer.generator.set_state(own["generator"].cpu())
            observer.started_together, observer.samples = False, own["samples"]
        self.base.load_state_dict(state_dict)
        self._adopt_base()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_heads(self, states: dict[str, Any]) -> None:
        """Load the states of all heads, or of none."""
        loaded: list[tuple[HeadSolver, dict[str, Any]]] = []
        try:
            for observer in self._observers:
                solver = observer.solver
                before = solver.state_dict() if self._several else {}
                solver.load_state_dict(states[observer.name])  # checks before it changes anything
                loaded.append((solver, before))
        except BaseException:
            for solver, before in loaded:
                solver.load_state_dict(before)
            raise

    def _body_shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for p in group["params"]] for group in self.base.param_groups]

    def _follow_dtype(self) -> None:
        """Cast the base's moments after `model.double()` and the like, which cast the parameters alone."""
        weight = self._observers[0].head._parameters.get("weight")  # four times as fast as `head.weight`
        if weight is None or weight.dtype is self._dtype:
            return
        self._dtype = weight.dtype
        for parameter, state in self.base.state.items():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.is_floating_point():  # as torch's loader
                    state[name] = value.to(parameter.dtype)

    def _adopt_base(self) -> None:
        # One list and one dict for both, so a scheduler on either is a scheduler on both.
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def __getstate__(self) -> dict[str, Any]:
        # As torch's optimizers: without hooks, and without the `step` of a scheduler, which belong to this object.
        left = {"param_groups", "state", *dir(type(self))}
        kept = {name: value for name, value in vars(self).items() if name not in left}
        return {name: value for name, value in kept.items() if not name.startswith(("_optimizer_", "_opt_called"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt_base()
