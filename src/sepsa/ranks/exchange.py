"""The exchange of samples between ranks before a head update, after which every rank has the same head.

The exchange happens in the forward pass, like that of SyncBatchNorm: every rank sends its rows to all, and updates its
head with the same rows. The heads are bitwise equal, and equal to that of one process with the whole batch.
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sepsa.states.tree import tensors_of
from sepsa.torch_internals import active_ddp, foreach_copy, parameters_of

Headers: TypeAlias = list[list[int]]
# The entries of a rank's header, integers that it sends before its rows; from _WIDTH on, all ranks must agree.
_ROWS, _FAILED, _WEIGHTED, _OFFERED, _WIDTH = range(5)
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


class Samples(NamedTuple):
    """Samples as rows: features (n, k), targets (n, m) or class indices (n,), weights (n,)."""

    features: Tensor
    targets: Tensor
    sample_weight: Tensor | None = None


# Whether there is a process group, False where torch was built without torch.distributed.
is_initialized: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False


def size_of(group: Any = None) -> int:
    """The number of ranks of a group; None: of the process."""
    return dist.get_world_size(group)


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor, as fully_shard and tensor parallelism make it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def sharded_group(model: nn.Module) -> Any:
    """The group over which `fully_shard` has sharded parameters of the model, if it has."""
    for parameter in model.parameters():
        if is_sharded(parameter):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    return None


def ddp_in(trace: TracebackType | None) -> DistributedDataParallel | None:
    """The DistributedDataParallel inside whose forward an error was raised, if any."""
    code = DistributedDataParallel.forward.__code__
    frames = (frame for frame, _ in traceback.walk_tb(trace) if frame.f_code is code)
    return next((frame.f_locals["self"] for frame in frames), None)


def enter_forward(ddp: DistributedDataParallel) -> None:
    """Exchange buffers and buckets with other ranks, as at the start of a forward pass, and leave it there."""

    class Entered(Exception):
        pass

    def leave(module: nn.Module, args: Any) -> None:
        raise Entered

    hook = ddp.module.register_forward_pre_hook(leave, prepend=True)
    try:
        with contextlib.suppress(Entered):
            ddp.forward(None)  # type: ignore[no-untyped-call]
    finally:
        hook.remove()


def takes_gradients(head: nn.Linear) -> bool:
    """Whether a DistributedDataParallel waits for gradients of the head, so that they must be computed."""
    ddp = active_ddp()
    if ddp is None or not ddp.parameters_to_ignore:
        return ddp is not None
    return any(p is head.weight and name not in ddp.parameters_to_ignore for name, p in ddp.module.named_parameters())


def share_start(group: Any, head: nn.Linear, solver: Any) -> None:
    """Copy the first rank's head and solver state to all ranks; if a rank cannot load them, all raise an error."""
    state = solver.state_dict()
    dtypes = sorted({str(x.dtype) for x in tensors_of(state) if isinstance(x, Tensor) and x.is_floating_point()})
    shapes = [f"{name} {tuple(p.shape)} of {p.dtype}" for name, p in parameters_of(head).items() if p is not None]
    kinds = _gather_objects(group, f"{type(solver).__name__} in {', '.join(dtypes)} with {', '.join(shapes)}")
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"ranks must have one kind of head, got {kinds[0]} on rank 0 and {kind} on rank {rank}: "
                "build model and solver alike on all ranks"
            )
    sent = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
    first, failure = _broadcast_object(group, 0, sent), None
    try:
        solver.load_state_dict(first)
    except Exception as error:
        failure = error
    for rank, words in enumerate(_gather_objects(group, failure and _words(failure))):
        if words is not None:
            if failure is None:
                solver.load_state_dict(state)
            raise RuntimeError(f"rank {rank} could not load the solver's state of rank 0: {words}") from failure
    broadcast_first(group, (parameter for parameter in parameters_of(head).values() if parameter is not None))


def share_headers(
    group: Any, rows: Samples | None, error: Exception | None, failure: str, offered: int = 0
) -> tuple[Headers, str]:
    """The headers of all ranks and, if a rank failed, its number and the reason. `failure` is that of this rank."""
    try:
        header = _header(rows, offered)
    except ValueError as unknown:
        header, error = _header(None), unknown
    headers: Headers = gather_equal(group, header.to(_device(group))[None]).tolist()
    failed = next((rank for rank, header in enumerate(headers) if header[_FAILED]), None)
    if failed is None:
        return headers, ""
    reason = _broadcast_object(group, failed, f"{failure}, so no rank has learned: {error and _words(error)}")
    return headers, f"rank {failed} {reason}"


