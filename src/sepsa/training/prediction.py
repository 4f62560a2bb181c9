"""`SepSA.predict`: a forward pass that does not learn, and standard deviations from the posterior of the head."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from sepsa.heads import PerOutput
from sepsa.heads.protocols import Posterior
from sepsa.training.observation import Observation
from sepsa.training.observe import by_name
from sepsa.training.observer import Observer

Calls = list[tuple[Tensor, Tensor]]  # inputs and outputs of a head
_turn = threading.RLock()  # two predictions at once would restore each other's modes


@contextlib.contextmanager
def evaluating(model: nn.Module, observers: Sequence[Observer]) -> Iterator[None]:
    """A context in which the model is in eval mode and does not learn; then every module has its own mode again."""
    with _turn, torch.no_grad():
        modes = {module: module.training for module in model.modules()}
        switch = any(modes.values())
        for observer in observers:
            now = observer.hook.current
            if now is not None and now.thread == get_ident():
                raise RuntimeError("predict must be called outside observe, in which the forward pass trains the head")
            if now is not None and switch:
                raise RuntimeError(
                    "predict would switch the model to eval mode while another thread is inside observe: hold a lock "
                    "around observe and predict, or predict with a copy of the model in eval mode"
                )
        if not switch:
            yield
            return
        try:
            for observer in observers:  # another thread that enters observe meanwhile gets an error
                observer.hook.current = Observation(observer, torch.empty(0))
                observer.hook.current.thread, observer.hook.current.learning = get_ident(), True
            model.eval()
            yield
        finally:
            model.train(modes[model])
            for module, mode in modes.items():
                module.training = mode
            for observer in observers:
                observer.hook.current = None


def predict_with_std(model: nn.Module, observers: Sequence[Observer], inputs: Any, several: bool) -> Posterior:
    """The model's outputs and their standard deviations, of the outputs' shapes; an error where there are none."""
    for observer in observers:
        check_posterior(observer)
    calls: dict[str, Calls] = {observer.name: [] for observer in observers}
    thread = get_ident()

    def note(seen: Calls, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if get_ident() == thread:
            seen.append((args[0], output))

    with evaluating(model, observers), contextlib.ExitStack() as hooks:
        for observer in observers:
            hooks.callback(observer.head.register_forward_hook(partial(note, calls[observer.name])).remove)
        with torch.compiler.set_stance("force_eager"):  # a compiled model does not call hooks that came after it
            outputs = model(inputs)
        named = by_name("the model's outputs", outputs, list(calls)) if several else dict.fromkeys(calls, outputs)
        found = {o.name: deviation(o, calls[o.name], named[o.name]) for o in observers if o.name in named}
        if not several:
            return Posterior(outputs, *found.values())
        return Posterior(outputs, found if isinstance(outputs, Mapping) else tuple(found.values()))  # type: ignore[arg-type]


def check_posterior(observer: Observer) -> None:
    """Raise an error for a solver that cannot tell the standard deviation of targets."""
    solver: Any = observer.solver
    solver = solver.solver if isinstance(solver, PerOutput) else solver
    what = f"return_std needs a head with a posterior of its targets, as RLS has, and {observer.name!r} is trained by "
    if hasattr(solver, "predict_proba"):
        raise TypeError(
            f"{what}{type(solver).__name__}, whose outputs are logits: make them probabilities, which state the "
            "uncertainty, or ask solver.predict(features, return_std=True) for the deviation of the logits"
        )
    if "return_std" not in inspect.signature(getattr(solver, "predict", check_posterior)).parameters:
        raise TypeError(f"{what}{type(solver).__name__}, which has none: make SepSA(model, base, solver=RLS())")


def deviation(observer: Observer, calls: Calls, output: Any) -> Tensor:
    """The standard deviation of the model's output, which must be the output of one call of the head."""
    if len(calls) != 1:
        raise ValueError(
            f"return_std needs a model that calls its head {observer.name!r} once in a forward pass, got {len(calls)} "
            "calls: use solver.predict(features, return_std=True) on the head's inputs"
        )
    features, given = calls[0]
    solver: Any = observer.solver
    std: Tensor = solver.predict(features, return_std=True).std
    if not (isinstance(output, Tensor) and torch.equal(output.reshape(-1), given.to(output).reshape(-1))):
        came = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"return_std needs a model that returns its head's output, got an output ({came}) that differs from that "
            f"of the head {observer.name!r}, {tuple(given.shape)}: something follows the head, such as a softmax or a "
            "scaling, and changes the deviation too; use solver.predict(features, return_std=True) and transform that"
        )
    return std.reshape(output.shape).to(output.dtype)
