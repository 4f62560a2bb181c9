"""The old spelling `ridge="auto"` of self-tuning heads, for one version."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

# The function of a class and its settings that makes a self-tuning head; `self_tuning` sets it when it is imported.
makers: list[Callable[..., Any]] = []


class AcceptsAuto:
    """A class whose constructor makes a `SelfTuning` of it where a setting is "auto", with a warning."""

    def __new__(cls, **settings: Any) -> Any:
        chosen = [name for name in ("ridge", "forgetting") if settings.get(name) == "auto"]
        if not chosen:
            return object.__new__(cls)
        given = {name: value for name, value in settings.items() if name not in chosen}
        if cls.__name__ == "RLS":  # whose defaults are numbers, while `SelfTuning` chooses what is not given
            given = {name: 1.0 for name in ("ridge", "forgetting") if name not in chosen} | given
        words = "".join(f", {name}={value!r}" for name, value in given.items())
        warnings.warn(
            f'{cls.__name__}({chosen[0]}="auto") makes a SelfTuning head, and will be an error in the next version: '
            f"write SelfTuning.of({cls.__name__}{words})",
            DeprecationWarning,
            stacklevel=2,
        )
        return makers[0](cls, **given)
