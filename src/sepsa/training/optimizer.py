"""SepSA: a head solver and a first-order optimizer joined into one `torch.optim.Optimizer`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa.heads import HeadSolver
from sepsa.interrupt import DeferredInterrupt
from sepsa.torch_internals import load_hooks, parameters_of, save_hooks, step_hooks
from sepsa.training import prediction, saved
from sepsa.training.capture import PlainStep, Step, capture, check_devices
from sepsa.training.epochs import Epochs
from sepsa.training.joint import Base, take_step
from sepsa.training.model_parts import build_base, check_forgetting, find_heads, refuse_heads, solvers_for
from sepsa.training.observation import Observation
from sepsa.training.observe import Observations, is_collection
from sepsa.training.observer import Observer
from sepsa.training.repeats import Repeats
from sepsa.validation import at_least, in_range


class SepSA(Optimizer):
    """Train a model's linear head by a stochastic Newton method and its body by a first-order optimizer.

    Choose it wherever the last layer is an `nn.Linear`. It is a `torch.optim.Optimizer`, so schedulers, hooks and
    gradient scalers work on it. The head learns each batch in the forward pass, before it computes its output, so that
    every gradient of the body is taken at the head that has just learned the same samples: `base` on the body alone,
    with

        W <- solver(W; features_t, targets_t)
        body <- base(body, gradient of loss(W features_t, targets_t))

    Args:
        model: The model. Its head's weights stay in it and nowhere else.
        base: The body's optimizer: a class, which is built with `base_options` on every parameter that is not the
            head's; an instance on such parameters; a function that builds one from a list of (name, parameter); or a
            list of (class, options, which) for several, where `which` is a function of name and parameter, or None for
            the rest.
        head (nn.Linear | str | Sequence[nn.Linear | str] | None): The `nn.Linear` or its name in the model. None takes
            the last one that the model registers. A list makes several heads that share the body; `solver` and targets
            are then dicts by name or sequences.
        solver (HeadSolver | str | Mapping[str, HeadSolver] | Sequence[HeadSolver] | None): The head's solver, which
            becomes bound to the head, or the loss to minimize with the settings of sepsa: "squared" or None for an
            `RLS(ridge="evidence")`, "cross-entropy" for a `SoftmaxNewton(ridge="evidence")`, "logistic" for a
            `LogisticNewton(ridge="evidence")`.
        samples_per_epoch: Number of samples in one pass over the data, on all ranks, where the data are passed over
            several times: from the second epoch on the head remembers about as many, so that each counts once. The
            solver must have forgetting 1. For a head that is applied to each position of a sequence, the number of
            positions in one pass. None: the solver's `forgetting` decides.
        forget_per: "update": a solver with forgetting below 1 forgets with every batch. "step": only with the first
            batch after each step of the body, so that accumulated micro-batches equal the batch that they make up.
        process_group (ProcessGroup | Literal["auto"] | None): The group whose ranks learn one head from the samples of
            all. "auto" infers it from DistributedDataParallel or fully_shard; None lets each rank train its own head.
        **base_options: Arguments of the base class, such as `lr`. Pass an instance as `base` for options that have the
            name of an argument above.

    Attributes:
        base: The body's optimizer.
        model: The model.

    See also:
        `sepsa.observe`, for loops in which the optimizer is wrapped; `sepsa.muon` for a body trained by Muon.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from sepsa import SepSA
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        >>> optimizer = SepSA(model, base=torch.optim.Adam, lr=1e-3)
        >>> for step in range(50):
        ...     inputs = torch.randn(8, 4)
        ...     targets = inputs.sum(1, keepdim=True)
        ...     with optimizer.observe(targets):
        ...         loss = nn.functional.mse_loss(model(inputs), targets)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> bool(loss < 0.1)
        True
        >>> mean, std = optimizer.predict(torch.zeros(3, 4), return_std=True)
        >>> mean.shape, std.shape
        (torch.Size([3, 1]), torch.Size([3, 1]))
    """

    def __init__(
        self,
        model: nn.Module,
        base: Base,
        *,
        head: Any = None,
        solver: Any = None,
        samples_per_epoch: int | None = None,
        forget_per: Literal["update", "step"] = "update",
        process_group: Any = "auto",
        **base_options: Any,
    ) -> None:
        if samples_per_epoch is not None:
            samples_per_epoch = at_least("samples_per_epoch", samples_per_epoch, 1)
        heads = find_heads(model, head)
        if issubclass(base if isinstance(base, type) else type(base), SepSA):
            raise ValueError("base must be the body's own optimizer, got a SepSA")
        self.base = build_base(model, heads, base, base_options)
        self.model = model
        self._several = is_collection(head)
        solvers = solvers_for(list(heads), solver, self._several)
        is_default = solver is None or isinstance(solver, str)
        check_forgetting(forget_per, samples_per_epoch, solvers, is_default)
        for name, linear in heads.items():
            solvers[name].bind(linear)
        how = samples_per_epoch, forget_per == "step"
        self._observers = []
        for name, linear in heads.items():
            epochs = Epochs(solvers[name], linear.in_features, *how) if any(how) else None
            self._observers.append(Observer(model, name, solvers[name], linear, epochs, process_group, solver is None))
        # Called with targets and weights at each step.
        self._observation: Callable[..., Observation | Observations] = partial(Observations, self._observers)
        if not self._several:
            self._observation = partial(Observation, self._observers[0], later=True)
        self._repeats = Repeats() if is_default and samples_per_epoch is None else None
        super().__init__(self.base.param_groups, self.base.defaults)
        self._adopt_base()

    # ------------------------------------------------------------------ heads

    @property
    def heads(self) -> dict[str, nn.Linear]:
        """The heads, by their names in the model."""
        return {observer.name: observer.head for observer in self._observers}

    @property
    def solvers(self) -> dict[str, HeadSolver]:
        """The solvers, by the names of their heads."""
        return {observer.name: observer.solver for observer in self._observers}

    @property
    def head(self) -> nn.Linear:
        """The head; with several heads use `heads`."""
        return self._observer.head

    @property
    def solver(self) -> Any:
        """The head's solver; with several heads use `solvers`."""
        return self._observer.solver

    @property
    def _observer(self) -> Observer:
        if self._several:
            raise AttributeError("this SepSA has several heads: use optimizer.heads and optimizer.solvers, by name")
        return self._observers[0]

    # ------------------------------------------------------------------ learning

    @property
    def samples_per_epoch(self) -> int | None:
        """The number of samples in one pass over the data, as given; None: samples do not come again."""
        epochs = self._observers[0].epochs
        return None if epochs is None else epochs.length

    @property
    def head_fraction(self) -> float:
        """The share of each batch that the head learns, in (0, 1], drawn at random and rounded up; 1 by default.

        The paper's mini-batch rule is `optimizer.head_fraction = 0.5**epoch`.
        """
        return self._observers[0].head_fraction

    @head_fraction.setter
    def head_fraction(self, value: float) -> None:
        value = in_range("head_fraction", value, 0.0, 1.0)
        for observer in self._observers:
            observer.head_fraction = value

    def observe(self, targets: Any, sample_weight: Any = None) -> Observation | Observations:
        """Return a context in which the head learns in the model's forward pass, before it computes its output.

        Args:
            targets: The head's targets, as its solver takes them; NaN marks samples without a target. With several
                heads, a dict by the heads' names or a tuple in their order; heads without targets do not learn.
            sample_weight: Weights of the samples, one for each row of the head's input; with several heads also a
                collection.

        Returns:
            A context manager for one forward pass through the model. The pass must reach the head once.
        """
        if self._repeats is not None:
            self._repeats.watch(self.model, targets)
            self._warn_of_repeats()
        return self._observation(targets, sample_weight)

    def _warn_of_repeats(self) -> None:
        """Warn once where samples have come again."""
        if self._repeats is not None and self._repeats.found:
            self._repeats = None
            warnings.warn("samples repeat: pass samples_per_epoch=..., see docs/how-to/overfitting.md", stacklevel=3)

    def learn(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        sample_weight: Any = None,
    ) -> Tensor:
        """Run one training iteration: the head learns, then the body steps.

        Ctrl-C takes effect after the iteration, a second Ctrl-C at once. An error that is raised before the body has
        moved leaves all heads, the running statistics of normalization layers and gradients as before the call.

        Args:
            inputs: What the model is called with.
            targets: As for `observe`.
            loss_fn: A function of outputs and targets. None: the solver's loss, a weighted mean over samples with a
                target; with several heads the sum of their losses.
            sample_weight: As for `observe`. A given `loss_fn` does not see it.

        Returns:
            The loss at the new head, a detached scalar.
        """
        with DeferredInterrupt():
            observation = self._observation(targets, sample_weight)
            groups = self.param_groups
            before = [(p, p.grad.detach().clone()) for group in groups for p in group["params"] if p.grad is not None]
            try:
                with torch.enable_grad():
                    with observation:
                        outputs = self.model(inputs)
                        loss = observation.loss(outputs) if loss_fn is None else loss_fn(outputs, targets)
                    loss.backward()  # type: ignore[no-untyped-call]
                self.step()
            except BaseException:
                observation.undo()
                self.zero_grad()
                for parameter, gradient in before:  # of backward passes before this call
                    parameter.grad = gradient
                raise
            self.zero_grad()
        if self._repeats is not None and self._repeats.compares_next():
            self._repeats.compare(inputs, targets)
            self._warn_of_repeats()
        return loss.detach()

    def predict(self, inputs: Any, return_std: bool = False) -> Any:
        """Run the model in eval mode without learning, on request with standard deviations of its outputs.

        Choose `return_std` where you need an interval: the variance is σ²(1 + hᵀBh), of the targets about the output,
        with h the head's input, B the head's `covariance` and σ² estimated from the errors made while learning. It
        takes the body as fixed. The training mode of every module is restored. Threads take turns; a model in training
        mode cannot predict while another thread is inside `observe`.

        Args:
            inputs: What the model is called with.
            return_std: Whether to return standard deviations too. The head must be trained by a solver with a
                posterior (`RLS`, also inside `PerOutput`), and the model must return the head's output unchanged.

        Returns:
            The model's outputs, or a `Posterior(mean, std)` of the outputs and their standard deviations, of the same
            shape. With several heads `std` is a dict or tuple, as the outputs are.

        Raises:
            TypeError: `return_std` with a solver that has no posterior of its targets.
            ValueError: `return_std` where something follows the head, or before the first update.
            RuntimeError: Called inside `observe`.
        """
        if return_std:
            return prediction.predict_with_std(self.model, self._observers, inputs, self._several)
        with prediction.evaluating(self.model, self._observers):
            return self.model(inputs)

    def detach(self) -> contextlib.AbstractContextManager[Any]:
        """Remove the hooks from the model, as to pickle the whole model without sepsa.

        Returns:
            A context manager that attaches the hooks again when it ends; without `with` they stay removed.
        """
        put_back = contextlib.ExitStack()
        for observer in self._observers:
            observer.detach()
            put_back.callback(observer.attach)
        return put_back

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Let the base optimizer move the body.

        Args:
            closure: A function that evaluates the loss again, for base optimizers that need it.

        Returns:
            The result of the base optimizer: the closure's loss, or None.
        """
        for observer in self._observers:
            if observer.waiting is not None:
                observer.waiting.settle()
        hooks_before, hooks_after = step_hooks(self)
        for before in hooks_before.values():
            before(self, (closure,), {})
        result = take_step(self.base) if closure is None else self.base.step(closure)
        for observer in self._observers:
            observer.body_moved()
        for after in hooks_after.values():
            after(self, (closure,), {})
        return result

    step.hooked = True  # type: ignore[attr-defined]  # tells torch not to wrap this step: it wraps the base's

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the body, and those of the head, which it gets where the body is frozen.

        Args:
            set_to_none: Whether to set gradients to None instead of zero.
        """
        if set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.base.zero_grad(set_to_none=False)
        for observer in self._observers:
            for head_parameter in parameters_of(observer.head).values():
                if head_parameter is not None:
                    head_parameter.grad = None

    def capture(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        compile: bool | None = None,
    ) -> Step:
        """Return a `learn` for batches of fixed shapes that runs as one CUDA graph on a GPU, and without one on a CPU.

        Choose it where the step is so small that launching its kernels costs more than running them.

        Args:
            inputs: A batch of the shape, dtype and device to come.
            targets: Its targets.
            loss_fn: A function of outputs and targets; None for the solver's loss.
            compile: Whether torch compiles the passes and the body's step. None: where it can; False: never, which
                starts sooner; True: an error where it cannot.

        Returns:
            A `Step`, called with inputs and targets.
        """
        if not inputs.is_cuda:
            check_devices(inputs, targets)
            return PlainStep(partial(self.learn, loss_fn=loss_fn))
        return capture(self.model, self.base, inputs, targets, loss_fn or self.solver.loss, self._observer, compile)

    # ------------------------------------------------------------------ the Optimizer's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give further body parameters to the base optimizer.

        Args:
            param_group: As for `torch.optim.Optimizer.add_param_group`; the head's parameters are an error.
        """
        if self.param_groups is not self.base.param_groups:  # Optimizer.__init__ walks the base's own groups
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        refuse_heads(self.model, self.heads, [given] if isinstance(given, Tensor) else list(given))
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state and, under "sepsa", the solvers' states and SepSA's own."""
        hooks_before, hooks_after = save_hooks(self)
        for before in hooks_before.values():
            before(self)
        state = saved.written(self.base, self._observers)
        for after in hooks_after.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of a SepSA on a model of the same shape.

        Raises:
            ValueError: The state does not fit; nothing changed.
        """
        state_dict, (hooks_before, hooks_after) = dict(state_dict), load_hooks(self)
        for before in hooks_before.values():
            state_dict = before(self, state_dict) or state_dict
        saved.load(state_dict, self.base, self._observers)
        self._adopt_base()
        for after in hooks_after.values():
            after(self)

    def _adopt_base(self) -> None:
        # One list and one dict for both, so a scheduler on either is a scheduler on both.
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def __getstate__(self) -> dict[str, Any]:
        # As torch's optimizers: without hooks, and without the `step` of a scheduler, which belong to this object.
        left = {"param_groups", "state", *dir(type(self))}
        own = [name for name in vars(self) if not name.startswith(("_optimizer_", "_opt_called"))]
        return {name: vars(self)[name] for name in own if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt_base()

    def __repr__(self) -> str:
        if self._several:
            return f"SepSA(solvers={self.solvers!r}, base={self.base!r})"
        return f"SepSA(head={self._observer.name!r}, solver={self.solver!r}, base={self.base!r})"
