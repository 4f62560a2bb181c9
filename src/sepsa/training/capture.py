"""The whole training step as one CUDA graph, because launching kernels takes most of the time of a small step.

`SepSA.capture` and, for any other optimizer, `capture` return a `Step`. On a CPU it is the plain step. On a GPU the
first calls run without a graph, which is also the warm-up that CUDA graphs need; then the step is recorded and
replayed. Torch compiles the forward and backward pass and the body's step where it can. A head solver needs only the
methods of `Capturable`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sepsa.heads import Capturable
from sepsa.heads.run.record import recording
from sepsa.ranks import exchange
from sepsa.torch_internals import is_compile_error
from sepsa.training.body_step import BodyStep, Loss
from sepsa.training.joint import parts_of
from sepsa.training.observation import Observation
from sepsa.training.observer import Observer, observers_of

WARM_UP = 3  # steps before a graph is recorded, the number that torch recommends
BURST = 8  # steps in one graph where that many remain: between two graphs the device idles for five microseconds
# Optimizers whose change of a parameter is proportional to the rate: a graph steps at rate 1 and multiplies the change.
# The others must be able to read the rate on the device, as those with an option `capturable` are.
PROPORTIONAL = tuple(getattr(torch.optim, name, ()) for name in ("Adadelta", "Muon", "RMSprop", "SGD"))
# Options of a group that a captured step sets itself.
OWN = ("lr", "capturable", "fused", "foreach")


class Step(Protocol):
    """One training iteration on a batch, or many on batches of a data set; `capture` returns it."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Learn one batch of the captured shape.

        Args:
            inputs: The batch.
            targets: Its targets.

        Returns:
            The loss, valid until the next call.
        """
        ...

    def run(self, inputs: Tensor, targets: Tensor, order: Tensor) -> None:
        """Learn the batches inputs[order[i]], targets[order[i]] one by one.

        On a GPU the steps run without synchronizing with the host.

        Args:
            inputs: The data set's inputs, on the device.
            targets: The data set's targets, on the device.
            order: Rows (steps, batch) of the batches, on the device.
        """
        ...

    @property
    def skipped(self) -> int:
        """The number of batches that were not finite and changed nothing; a step without a graph raises an error
        instead.
        """
        ...


def capture(
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: Loss,
    observer: Observer | None = None,
    compile: bool | None = None,
) -> Step:
    """Return a training step for a model and an optimizer on batches of fixed shapes; on a GPU it is a CUDA graph.

    Choose it for a model without a head solver; a SepSA has its own method `capture`.

    Args:
        model: The model.
        optimizer: Its optimizer; with an `observer` that of the body.
        inputs: A batch of the shape, dtype and device to come.
        targets: Its targets.
        loss_fn: A function of outputs and targets.
        observer: The head's observer, which `SepSA.capture` passes.
        compile: Whether torch compiles the passes and the body's step. None: where it can, with a warning where it
            cannot; False: never; True: an error where it cannot.

    Returns:
        A `Step`, called with inputs and targets.
    """
    check_devices(inputs, targets)
    if observer is None and next(observers_of(model), None) is not None:
        raise ValueError("the head of this model is trained by a SepSA: call optimizer.capture(inputs, targets)")
    if not inputs.is_cuda:
        return PlainStep(lambda x, y: first_order_step(model, optimizer, loss_fn, x, y))
    if observer is not None and not isinstance(observer.solver, Capturable):
        raise ValueError(
            f"solver {type(observer.solver).__name__} needs values on the host and cannot be captured: "
            "use RLS or SoftmaxNewton, or optimizer.learn without a graph"
        )
    check_optimizer(optimizer)
    group = observer and exchange.capture_group(model, observer.ranks.setting, observer.ranks.sharded)
    return GraphStep(model, optimizer, inputs, targets, loss_fn, observer, compile, group)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise an error for an optimizer whose step needs values on the host."""
    for part in parts_of(optimizer):
        if not isinstance(part, PROPORTIONAL) and "capturable" not in part.defaults:
            raise ValueError(
                f"{type(part).__name__} needs values on the host in its step and cannot be captured: use SGD, Muon or "
                "an optimizer with an option `capturable`, such as Adam, or learn without a graph"
            )


def check_devices(inputs: Tensor, targets: Tensor) -> None:
    """Raise an error for a batch on two devices."""
    if inputs.device != targets.device:
        raise ValueError(f"targets must be on {inputs.device}, where the inputs are, got {targets.device}")


