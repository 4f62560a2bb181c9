"""What several ranks share before a head update, so that each performs the same one and holds the same head.

As in SyncBatchNorm the exchange happens in the forward pass. Either every rank sends its rows to all; or, for a solver
that needs second moments alone, and where that is less, the ranks reduce their rows to as few as those moments have
columns. Every rank then updates its head with the same rows: the heads are equal to the last bit, and equal to that of
one process with the whole batch.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# What a rank says before it sends rows, as integers.
_ROWS, _REFUSED, _WEIGHTED, _WIDTH, _TARGET, _IDENTITY = range(6)
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


@runtime_checkable
class LearnsMoments(Protocol):
    """A solver to which rows with equal second moments, those of a column of ones included, are equal."""

    learns_moments: bool


class Samples(NamedTuple):
    """Samples as rows: features (n, k), targets (n, m) or class indices (n,), weights (n,), inputs (n, ...)."""

    features: Tensor
    targets: Tensor
    sample_weight: Tensor | None
    identity: Tensor | None = None


# Whether there is a process group: asked at every step, and always answered.
is_initialized: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False


def has_ranks(setting: Any) -> bool:
    """Whether there are other ranks, of which a `setting` says nothing."""
    return setting == "auto" and dist.get_world_size() > 1


def active_group(setting: Any, sharded: Any, joined: Any = None) -> Any:
    """The process group whose ranks learn together, or None where this rank learns alone.

    `setting` is a group, None for no exchange, or "auto": that of the DistributedDataParallel whose forward this is, or
    `sharded`, that of fully_shard. `joined` is the DistributedDataParallel that `join_ranks` watches, if any.
    """
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and ddp._join_config.enable and ddp is not joined:
        raise RuntimeError(
            "inside ddp.join() a rank that has run out of batches would miss the exchange of samples for the head: "
            "write `with optimizer.join(ddp):` in its place"
        )
    if setting == "auto":
        setting = sharded if ddp is None else ddp.process_group
    return setting if setting is not None and dist.get_world_size(setting) > 1 else None


@contextlib.contextmanager
def join_ranks(ddp: Any, observed: Callable[[], bool], take_part: Callable[[], None], **options: Any) -> Iterator[None]:
    """`ddp.join(**options)`, in which a rank that has run out of batches calls `take_part` whenever others run forward.

    It does so where their forward reaches the head: DDP's own hook for such ranks matches what its forward and backward
    send, and asks in between whether there will be a backward. `observed` says whether a forward will reach the head.
    """
    will_sync, before = ddp._check_global_requires_backward_grad_sync, ddp._join_config

    def ask(is_joined_rank: bool) -> Any:
        if not is_joined_rank and not observed():
            raise RuntimeError(
                "inside join every pass through the model must be inside observe, with targets for all heads: "
                "ranks that have run out of batches take part in the heads' exchange at each"
            )
        sync = will_sync(is_joined_rank=is_joined_rank)
        if is_joined_rank:
            take_part()
        return sync

    ddp._check_global_requires_backward_grad_sync = ask
    try:
        with ddp.join(**options):
            yield
    finally:
        del ddp._check_global_requires_backward_grad_sync
        ddp._join_config = before  # which torch leaves as it is inside


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


def takes_gradients(head: nn.Linear) -> bool:
    """Whether a DistributedDataParallel waits for gradients of the head, which must then be computed all the same."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None or not ddp.parameters_to_ignore:
        return ddp is not None
    return any(p is head.weight and name not in ddp.parameters_to_ignore for name, p in ddp.module.named_parameters())


def warn_alone(name: str) -> None:
    """Say that ranks drift apart."""
    warnings.warn(
        f"torch.distributed has {dist.get_world_size()} ranks, but the model runs in no DistributedDataParallel or "
        f"fully_shard: the head {name!r} learns from this rank's samples alone. Wrap the model, or pass "
        "SepSA(..., process_group=torch.distributed.group.WORLD), or process_group=None to say that it is meant so",
        stacklevel=5,
    )