def gather(group: Any, rows: Samples | None, error: Exception | None, offered: int) -> tuple[Samples | None, int]:
    """The rows of all ranks in the order of ranks, None if there are none; and the number of rows from which those of
    all ranks were drawn, of which this rank had `offered`.

    `rows` is None where this rank's rows raised `error`: it is raised here, and a RuntimeError on the other ranks.
    """
    headers, failure = share_headers(group, rows, error, "refused its samples", offered)
    if failure:
        raise error or RuntimeError(failure)
    assert rows is not None
    counts, offered = [header[_ROWS] for header in headers], sum(header[_OFFERED] for header in headers)
    filled = [header for header in headers if header[_ROWS]]
    if not filled:
        return None, offered
    for header in filled[1:]:
        if header[_WIDTH:] != filled[0][_WIDTH:]:
            raise ValueError(
                f"ranks must hold samples of one kind, got {_kind(filled[0])} on rank {headers.index(filled[0])} and "
                f"{_kind(header)} on rank {headers.index(header)}: give all ranks the same dtypes and shapes"
            )
    width, target, x, y = filled[0][_WIDTH:]
    kinds = [(_DTYPES[x], [width]), (_DTYPES[y], [target] if target >= 0 else [])]
    if any(header[_WEIGHTED] for header in filled):
        weight = rows.features.new_ones(len(rows.features)) if rows.sample_weight is None else rows.sample_weight
        rows = rows._replace(sample_weight=weight.double())
        kinds.append((torch.float64, []))
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
    padded = torch.zeros(max(counts), sum(sizes), dtype=torch.uint8, device=_device(group))
    if n := len(rows.features):
        padded[:n] = torch.cat([_bytes(part) for part in rows if part is not None], 1)
    everyone = gather_equal(group, padded[None]).to(rows.features.device)
    joined = torch.cat([everyone[k, :count] for k, count in enumerate(counts)])
    columns = zip(torch.split_with_sizes(joined, sizes, 1), kinds, strict=True)
    return Samples(*(column.clone().view(dtype).reshape(-1, *shape) for column, (dtype, shape) in columns)), offered


def capture_group(model: nn.Module, setting: Any, sharded: Any) -> Any:
    """The process group of a captured step, or None; raises an error where no graph can be captured."""
    if setting is None or not is_initialized() or (setting == "auto" and size_of() == 1):
        return None
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "a DistributedDataParallel cannot be captured, because its gradients belong to the stream on which it was "
            "made: make the SepSA on the model itself, with process_group=...; its captured step averages the gradients"
        )
    if sharded is not None or setting == "auto":
        raise ValueError(
            "a captured step cannot infer which ranks train one head together: pass SepSA(..., process_group=...), or "
            "process_group=None to train one head per rank; a model sharded by fully_shard cannot be captured"
        )
    backend = dist.get_backend(setting)
    if "nccl" not in backend:
        raise ValueError(f"a captured step exchanges samples by NCCL, got a group of {backend}: use optimizer.observe")
    return setting


def broadcast_first(group: Any, tensors: Iterable[Tensor]) -> None:
    """Write the first rank's values into these tensors on all ranks."""
    for tensor in tensors:
        value = tensor.detach().to(_device(group))
        dist.broadcast(value, src=dist.get_global_rank(group, 0), group=group)
        tensor.detach().copy_(value)


def check_same(group: Any, what: str, value: int, device: torch.device) -> None:
    """Raise an error for a `value` of `what` that differs between ranks."""
    values = gather_equal(group, torch.tensor([value], device=device)).tolist()
    if len(set(values)) > 1:
        raise ValueError(f"{what} must be the same on all ranks of a captured step, got {values}")


def gather_equal(group: Any, rows: Tensor) -> Tensor:
    """The rows of all ranks, which have the same number of them, without a host synchronization."""
    everyone = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(everyone, rows.contiguous(), group=group)
    return everyone


def average_gradients(group: Any, parameters: Iterable[Tensor]) -> None:
    """Set every gradient to its mean over ranks, as DistributedDataParallel does, by one all-reduce per dtype."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in found):  # in one order on all ranks
        gradients = [gradient for gradient in found if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = torch.split_with_sizes(flat, [gradient.numel() for gradient in gradients])
        foreach_copy(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def on_all_ranks(group: Any, flag: Tensor) -> Tensor:
    """Whether a flag (0-d) is true on every rank."""
    flag = flag.to(torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return flag.bool()


def _header(rows: Samples | None, offered: int = 0) -> Tensor:
    """What this rank has, None after a failure; -1 as a width: class indices."""
    if rows is None:
        return torch.tensor([0, 1] + [0] * 6)
    x, y, w = rows
    for part in (x, y):
        if part.dtype not in _DTYPES:
            raise ValueError(f"samples of {part.dtype} cannot be sent to other ranks: cast them, as by .float()")
    widths = [x.shape[1], -1 if y.ndim == 1 else y.shape[1]]
    dtypes = [_DTYPES.index(part.dtype) for part in (x, y)]
    return torch.tensor([len(x), 0, int(w is not None), offered, *widths, *dtypes])


def _kind(header: list[int]) -> str:
    """The dtypes and widths of a header in words."""
    width, target, x, y = header[_WIDTH:]
    targets = "class labels" if target < 0 else f"targets (n, {target})"
    return f"features (n, {width}) of {_DTYPES[x]}, {targets} of {_DTYPES[y]}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _gather_objects(group: Any, value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _broadcast_object(group: Any, rank: int, value: Any) -> Any:
    """The value of one rank."""
    box = [value if dist.get_rank(group) == rank else None]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, rank), group=group, device=_device(group))
    return box[0]


def _bytes(part: Tensor) -> Tensor:
    """Rows of any dtype as bytes (n, width)."""
    rows = part.detach().reshape(len(part), -1)
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # with strides that a view may divide


def _device(group: Any) -> torch.device:
    """The device of the group's collectives: NCCL takes device memory alone."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