def first_order_step(model: nn.Module, optimizer: Optimizer, loss_fn: Loss, inputs: Tensor, targets: Tensor) -> Tensor:
    """Run one iteration of a first-order optimizer. Returns the loss."""
    loss = loss_fn(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class PlainStep:
    """The step without a graph: `learn(inputs, targets)` returns the loss."""

    skipped = 0

    def __init__(self, learn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.learn = learn

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.learn(inputs, targets)

    def run(self, inputs: Tensor, targets: Tensor, order: Tensor) -> None:
        for rows in order:
            self(inputs[rows], targets[rows])


class GraphStep:
    """The step as CUDA graphs, one for each data set, batch size and number of rows that feed the head."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        inputs: Tensor,
        targets: Tensor,
        loss_fn: Loss,
        observer: Observer | None,
        compile: bool | None,
        process_group: Any,
    ) -> None:
        self.compile, self.process_group = compile, process_group
        if process_group is not None and observer is not None:
            exchange.broadcast_first(process_group, (*model.parameters(), *model.buffers()))
            observer.ranks.start_together(process_group)
        self.model, self.optimizer, self.loss_fn, self.observer = model, optimizer, loss_fn, observer
        self.solver: Any = None if observer is None else observer.solver  # a `Capturable`
        self.inputs, self.targets = torch.zeros_like(inputs), torch.zeros_like(targets)
        device = inputs.device
        # One stream for warm-up and recording, so that autograd's nodes stay on it.
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.finish_stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._all_rows = torch.arange(len(inputs), device=device).unsqueeze(0)
        self._skipped = torch.zeros((), dtype=torch.long, device=device)
        self._loss, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._graphs: dict[tuple[Hashable, ...], DataSetGraphs] = {}
        self._rates = [torch.tensor(float(group["lr"]), device=device) for group in optimizer.param_groups]
        proportional = [isinstance(part, PROPORTIONAL) for part in parts_of(optimizer) for _ in part.param_groups]
        self._scales = [rate if scaled else None for rate, scaled in zip(self._rates, proportional, strict=True)]
        self._options = [{k: v for k, v in g.items() if k not in ("params", *OWN)} for g in optimizer.param_groups]
        parts = model, optimizer, loss_fn, self._loss, self._skipped, self._scales
        self.plain = BodyStep(*parts, compiled=False)
        self.compiled = None if compile is False else BodyStep(*parts, compiled=True)
        for options in optimizer.param_groups:
            if "capturable" in options:
                options["capturable"] = True
        for state in optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.to(device)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if inputs.shape != self.inputs.shape or targets.shape != self.targets.shape:
            raise ValueError(
                f"inputs and targets must have the captured shapes {tuple(self.inputs.shape)} and "
                f"{tuple(self.targets.shape)}, got {tuple(inputs.shape)} and {tuple(targets.shape)}: capture again"
            )
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.run(self.inputs, self.targets, self._all_rows)
        return self._loss

    def run(self, inputs: Tensor, targets: Tensor, order: Tensor) -> None:
        if order.ndim != 2 or order.dtype != torch.long:
            raise ValueError(f"order must be (steps, batch) of torch.long, got {tuple(order.shape)} of {order.dtype}")
        for group, rate, options in zip(self.optimizer.param_groups, self._rates, self._options, strict=True):
            rate.fill_(float(group["lr"]))
            for name, value in options.items():
                if group[name] != value:
                    raise ValueError(
                        f"a captured step has {name}={value!r}, and now it is {group[name]!r}: capture again, and let "
                        "a scheduler change the rate alone, as by cycle_momentum=False"
                    )
        for left in self._within_epochs(order):
            while len(left):
                key = (inputs.data_ptr(), targets.data_ptr(), order.shape[1], *self._prepare())
                count = (None if self.solver is None else self.solver.replays()) or len(left)
                if key not in self._graphs:
                    if self.process_group is not None:
                        exchange.check_same(self.process_group, "order's batch size", order.shape[1], inputs.device)
                    self._graphs[key] = DataSetGraphs(self, inputs, targets, order.shape[1])
                self._graphs[key].run(left[:count])
                left = left[count:]

    def _within_epochs(self, order: Tensor) -> Iterator[Tensor]:
        """The batches of an order in parts, in which the head forgets alike."""
        observer = self.observer
        epochs = None if observer is None else observer.epochs
        if observer is None or epochs is None or epochs.length is None or observer.is_frozen():
            yield order
            return
        n = self._rows(order, observer)
        first = min(max(0, epochs.length - epochs.samples) // n, len(order))  # in the first epoch
        for part in (order[:first], order[first:]):
            if len(part):
                epochs.prepare(n)
                yield part
                epochs.count(self._rows(order, observer) * len(part))  # the first step tells the rows of a sample

    def _rows(self, order: Tensor, observer: Observer) -> int:
        """How many rows of all ranks the head learns in a step."""
        ranks = 1 if self.process_group is None else exchange.size_of(self.process_group)
        return ranks * order.shape[1] * observer.rows_per_sample

    @property
    def skipped(self) -> int:
        return int(self._skipped)

    def _prepare(self) -> tuple[Hashable, ...]:
        """Prepare the solver. Returns what a graph fixes when it is recorded: there is one graph for each value."""
        if self.observer is None:
            return (self.model.training,)
        head = "frozen" if self.observer.is_frozen() else self.solver.prepare_capture()
        return self.model.training, self.observer.head_fraction, head

    def iterate(self, inputs: Tensor, targets: Tensor) -> None:
        """Run one iteration without a host synchronization. A batch whose loss is not finite changes nothing."""
        self._clear_gradients()
        body, finishes = self.body, False
        if self.observer is None:
            loss, finite, buffers = body.forward(inputs, targets)
            flags = [finite]
        else:
            observation = Observation(self.observer, targets)
            observation.captured, observation.group, observation.samples = True, self.process_group, len(inputs)
            with observation:
                loss, finite, buffers = body.forward(inputs, targets)
            flags = [finite] if observation.finite is None else [finite, observation.finite]
            finishes = not observation.idle
            if finishes:  # in parallel with the backward pass, which does not need it
                self.finish_stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.finish_stream):
                    self.solver.finish_captured()
        loss.backward(self._one.to(loss.dtype).expand_as(loss))
        if self.process_group is not None:
            exchange.average_gradients(self.process_group, self.model.parameters())
            flags = [exchange.on_all_ranks(self.process_group, reduce(torch.logical_and, flags))]
        with torch.no_grad():
            body.step(loss.detach(), flags, buffers)
        self._clear_gradients()  # an eager step after this one would add to them
        if finishes:
            torch.cuda.current_stream().wait_stream(self.finish_stream)

    @property
    def body(self) -> BodyStep:
        """The passes and the body's step. The optimizer makes its state in the first, which is not compiled."""
        return self.plain if self.compiled is None or not self.optimizer.state else self.compiled

    def _clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class DataSetGraphs:
    """The graphs over one data set in device memory, with the position in the order of its batches."""

    def __init__(self, step: GraphStep, inputs: Tensor, targets: Tensor, batch: int) -> None:
        self.step, self.inputs, self.targets = step, inputs, targets
        self.order = torch.zeros(0, batch, dtype=torch.long, device=inputs.device)
        self.place = torch.zeros(1, dtype=torch.long, device=inputs.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by their number of steps
        self.warm = 0

    def run(self, order: Tensor) -> None:
        if len(order) > len(self.order):
            room = max(len(order), 4 * len(self.order))  # each size is compiled again
            self.order = order.new_zeros(room, order.shape[1])
            self.graphs = {}  # they read the old order's memory
            self.warm = min(self.warm, WARM_UP - 1)  # what is compiled again must run before it is recorded
        self.order[: len(order)].copy_(order)
        self.place.zero_()
        done = 0
        while done < len(order) and self.warm < WARM_UP:
            self._on_side_stream()
            self.warm += 1
            done += 1
        for steps in (BURST, 1):
            for _ in range((len(order) - done) // steps):
                if steps not in self.graphs:
                    self.graphs[steps] = self._record(steps)
                self.graphs[steps].replay()
                done += steps

    def _iterate(self) -> None:
        self.step.iterate(*self.step.body.fetch(self.inputs, self.targets, self.order, self.place))

    def _on_side_stream(self) -> None:
        step, side, place = self.step, self.step.stream, self.place.clone()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self._rates_as_tensors():
            try:
                self._iterate()
            except Exception as error:
                if step.compile or not is_compile_error(error):
                    raise
                step.compiled = None
                words = str(error).strip().splitlines()
                warnings.warn(
                    "torch cannot compile this step, so it is captured without compilation: "
                    f"{words[0] if words else error!r}; pass compile=False to silence this warning, or compile=True "
                    "for the full error",
                    stacklevel=2,
                )
                self.place.copy_(place)
                self._iterate()
        torch.cuda.current_stream().wait_stream(side)

    def _record(self, steps: int) -> torch.cuda.CUDAGraph:
        with recording(self.step.stream) as graph, self._rates_as_tensors():
            for _ in range(steps):
                self._iterate()
        return graph

    @contextlib.contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        """A context in which learning rates are tensors on the device where the optimizer can read them there.

        A compiled step uses the optimizer's own arithmetic: torch's compiler fuses better than handwritten kernels.
        """
        groups = self.step.optimizer.param_groups
        before: list[dict[str, Any]] = [{key: group[key] for key in OWN if key in group} for group in groups]
        for group, rate, scale in zip(groups, self.step._rates, self.step._scales, strict=True):
            group["lr"] = rate if scale is None else 1.0
            if self.step.body is self.step.compiled:
                group.update({key: False for key in ("fused", "foreach") if key in group})
        try:
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)