def share_start(group: Any, head: nn.Linear, state: dict[str, Any]) -> dict[str, Any]:
    """The first rank's head, written into `head`, and its solver's state, which is returned."""
    first = dist.get_global_rank(group, 0)
    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        box[0] = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
    dist.broadcast_object_list(box, src=first, group=group, device=_device(group))
    for parameter in head._parameters.values():
        if parameter is not None:
            value = parameter.detach().to(_device(group))
            dist.broadcast(value, src=first, group=group)
            parameter.detach().copy_(value)
    shared: dict[str, Any] = box[0]
    return shared


def gather(group: Any, rows: Samples | None, error: Exception | None, moments: bool) -> tuple[Samples | None, slice]:
    """The rows of all ranks in the order of ranks, and where this rank's are among them; None where there are none.

    `rows` is None where `error` says why, which is then raised on this rank, and told on the others. `moments` says
    that second moments are enough.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    device = _device(group)
    said = _gather_tensor(group, _say(rows).to(device), size).tolist()
    refused = [k for k, words in enumerate(said) if words[_REFUSED]]
    if refused:
        if error is not None:
            raise error
        raise RuntimeError(f"rank {refused[0]} refused its samples, so no rank has learned: its own error says why")
    assert rows is not None
    counts = [words[_ROWS] for words in said]
    most = max(counts)
    if most == 0:
        return None, slice(0)
    spoken = [words for words in said if words[_ROWS]]
    for words in spoken[1:]:
        if words[_WIDTH:] != spoken[0][_WIDTH:]:
            raise ValueError(
                f"ranks must hold samples of one kind, got (dtype and width of features, targets, inputs) "
                f"{spoken[0][_WIDTH:]} and {words[_WIDTH:]}"
            )
    if not counts[rank]:
        rows = _empty_like(spoken[0], rows.features.device)
    if any(words[_WEIGHTED] for words in spoken):
        rows = rows._replace(sample_weight=_wide_weight(rows))
    if moments and rows.identity is None and moments_are_fewer(counts, rows):
        return gather_moments(group, rows, counts), slice(0)  # none of this rank's samples can be told among them
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    parts = [part for part in rows if part is not None]
    flat = torch.cat([_bytes(part) for part in parts], 1)
    padded = flat.new_zeros(most, flat.shape[1])
    padded[: len(flat)] = flat
    everyone = _gather_tensor(group, padded.to(device), size).to(flat.device)
    joined = torch.cat([everyone[k, :count] for k, count in enumerate(counts)])
    at = 0
    found: list[Any] = []
    for part in rows:
        if part is None:
            found.append(None)
            continue
        width = _width(part) * part.element_size()
        found.append(joined[:, at : at + width].clone().view(part.dtype).reshape(-1, *part.shape[1:]))
        at += width
    return Samples(*found), own


def capture_group(model: nn.Module, setting: Any, sharded: Any) -> Any:
    """The process group with whose ranks a captured step on `model` learns, or None; refused where a graph cannot."""
    if setting is None or not is_initialized() or (setting == "auto" and not has_ranks(setting)):
        return None
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "a DistributedDataParallel ties gradients to the stream it was made on, which no graph can record: make "
            "the SepSA on the model itself, with process_group=..., and its captured step averages the gradients"
        )
    if sharded is not None or setting == "auto":
        raise ValueError(
            "a captured step cannot tell which ranks learn together, so each would learn a head of its own: pass "
            "SepSA(..., process_group=...), or None to say that it is meant so; what fully_shard has sharded cannot be "
            "captured"
        )
    backend = dist.get_backend(setting)
    if "nccl" not in backend:
        raise ValueError(f"a captured step exchanges samples by NCCL, got a group of {backend}: use optimizer.observe")
    return setting


def same_start(group: Any, model: nn.Module) -> None:
    """Give all ranks the first one's parameters and buffers."""
    for value in (*model.parameters(), *model.buffers()):
        dist.broadcast(value.detach(), src=dist.get_global_rank(group, 0), group=group)


