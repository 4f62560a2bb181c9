"""One observation: the context of a forward pass in which a head learns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from threading import get_ident
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from sepsa.heads import Capturable, LearnsPartly, Settles
from sepsa.heads.base.checks import check_rows, check_weight
from sepsa.heads.base.partial_targets import weighted_mean
from sepsa.ranks import exchange
from sepsa.torch_internals import parameters_of, pre_hooks_of, saved_tensors_hooks
from sepsa.training.observer import Checkpoint, HeadNotReached, Observer
from sepsa.training.rows import are_labels, may_be_missing, observed_rows, weight_rows


class Observation:
    """The context that `observe` returns, for one forward pass: the head learns before it computes its output.

    An error inside it leaves the head, its solver, the counters and the statistics of normalization layers as before.
    """

    # Not set in __init__, which runs at every step.
    learned = learning = reached = captured = among_ranks = False
    idle = False  # whether the head is frozen and does not learn
    thread = 0  # that opened the context; a forward pass in another thread does not learn and is not counted
    observed: Tensor | None = None  # a mask (n,) of the rows that have a target; None: all have one
    finite: Tensor | None = None  # the flag that `update_captured` returned
    group: Any = None  # the process group of a captured step
    samples = 0  # of a captured step, each of which may have several rows of features
    frozen: tuple[nn.Parameter, ...] = ()
    before: Checkpoint | None = None
    features: Tensor | None = None  # of an update whose result is on the GPU

    def __init__(
        self, observer: Observer, targets: Tensor, sample_weight: Tensor | None = None, later: bool = False
    ) -> None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
        self.observer, self.targets, self.sample_weight = observer, targets, sample_weight
        self.later = later  # whether `settle` will be called before the body moves

    # ------------------------------------------------------------------ the context

    def __enter__(self, statistics: bool = True) -> Observation:
        """Make this the pass in progress, with a checkpoint, that of the model's statistics on request."""
        observer, hook = self.observer, self.observer.hook
        self.thread = get_ident()
        if hook.current is not None:
            if hook.current.thread != self.thread:
                raise RuntimeError(
                    f"observe or predict is active in another thread, and one thread at a time can use the head "
                    f"{observer.name!r}: hold a lock around observe, backward and step, or give each thread a model"
                )
            raise RuntimeError("observe is already active: use one observe for each forward pass")
        self.idle = observer.is_frozen()
        hooks, key = pre_hooks_of(observer.head), observer.hook_key
        if key in hooks and next(reversed(hooks)) != key:
            hooks[key] = hooks.pop(key)  # a later hook may change what the head is applied to
        if not self.captured:
            self.among_ranks = exchange.is_initialized()
            self.before = observer.checkpoint(statistics)
        # Among ranks not yet: whether a DistributedDataParallel waits for the head's gradient is known in its forward.
        if not self.among_ranks:
            for parameter in observer.body:  # `any` of a generator takes four times as long
                if parameter.requires_grad:
                    self.freeze()
                    hook.observed = True
                    break
        if observer.check is not None:
            observer.check.watch(observer.model, observer.head, hook.passing)
        hook.current = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        close((self,), error, trace)

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the pass in progress; raises an error where it did not reach the head."""
        observer = self.observer
        missed = observer.not_reached() if error is None and not self.learned else error
        try:
            if self.among_ranks and not (self.reached or self.idle) and isinstance(missed, Exception):
                observer.ranks.report_failure(missed, None if isinstance(missed, HeadNotReached) else trace)
        finally:
            observer.hook.current = None
            observer.hook.observed = False
            self.thaw()
            if observer.check is not None:
                observer.check.end()
        if error is None and missed is not None:
            raise missed

    def judge(self) -> None:
        """Warn, after the first observation, of a model that does not return its head's output, and of labels."""
        observer, targets = self.observer, self.targets
        check, observer.check = observer.check, None
        if check is not None:
            check.judge(observer.name, observer.model, observer.head, self.observed)
        if observer.by_default and not self.captured:
            observer.by_default = False
            if targets.numel() > 1 and bool(((targets == 0) | (targets == 1)).all()):
                warnings.warn(
                    f"the first targets of the head {observer.name!r} are all 0 or 1, and it learns them by least "
                    'squares: for labels take SepSA(..., solver="logistic"), or "cross-entropy" for classes that '
                    'exclude each other; solver="squared" keeps least squares',
                    stacklevel=4,
                )

    def undo(self) -> None:
        """Restore what was there when the context began, unless the body has moved since."""
        if self.before is not None:
            self.observer.rollback(self.before, self.reached)
            self.before = None

    def freeze(self) -> None:
        """Compute no gradient of the head until the context ends, because nothing uses it."""
        for parameter in parameters_of(self.observer.head).values():
            if parameter is not None and parameter.requires_grad:
                parameter.requires_grad = False
                self.frozen = (*self.frozen, parameter)

    def thaw(self) -> None:
        """Compute gradients of the head again."""
        for parameter in self.frozen:
            parameter.requires_grad = True
        self.frozen = ()

    # ------------------------------------------------------------------ the pass

    def learn(self, features: Tensor) -> Tensor:
        """Let the head learn. Returns the features that the head is called with."""
        observer = self.observer
        if self.learned:
            raise RuntimeError(
                f"the forward inside observe reached the head {observer.name!r} twice: "
                "use one observe for each pass through the model"
            )
        self.reached = self.learning = True  # so that the solver may call its head
        try:
            if self.captured:
                if not self.idle:
                    self.learn_captured(features)
            elif self.idle:
                self.check(features, observer.partial_targets)
                self.find_observed(features)
            elif self.among_ranks and (group := observer.ranks.group()) is not None:
                self.learn_together(group, features)
            else:
                self.learn_alone(features)
        except ValueError as error:
            if not str(error).startswith("targets must have "):  # a shape
                raise
            raise ValueError(
                f"{error}; the head is {observer.name!r}, {observer.head}: to choose another nn.Linear of the model, "
                "SepSA(model, base, head=...)"
            ) from None
        finally:
            self.learning = False
        self.learned = observer.learned = True
        # torch.utils.checkpoint computes the head again in the backward pass, when it is not frozen.
        if not features.requires_grad or saved_tensors_hooks(True) is not None:
            self.thaw()
        else:
            if self.observed is not None:  # the body does not learn from rows without a target
                features = torch.where(self.observed.view(*features.shape[:-1], 1), features, features.detach())
            if not self.frozen and not (self.among_ranks and exchange.takes_gradients(observer.head)):
                self.freeze()
        return features

    def learn_compiled(self, features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Let the head learn in a compiled graph, which may hold copies of its parameters."""
        frozen, self.frozen = self.frozen, ()
        try:
            self.learn(features)
        finally:
            self.frozen = frozen
        head = self.observer.head
        for copy, parameter in ((weight, head.weight), (bias, head.bias)):
            if copy is not None and copy.data_ptr() != parameter.data_ptr():
                copy.copy_(parameter.detach())

    def learn_alone(self, features: Tensor) -> None:
        """Let the head learn `head_fraction` of this process's rows that have a target."""
        observer, targets = self.observer, self.targets
        # Reading targets on a GPU makes the host wait for the forward pass. So there the solver, which checks its
        # result, finds the first batch with missing targets, unless rows are drawn and it may not see them.
        # On a CPU only an `RLS` does, because others may learn from rows of which no output is observed.
        if observer.refuses_missing or not targets.is_cpu:
            look = observer.expects_missing or observer.head_fraction < 1.0
        else:
            look = may_be_missing(targets)
        if look:
            observer.expects_missing = self.find_observed(features)
        samples = features, targets, self.sample_weight
        if self.observed is not None or observer.head_fraction < 1.0:
            self.check(features, observer.partial_targets)
            samples = self.draw(features)
            if not len(samples[0]):
                return
        try:
            if observer.epochs is not None:
                observer.epochs.update(samples, features.numel() // features.shape[-1])
            elif features.is_cuda and self.later and observer.settles and not targets.is_floating_point():
                self.learn_later(samples, features)
            else:
                observer.solver.update(*samples)
        except ValueError:
            if self.observed is not None or not self.find_observed(features):
                raise
            observer.expects_missing = True
            self.learn_alone(features)

    def learn_later(self, samples: Any, features: Tensor) -> None:
        """Let the head learn, and wait in `settle` for whether it could."""
        solver = cast(Any, self.observer.solver)
        self.observer.waiting, self.features = self, features.detach()
        solver.later = True
        try:
            solver.update(*samples)
        finally:
            solver.later = False

    def settle(self) -> None:
        """Wait for the update, without a target for some of its rows learn the others; an error undoes all."""
        observer, features = self.observer, self.features
        observer.waiting = None
        try:
            cast(Settles, observer.solver).settle()
        except ValueError:
            if features is None or self.observed is not None or not self.find_observed(features):
                self.undo()
                raise
            observer.expects_missing, self.later = True, False
            self.learn_alone(features)

    def learn_together(self, group: Any, features: Tensor) -> None:
        """Let the head learn the rows of all ranks."""
        observer, own, error, offered = self.observer, None, None, 0
        try:
            if features.numel():
                self.find_observed(features)
                self.check(features, per_output_weight=False)
            own = self.draw(features)
            offered = features.numel() // features.shape[-1]
        except Exception as refused:  # raised after the exchange that the other ranks wait for
            error = refused
        samples, offered = exchange.gather(group, own, error, offered)
        if observer.ranks.start_together(group) and self.before is not None:
            start = observer.checkpoint(statistics=False).state  # which a failed batch does not undo
            self.before = self.before._replace(state=start)
        if samples is None:
            return
        if observer.epochs is None:
            observer.solver.update(*samples)
        else:
            observer.epochs.update(samples, offered)

    def learn_captured(self, features: Tensor) -> None:
        """Let the head learn inside a CUDA graph, without the host."""
        observer, rows = self.observer, features.detach().reshape(-1, features.shape[-1])
        targets, n = self.targets.reshape(len(rows), -1), len(rows)
        observer.rows_per_sample = max(1, n // max(self.samples, 1))
        count = math.ceil(observer.head_fraction * n)
        if count < n:
            drawn = torch.rand(n, device=rows.device).topk(count).indices
            rows, targets = rows[drawn], targets[drawn]
        if self.group is not None:
            rows, targets = (exchange.gather_equal(self.group, part) for part in (rows, targets))
        self.finite = cast(Capturable, observer.solver).update_captured(rows, targets)

    def check(self, features: Tensor, per_output_weight: bool) -> None:
        """Raise an error for samples that cannot be indexed by rows; the solver checks integer targets."""
        head, targets, partial = self.observer.head, self.targets, self.observer.partial_targets
        integers = not targets.is_floating_point() and (partial or are_labels(features, targets))
        check_rows(head, features, None if integers else targets)
        if not per_output_weight:
            check_weight(head, features, self.sample_weight)

    def draw(self, features: Tensor) -> exchange.Samples:
        """Draw `head_fraction` of the observed rows at random."""
        flat, targets, weight = features.detach().reshape(-1, features.shape[-1]), self.targets, self.sample_weight
        fraction, n = self.observer.head_fraction, len(flat)
        rows: Any = slice(None) if self.observed is None else self.observed.nonzero()[:, 0]
        if fraction < 1.0:
            count = len(flat[rows])
            drawn = torch.randperm(count, generator=self.observer.generator)[: math.ceil(fraction * count)]
            rows = torch.arange(n, device=flat.device)[rows][drawn.to(flat.device)]
        targets = targets.detach().reshape((n,) if are_labels(features, targets) else (n, targets.shape[-1]))
        return exchange.Samples(flat[rows], targets[rows], None if weight is None else weight_rows(weight, n)[rows])

    def find_observed(self, features: Tensor) -> bool:
        """Note which rows have a target. Returns whether some have none."""
        self.observed = observed_rows(features, self.targets, self.observer.partial_targets)
        return self.observed is not None

    # ------------------------------------------------------------------ after the pass

    def loss(self, outputs: Tensor) -> Tensor:
        """The solver's loss: the weighted mean over samples that have a target."""
        targets, weight, solver = self.targets, self.sample_weight, self.observer.solver
        if self.observed is not None:
            rows, n = self.observed, len(self.observed)
            outputs = outputs.reshape(n, -1)[rows]
            labels = targets.numel() == n and not targets.is_floating_point()
            targets = targets.reshape((n,) if labels else (n, -1))[rows]
            weight = None if weight is None else weight_rows(weight, n)[rows]
            if not len(outputs):
                return outputs.sum()  # 0, with a gradient of 0
        if weight is None:
            return solver.loss(outputs, targets)
        if self.observer.partial_targets:
            return cast(LearnsPartly, solver).loss(outputs, targets, weight)
        n = weight.numel()
        targets = targets.reshape(n, 1) if targets.shape == weight.shape else targets.reshape(n, 1, -1)
        each: Tensor = torch.func.vmap(solver.loss)(outputs.reshape(n, 1, -1), targets)  # of one sample each
        return weighted_mean(each, weight.reshape(n).to(each.dtype))


def close(observations: Iterable[Observation], error: BaseException | None, trace: TracebackType | None) -> None:
    """End observations, with the error that was raised inside them, if any. A failure of one undoes all."""
    failure = error
    for observation in observations:
        try:
            observation.end(error, trace)
        except BaseException as missed:  # the others must end, after KeyboardInterrupt too
            failure = missed if failure is None else failure
    if failure is None:
        try:
            for observation in observations:
                if observation.observer.check is not None or observation.observer.by_default:
                    observation.judge()
            return
        except BaseException as refused:  # a warning that is an error
            failure = refused
    for observation in observations:
        observation.undo()
    if error is None:
        raise failure
