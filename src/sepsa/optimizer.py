"""SepSA: a head solver and a first-order optimizer joined into one `torch.optim.Optimizer`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa.capture import Step, capture
from sepsa.heads import RLS
from sepsa.heads._checks import check_rows, check_weight
from sepsa.heads.self_tuning import SelfTuningRLS


class HeadSolver(Protocol):
    """What SepSA asks of a head solver."""

    def bind(self, linear: nn.Linear) -> Any: ...
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None: ...
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class SepSA(Optimizer):
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

    def __init__(
        self,
        model: nn.Module,
        base: type[Optimizer] | Optimizer,
        *,
        head: nn.Linear | str | None = None,
        solver: HeadSolver | None = None,
        **base_options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}: SepSA finds the head in it")
        self.head_name, self.head = find_head(model, head)
        self.base = build_base(model, self.head_name, self.head, base, base_options)
        self.model = model
        self.solver: HeadSolver = RLS() if solver is None else solver
        self.solver.bind(self.head)
        self._head_fraction = 1.0
        self._generator = torch.Generator().manual_seed(torch.initial_seed())
        self._lesson: Observation | None = None
        super().__init__(self.base.param_groups, self.base.defaults)
        self._adopt_base()
        self._attach()

    # ------------------------------------------------------------------ learning

    @property
    def head_fraction(self) -> float:
        """The share of each batch that feeds the head, in (0, 1]."""
        return self._head_fraction

    @head_fraction.setter
    def head_fraction(self, value: float) -> None:
        if not 0.0 < value <= 1.0:
            raise ValueError(f"head_fraction must be in (0, 1], got {value}")
        self._head_fraction = float(value)

    def observe(self, targets: Tensor, sample_weight: Tensor | None = None, *, on_device: bool = False) -> Observation:
        """A context in which the model's forward teaches the head: as the data reach it, it learns first.

        `on_device` is for `capture`: nothing is read back to the host, so bad samples are skipped, not refused.
        """
        return Observation(self, targets, sample_weight, on_device)

    def learn(self, inputs: Any, targets: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """One whole iteration: the head learns, the body follows. Returns the loss at the new head."""
        with torch.enable_grad():
            with self.observe(targets):
                loss = (loss_fn or self.solver.loss)(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        if getattr(self.base, "evaluates_again", False):
            self.step(lambda: (loss_fn or self.solver.loss)(self.model(inputs), targets))  # type: ignore[arg-type,return-value]
        else:
            self.step()
        self.zero_grad()
        return loss.detach()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Let the base optimizer move the body."""
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (closure,), {})
        result = self.base.step() if closure is None else self.base.step(closure)
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

    def _teach(self, features: Tensor) -> Tensor:
        """Let the head learn. Returns the features as the head is to see them."""
        lesson = self._lesson
        assert lesson is not None
        if lesson.taught:
            raise RuntimeError(
                f"the forward inside observe reached the head {self.head_name!r} twice: "
                "use one observe for each pass through the model"
            )
        if lesson.on_device:
            self._teach_on_device(lesson, features)
        elif isinstance(self.solver, SelfTuningRLS):
            features = self._teach_and_hold_out(self.solver, lesson, features)
        elif self._head_fraction < 1.0:
            rows, targets, weight, _ = self._share(features, lesson.targets, lesson.sample_weight)
            self.solver.update(rows, targets, weight)
        else:
            self.solver.update(features, lesson.targets, lesson.sample_weight)
        lesson.taught = True
        if features.requires_grad:  # the head's own gradient would be computed for nobody
            lesson.hush(self.head)
        return features

    def _teach_and_hold_out(self, solver: SelfTuningRLS, lesson: Observation, features: Tensor) -> Tensor:
        """The same where the solver judges itself by samples it knows again: those must not teach the body either."""
        n = features.numel() // features.shape[-1]
        identity = next((x for x in lesson.inputs if x.ndim and len(x) and n % len(x) == 0), None)
        if self._head_fraction < 1.0:
            rows, targets, weight, chosen = self._share(features, lesson.targets, lesson.sample_weight)
            solver.update(
                rows, targets, weight, identity=None if identity is None else identity[chosen // (n // len(identity))]
            )
            held = solver.held_out
            if held is not None:
                held = torch.zeros(n, dtype=torch.bool, device=held.device).index_put(
                    (chosen[held],), held.new_ones(())
                )
        else:
            solver.update(features, lesson.targets, lesson.sample_weight, identity=identity)
            held = solver.held_out
        if held is None or not features.requires_grad:
            return features
        return torch.where(held.view(*features.shape[:-1], 1), features.detach(), features)

    def _teach_on_device(self, lesson: Observation, features: Tensor) -> None:
        """The same inside a CUDA graph, where the host can neither draw rows nor look at numbers."""
        rows, targets = features.detach().reshape(-1, features.shape[-1]), lesson.targets
        targets = targets.reshape(len(rows), -1)
        count = math.ceil(self._head_fraction * len(rows))
        if count < len(rows):
            chosen = torch.rand(len(rows), device=rows.device).topk(count).indices
            rows, targets = rows[chosen], targets[chosen]
        self.solver.update_captured(rows, targets)  # type: ignore[attr-defined]

    def capture(
        self, inputs: Tensor, targets: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Step:
        """A `learn` for batches like these that runs as one CUDA graph on a GPU, and plainly on a CPU.

        Choose it where the step is so small that launching its kernels costs more than running them.
        """
        return capture(self.model, self, inputs, targets, loss_fn or self.solver.loss)

    def _share(
        self, features: Tensor, targets: Tensor, sample_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The rows drawn for the head, at `head_fraction` of them, and which they are."""
        labels = (
            isinstance(targets, Tensor) and not targets.is_floating_point() and targets.shape == features.shape[:-1]
        )
        check_rows(self.head, features, None if labels else targets)
        check_weight(self.head, features, sample_weight)
        rows = features.reshape(-1, features.shape[-1])
        count = math.ceil(self._head_fraction * len(rows))
        chosen = torch.randperm(len(rows), generator=self._generator)[:count].to(rows.device)
        weight = None if sample_weight is None else sample_weight.reshape(-1)[chosen]
        few = targets.reshape(-1) if labels else targets.reshape(len(rows), -1)
        return rows[chosen], few[chosen], weight, chosen

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
            "head_fraction": self._head_fraction,
            "generator": self._generator.get_state(),
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
        if [list(shapes) for shapes in own["body"]] != self._body_shapes():
            raise ValueError(
                f"state_dict belongs to a body with parameter shapes {own['body']}, this one has {self._body_shapes()}"
            )
        self.solver.load_state_dict(own["head"])  # checks before it changes anything
        self.head_fraction = own["head_fraction"]
        self._generator.set_state(own["generator"].cpu())
        self.base.load_state_dict(state_dict)
        self._adopt_base()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _body_shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for p in group["params"]] for group in self.base.param_groups]

    def _adopt_base(self) -> None:
        # One list and one dict for both, so a scheduler on either is a scheduler on both.
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def _attach(self) -> None:
        for module in (self.head, self.model):
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, Tap):
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
        for kind in (Tap, InputTap):
            if not hasattr(kind.__call__, "_torchdynamo_disable"):  # here, not at import, where it would cost a second
                kind.__call__ = torch.compiler.disable(kind.__call__)  # type: ignore
        self.head.register_forward_pre_hook(Tap(self))
        if isinstance(self.solver, SelfTuningRLS) and self.model is not self.head:
            self.model.register_forward_pre_hook(InputTap(self), with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        derived = ("param_groups", "state", "_generator")
        state = {name: value for name, value in self.__dict__.items() if name not in derived}
        state["_generator_state"] = self._generator.get_state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        generator = state.pop("_generator_state")
        self.__dict__.update(state)
        self._generator = torch.Generator()
        self._generator.set_state(generator)
        self._adopt_base()
        self._patch_step_function()
        self._attach()

    def __repr__(self) -> str:
        return f"SepSA(head={self.head_name!r}, solver={self.solver!r}, base={self.base!r})"


class Observation:
    """The context `SepSA.observe` returns."""

    __slots__ = ("_hushed", "inputs", "on_device", "optimizer", "sample_weight", "targets", "taught")

    def __init__(
        self, optimizer: SepSA, targets: Tensor, sample_weight: Tensor | None, on_device: bool = False
    ) -> None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
        self.optimizer, self.targets, self.sample_weight = optimizer, targets, sample_weight
        self.taught, self.on_device = False, on_device
        self.inputs: list[Tensor] = []  # the model's, where the solver asks for them
        self._hushed: list[nn.Parameter] = []

    def __enter__(self) -> Observation:
        if self.optimizer._lesson is not None:
            raise RuntimeError("observe is already active: one observe for each pass through the model")
        self.optimizer._lesson = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.optimizer._lesson = None
        for parameter in self._hushed:
            parameter.requires_grad_(True)
        if kind is None and not self.taught:
            raise RuntimeError(
                f"the forward inside observe never reached the head {self.optimizer.head_name!r}: nothing was learned; "
                "run the model inside the context, or name the right head in SepSA(model, base, head=...)"
            )

    def hush(self, head: nn.Linear) -> None:
        """No gradient for the head until the context ends."""
        for parameter in head._parameters.values():
            if parameter is not None and parameter.requires_grad:
                parameter.requires_grad_(False)
                self._hushed.append(parameter)


class Tap:
    """The forward pre-hook on the head, where a compiled model breaks its graph.

    It holds its optimizer weakly and is copied without it, so a copied or saved model is free of us.
    """

    def __init__(self, optimizer: SepSA | None = None) -> None:
        self.optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        optimizer = self.optimizer()
        if optimizer is None or optimizer._lesson is None:
            return None
        features = optimizer._teach(args[0])
        return None if features is args[0] else (features, *args[1:])

    def __reduce__(self) -> tuple[type[Tap], tuple[()]]:
        return type(self), ()


class InputTap(Tap):
    """The forward pre-hook on the model, for a solver that asks which samples these are."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        optimizer = self.optimizer()
        if optimizer is not None and optimizer._lesson is not None:
            optimizer._lesson.inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


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
        refuse_head_parameters(head_name, head, (p for group in base.param_groups for p in group["params"]))
        return base
    body = [parameter for parameter in model.parameters() if id(parameter) not in of_head]
    return kind([{"params": body}], **options)


def refuse_head_parameters(head_name: str, head: nn.Linear, parameters: Iterable[Tensor]) -> None:
    """The solver alone moves the head."""
    named = {id(p): f"{head_name}.{name}" for name, p in head.named_parameters()}
    for parameter in parameters:
        if id(parameter) in named:
            raise ValueError(
                f"base owns the head's parameter {named[id(parameter)]!r}, which the head solver moves: "
                "build it on the other parameters, or pass its class and let SepSA build it"
            )