def check_same(group: Any, what: str, value: int, device: torch.device) -> None:
    """Refuse ranks of which each has another `value` of `what`."""
    values = _gather_tensor(group, torch.tensor([value], device=device), dist.get_world_size(group)).flatten().tolist()
    if len(set(values)) > 1:
        raise ValueError(f"{what} must be the same on all ranks of a captured step, got {values}")


def gather_equal(group: Any, rows: Tensor) -> Tensor:
    """The rows of all ranks, each of which has as many: without a look from the host."""
    everyone = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(everyone, rows.contiguous(), group=group)
    return everyone


def average_gradients(group: Any, parameters: Iterable[Tensor]) -> None:
    """Set every gradient to its mean over ranks, as DistributedDataParallel does, by one message for each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = torch.split_with_sizes(flat, [gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def on_all_ranks(group: Any, fine: Tensor) -> Tensor:
    """Whether something holds (0-d) on every rank."""
    flag = fine.to(torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return flag.bool()


def moments_are_fewer(counts: list[int], rows: Samples) -> bool:
    """Whether a rank receives fewer bytes by moments than by rows; the same answer on every rank."""
    if not rows.targets.is_floating_point():
        return False
    k, m = rows.features.shape[1], rows.targets.shape[1]
    row = k * rows.features.element_size() + m * rows.targets.element_size() + 8 * (rows.sample_weight is not None)
    rounds = math.ceil(math.log2(len(counts)))
    return (len(counts) - 1) * max(counts) * row > rounds * 8 * min(max(counts), k + 1 + m) * (k + 1 + m)


def gather_moments(group: Any, rows: Samples, counts: list[int]) -> Samples:
    """At most k + 1 + m rows with the second moments of those of all ranks, of which rank i has counts[i]."""
    x, y, w, _ = _wide(rows)
    assert w is not None
    k = x.shape[1]
    table = torch.cat([x, x.new_ones(len(x), 1), y], 1) * w.sqrt()[:, None]
    device = _device(group)
    return as_samples(reduce_rows(group, table.to(device), counts).to(x.device), k)


def reduce_rows(group: Any, table: Tensor, counts: list[int]) -> Tensor:
    """MᵀM of all ranks' tables (counts[i], c) one over the other, as a factor R with RᵀR = MᵀM, the same on all ranks.

    A butterfly of QR decompositions: in each round a rank meets another, and both factor their two tables, the lower
    rank's on top. Nothing is squared, so no digits are lost, and both compute the same bits. Ranks beyond a power of
    two hand their table over before, and receive the result.
    """
    rank, size, c = dist.get_rank(group), len(counts), table.shape[1]
    power = 1 << (size.bit_length() - 1)
    held = [min(count, c) for count in counts]
    table = triangular(table)
    for i in range(size - power):
        if rank == power + i:
            _exchange(group, i, table, None)
        elif rank == i:
            table = triangular(
                torch.cat([table, _exchange(group, power + i, None, table.new_empty(held[power + i], c))])
            )
        held[i] = min(held[i] + held[power + i], c)
    bit = 1
    while bit < power:
        if rank < power:
            other = rank ^ bit
            theirs = _exchange(group, other, table, table.new_empty(held[other], c))
            table = triangular(torch.cat([table, theirs] if rank < other else [theirs, table]))
        held = [min(held[i] + held[i ^ bit], c) for i in range(power)]
        bit *= 2
    for i in range(size - power):
        if rank == i:
            _exchange(group, power + i, table, None)
        elif rank == power + i:
            table = _exchange(group, i, None, table.new_empty(held[0], c))
    return table


def triangular(table: Tensor) -> Tensor:
    """No more rows than columns, and the same second moments."""
    n, c = table.shape
    if n <= c:
        return table
    R: Tensor = torch.linalg.qr(table, mode="r").R.contiguous()  # as it arrives elsewhere: another layout, other bits
    return R


def as_samples(table: Tensor, k: int) -> Samples:
    """Rows of [Φ 1 Y]√w as samples, where column k need not be √w any more: after a reflection that makes it constant.

    The reflection leaves the second moments as they are; with s in all of column k, the rows divided by s are samples
    of weight s².
    """
    ones = table[:, k]
    size = torch.linalg.vector_norm(ones)
    if not bool(size > 0):  # every weight is 0
        return Samples(torch.zeros_like(table[:, :k]), torch.zeros_like(table[:, k + 1 :]), torch.zeros_like(ones))
    s = size / len(table) ** 0.5
    v = ones + torch.where(ones.sum() > 0, s, -s)
    table = table - torch.outer(v, (2 / (v @ v)) * (v @ table))
    samples = table / table[:, k : k + 1]
    return Samples(samples[:, :k], samples[:, k + 1 :], table[:, k].square())


def _exchange(group: Any, other: int, sent: Tensor | None, received: Tensor | None) -> Any:
    """Send to and receive from another rank of the group."""
    peer = dist.get_global_rank(group, other)
    operations = []
    if sent is not None and sent.numel():
        operations.append(dist.P2POp(dist.isend, sent.contiguous(), peer, group))
    if received is not None and received.numel():
        operations.append(dist.P2POp(dist.irecv, received, peer, group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return received


def _wide(rows: Samples) -> Samples:
    """In float64, with weights, as compressed rows are."""
    return Samples(rows.features.double(), rows.targets.double(), _wide_weight(rows))


def _wide_weight(rows: Samples) -> Tensor:
    if rows.sample_weight is not None:
        return rows.sample_weight.double()
    return torch.ones(len(rows.features), dtype=torch.float64, device=rows.features.device)


def _say(rows: Samples | None) -> Tensor:
    words = [0, 1, 0, 0, 0, 0, 0, 0, 0]
    if rows is not None:
        x, y, w, z = rows
        labels = y.ndim == 1
        words = [len(x), 0, int(w is not None), x.shape[1], -1 if labels else y.shape[1]]
        words += [-1 if z is None else _width(z)]
        words += [_DTYPES.index(t.dtype) if t is not None else -1 for t in (x, y, z)]
    return torch.tensor(words)


def _empty_like(words: list[int], device: torch.device) -> Samples:
    """No rows, of the kind that another rank has."""
    width, target, identity, x, y, z = words[_WIDTH:]
    none = torch.zeros(0, device=device)
    return Samples(
        none.new_zeros(0, width, dtype=_DTYPES[x]),
        none.new_zeros((0,) if target < 0 else (0, target), dtype=_DTYPES[y]),
        None,
        None if identity < 0 else none.new_zeros(0, identity, dtype=_DTYPES[z]),
    )


def _bytes(part: Tensor) -> Tensor:
    """A part's rows as bytes (n, width), whatever their dtype."""
    if not len(part):
        return torch.zeros(0, _width(part) * part.element_size(), dtype=torch.uint8, device=part.device)
    return part.detach().reshape(len(part), _width(part)).contiguous().view(torch.uint8)


def _width(part: Tensor) -> int:
    width = 1
    for size in part.shape[1:]:
        width *= size
    return width


def _gather_tensor(group: Any, value: Tensor, size: int) -> Tensor:
    """(ranks, ...) of every rank's value, all of one shape."""
    out = value.new_empty(size, *value.shape)
    dist.all_gather(list(out.unbind(0)), value.contiguous(), group=group)
    return out


def _device(group: Any) -> torch.device:
    """Where the group's collectives run: NCCL takes device memory alone."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
