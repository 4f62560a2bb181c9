"""SepSA: a head solver and a first-order optimizer joined into one `torch.optim.Optimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa._base_state import check_base_state, check_own_state
from sepsa.capture import PlainStep, Step, capture, check_devices
from sepsa.heads import RLS, HeadSolver
from sepsa.interrupt import DeferredInterrupt
from sepsa.observe import Detached, Observation, Observer, observers_of

S = TypeVar("S", bound=HeadSolver)


class SepSA(Optimizer, Generic[S]):
    """Train a model's linear head by a stochastic Newton method and its body by `base`.

    Choose it wherever the last layer is an `nn.Linear`. It equals `base` on the body alone, where every
    gradient is taken at the head that has just learned the same samples.

        optimizer = SepSA(model, base=torch.optim.Adam, lr=1e-3)
        with optimizer.observe(targets):
            loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()

    `base` is an Optimizer class, built here with `base_options` on every parameter that is not the head's, or
    an instance built on such parameters. `head` is the `nn.Linear` or its name in the model; None takes the
    last one that the model registers. `solver` (an `RLS()` by default) becomes bound to that head.

    `head_fraction` in (0, 1], 1 unless set, is the share of each batch that feeds the head, drawn at random
    and rounded up. The paper's mini-batch rule is `optimizer.head_fraction = 0.5**epoch`.
    """

    @overload
    def __init__(
        self: SepSA[RLS],
        model: nn.Module,
        base: type[Optimizer] | Optimizer,
        *,
        head: nn.Linear | str | None = None,
        solver: None = None,
        **base_options: Any,
    ) -> None: ...
    @overload
    def __init__(
        self,
        model: nn.Module,
        base: type[Optimizer] | Optimizer,
        *,
        head: nn.Linear | str | None = None,
        solver: S,
        **base_options: Any,
    ) -> None: ...
    def __init__(
        self,
        model: nn.Module,
        base: type[Optimizer] | Optimizer,
        *,
        head: nn.Linear | str | None = None,
        solver: S | None = None,
        **base_options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}: SepSA finds the head in it")
        self.head_name, self.head = find_head(model, head)
        check_head(self.head_name, self.head)
        self.base = build_base(model, self.head_name, self.head, base, base_options)
        self.model = model
        self.solver = cast(S, RLS()) if solver is None else solver
        self.solver.bind(self.head)
        self._observer = Observer(model, self.head_name, self.head, self.solver)
        self._dtype = self.head.weight.dtype
        super().__init__(self.base.param_groups, self.base.defaults)
        self._adopt_base()

    # ------------------------------------------------------------------ learning

    @property
    def head_fraction(self) -> float:
        """The share of each batch that feeds the head, in (0, 1]."""
        return self._observer.head_fraction

    @head_fraction.setter
    def head_fraction(self, value: float) -> None:
        if not 0.0 < value <= 1.0:
            raise ValueError(f"head_fraction must be in (0, 1], got {value}")
        self._observer.head_fraction = float(value)

    def observe(self, targets: Tensor, sample_weight: Tensor | None = None) -> Observation:
        """A context in which the model's forward teaches the head: as the data reach it, it learns first."""
        return Observation(self._observer, targets, sample_weight)

    def learn(
        self,
        inputs: Any,
        targets: Tensor,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """One whole iteration: the head learns, the body follows. Returns the loss at the new head.

        The loss is the solver's own, a mean over the samples that have a target, by `sample_weight`; a `loss_fn` is
        called with all outputs and targets as they are.

        Ctrl-C waits until it is over; a second one does not. After an error before the body has moved, in the loss or
        for lack of memory, the head (of a solver that is `Revertible`) and the running statistics of the model's
        normalization layers are as they were before.
        """
        with DeferredInterrupt():
            observer = self._observer
            observation, before = Observation(observer, targets, sample_weight), observer.checkpoint()

            def loss_of(outputs: Tensor) -> Tensor:
                return observation.loss(outputs) if loss_fn is None else loss_fn(outputs, targets)

            try:
                with torch.enable_grad():
                    with observation:
                        loss = loss_of(self.model(inputs))
                    loss.backward()  # type: ignore[no-untyped-call]
                if getattr(self.base, "evaluates_again", False):
                    self.step(lambda: loss_of(self.model(inputs)))  # type: ignore[arg-type,return-value]
                else:
                    self.step()
            except BaseException:
                observer.rollback(before, observation)
                self.zero_grad()
                raise
            self.zero_grad()
            return loss.detach()

    def detach(self) -> Detached:
        """Leave the model as if we had never been there: for torch.jit.script, or to save it whole.

        Within `with optimizer.detach():` it is free of us for a while; after a plain call it stays so.
        """
        return Detached(self._observer)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Let the base optimizer move the body."""
        if self.head.weight.dtype is not self._dtype:
            self._follow_dtype()
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (closure,), {})
        result = self.base.step() if closure is None else self.base.step(closure)
        self._observer.body_moved()
        for after in self._optimizer_step_post_hooks.values():
            after(self, (closure,), {})
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap this step too: it wraps the base's

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the body, and of the head where a frozen body let them reach it."""
        if set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.base.zero_grad(set_to_none=False)
        for parameter in self.head._parameters.values():
            if parameter is not None:
                parameter.grad = None

    def capture(
        self, inputs: Tensor, targets: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Step:
        """A `learn` for batches like these that runs as one CUDA graph on a GPU, and plainly on a CPU.

        Choose it where the step is so small that launching its kernels costs more than running them.
        """
        if not inputs.is_cuda:
            check_devices(inputs, targets)
            return PlainStep(lambda x, y: self.learn(x, y, loss_fn))
        return capture(self.model, self.base, inputs, targets, loss_fn or self.solver.loss, self._observer)

    # ------------------------------------------------------------------ an Optimizer as any other

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Hand more body parameters to the base optimizer."""
        if self.param_groups is not self.base.param_groups:  # Optimizer.__init__ walks the base's own groups
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        refuse_head_parameters(self.head_name, self.head, [given] if isinstance(given, Tensor) else list(given))
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The base's state and, under "sepsa", the head's curvature and what SepSA itself remembers."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.base.state_dict()
        state["sepsa"] = {
            "head": self.solver.state_dict(),
            "head_fraction": self.head_fraction,
            "generator": self._observer.generator.get_state(),
            "body": self._body_shapes(),
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; one of another shape is refused whole."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        own = state_dict.pop("sepsa", None)
        if own is None:
            raise ValueError(
                f"state_dict must come from SepSA.state_dict(), got the keys {sorted(state_dict)}: "
                "a plain base optimizer's state goes to optimizer.base.load_state_dict"
            )
        check_own_state(own, self._body_shapes())
        check_base_state(state_dict, self.base)
        self.solver.load_state_dict(own["head"])  # checks before it changes anything
        self.head_fraction = own["head_fraction"]
        self._observer.generator.set_state(own["generator"].cpu())
        self.base.load_state_dict(state_dict)
        self._adopt_base()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _body_shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for p in group["params"]] for group in self.base.param_groups]

    def _follow_dtype(self) -> None:
        """After `model.double()` and the like, which change parameters and leave their moments behind."""
        self._dtype = self.head.weight.dtype
        for parameter, state in self.base.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                    state[name] = value.to(parameter.dtype)

    def _adopt_base(self) -> None:
        # One list and one dict for both, so a scheduler on either is a scheduler on both.
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("param_groups", "state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._adopt_base()
        self._patch_step_function()

    def __repr__(self) -> str:
        return f"SepSA(head={self.head_name!r}, solver={self.solver!r}, base={self.base!r})"


def find_head(model: nn.Module, head: nn.Linear | str | None) -> tuple[str, nn.Linear]:
    """The head and its name in the model."""
    if isinstance(head, str):
        try:
            module = model.get_submodule(head)
        except AttributeError:
            names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
            raise ValueError(f"head {head!r} is no module of the model; its nn.Linear modules are {names}") from None
        if not isinstance(module, nn.Linear):
            raise TypeError(f"head {head!r} must be an nn.Linear, got {type(module).__name__}")
        return head, module
    if head is not None and not isinstance(head, nn.Linear):
        raise TypeError(f"head must be an nn.Linear, its name, or None, got {type(head).__name__}")
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if head is None:
        if not linears:
            raise ValueError("model has no nn.Linear, so there is no head: end it with one")
        return linears[-1]
    for name, module in linears:
        if module is head:
            return name, head
    raise ValueError("head is not a module of the model: pass model's own nn.Linear or its name")


def check_head(name: str, head: nn.Linear) -> None:
    """Refuse a head whose weights nobody could set, or nobody wanted set."""
    weight = head._parameters.get("weight")
    if weight is None or isinstance(weight, nn.parameter.UninitializedParameter):
        return  # the solver refuses it, in words of its own
    if weight.is_meta:
        raise ValueError(
            f"head {name!r} is on the meta device and has no weights: load the model first, "
            "as by model.to_empty(device=...) and load_state_dict, then make the SepSA"
        )
    for key, parameter in head._parameters.items():
        if parameter is not None and not parameter.requires_grad:
            raise ValueError(
                f"head parameter {name + '.' + key!r} has requires_grad=False, and the head solver would change it all "
                "the same: call head.requires_grad_(True), or name another head by SepSA(model, base, head=...)"
            )


def build_base(
    model: nn.Module,
    head_name: str,
    head: nn.Linear,
    base: type[Optimizer] | Optimizer,
    options: dict[str, Any],
) -> Optimizer:
    """The body's optimizer: built on every parameter that is not the head's, or the given one, checked."""
    of_head = {id(p) for p in head.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in of_head and name.rpartition(".")[0] != head_name:
            raise ValueError(
                f"head {head_name!r} shares a parameter with {name!r}: a Newton step for the head would change both; "
                "untie them or choose another head"
            )
    if isinstance(base, type) and issubclass(base, Optimizer):
        kind = base
    elif isinstance(base, Optimizer):
        kind = type(base)
    else:
        raise TypeError(f"base must be a torch.optim.Optimizer class or instance, got {base!r}")
    if issubclass(kind, torch.optim.LBFGS):
        raise ValueError(
            "base LBFGS evaluates the model several times a step, each time teaching the head the same samples: "
            "use Adam, SGD or another optimizer that evaluates it once"
        )
    if issubclass(kind, SepSA):
        raise ValueError("base must be the body's own optimizer, got a SepSA")
    if isinstance(base, Optimizer):
        if options:
            raise ValueError(f"base is an instance, so it has its options already, got {sorted(options)} as well")
        given = [p for group in base.param_groups for p in group["params"]]
        refuse_head_parameters(head_name, head, given)
        refuse_other_heads(model, head, given)
        return base
    misplaced = sorted({"ridge", "forgetting"} & set(options) - set(inspect.signature(kind).parameters))
    if misplaced:
        settings = ", ".join(f"{name}={options[name]!r}" for name in misplaced)
        raise TypeError(
            f"{misplaced[0]} is a setting of the head solver and not of {kind.__name__}: "
            f"write SepSA(model, {kind.__name__}, solver=RLS({settings}))"
        )
    body = [parameter for parameter in model.parameters() if id(parameter) not in of_head]
    refuse_other_heads(model, head, body)
    return kind([{"params": body}], **options)


def refuse_other_heads(model: nn.Module, head: nn.Linear, parameters: Iterable[Tensor]) -> None:
    """What another SepSA teaches, its solver alone moves."""
    moved = {id(parameter) for parameter in parameters}
    for observer in observers_of(model):
        if observer.head is not head and any(id(p) in moved for p in observer.head.parameters()):
            raise ValueError(
                f"another SepSA teaches the head {observer.name!r} of this model, and base would move it too: "
                "pass base an optimizer without its parameters, or call detach() on the other SepSA"
            )


def refuse_head_parameters(head_name: str, head: nn.Linear, parameters: Iterable[Tensor]) -> None:
    """The solver alone moves the head."""
    named = {id(p): f"{head_name}.{name}" for name, p in head.named_parameters()}
    for parameter in parameters:
        if id(parameter) in named:
            raise ValueError(
                f"base owns the head's parameter {named[id(parameter)]!r}, which the head solver moves: "
                "build it on the other parameters, or pass its class and let SepSA build it"
            )
