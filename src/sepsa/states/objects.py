"""Objects in checkpoints: `save` and `load`, for estimators, optimizers, head solvers and dicts of them.

Loading builds only the classes that `rebuilt_as` registers; every other object is given as `into`.
"""

from __future__ import annotations

import copy
import importlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sepsa._version import __version__
from sepsa.states import REGISTERED_BY
from sepsa.states.file import CheckpointError, Header, encode, lock, read, read_path, refuse_device, view, write
from sepsa.states.schema import limited_memory
from sepsa.states.tree import MISFITS, is_tensor, not_finite

if TYPE_CHECKING:
    from typing import Self

C = TypeVar("C", bound=type)
BUILT: dict[str, Any] = {}  # the classes that `load` builds, by their names in a file


def rebuilt_as(name: str) -> Callable[[C], C]:
    """Register a class, which `load` builds from its configuration where a file has this name."""
    return lambda cls: BUILT.setdefault(name, cls)


def built_class(kind: str) -> Any:
    """The class that is registered under this name, by a module that may have to be imported first; or None."""
    home = REGISTERED_BY.get(kind) or REGISTERED_BY.get(kind.rpartition(".")[0])
    if kind not in BUILT and home is not None:
        importlib.import_module(home)
    return BUILT.get(kind)


def save(what: Any, path: str | os.PathLike[str], *, position: Any = None, force: bool = False) -> None:
    """Write a checkpoint of an object, replacing the one at `path` completely or not at all.

    Choose it to resume after a crash or to move a model to another process: unlike a pickle, the file is verified when
    it is loaded, and loading it runs no code from it.

    Args:
        what: An estimator, a model of `sepsa.river`, a SepSA (with its model), a head solver, anything else with
            `state_dict` and `load_state_dict`, or a dict of such objects and plain values.
        path: The file. A second process that writes to it at the same time gets an error.
        position: Any plain value, such as an offset, which `inspect(path).position` returns.
        force: Whether to save a state with NaN or Inf where the checkpoint at `path` has finite numbers.

    Raises:
        CheckpointError: The state is not finite where the checkpoint at `path` is, or the file cannot be replaced.

    Examples:
        >>> import os, sepsa, tempfile, torch
        >>> head = sepsa.RLS().bind(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "head.sepsa")
        ...     sepsa.save(head, path, position=7)
        ...     _ = sepsa.load(path, into=sepsa.RLS().bind(torch.nn.Linear(2, 1)))
        ...     sepsa.checkpoint.inspect(path).position
        7
    """
    target = check_target(path)
    with lock(target):
        save_locked(what, target, position, force)


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the file that a checkpoint at `path` replaces; raise an error for a device or a FIFO."""
    refuse_device(path)
    return Path(os.path.realpath(path))


def save_locked(what: Any, target: Path, position: Any, force: bool) -> None:
    """Save as `save` does; the caller holds the lock of the target."""
    kind, configuration, state = describe(what)
    header, tensors = encode(kind, configuration, state, position)
    if not force:
        check_finite(
            {key: state[key] for key, part in configuration.items() if part[0]} if kind == "dict" else state, target
        )
    write(target, header, tensors)


def check_finite(state: Any, target: Path) -> None:
    """Raise an error for NaN and Inf in arrays that are finite in the checkpoint at `target`."""
    found = list(not_finite(state))
    if not found or not target.exists():
        return
    try:
        known = set(not_finite(read_path(target)[1]))
    except CheckpointError:  # it is damaged, so that nothing is lost
        return
    for path in found:
        if path not in known:
            raise CheckpointError(
                f"{path} has NaN or Inf where the checkpoint at {target} is finite: nothing was saved; "
                "continue from that checkpoint, save to another path, or pass force=True"
            )


def load(path: str | os.PathLike[str], into: Any = None) -> Any:
    """Load a checkpoint. The object continues with the same bits.

    Args:
        path: The file, which is verified completely before anything changes.
        into: Not needed for estimators and models of `sepsa.river`, which are built. Other objects: one that was built
            as the saved one was, which loads the state; for a dict that was saved, a dict of such objects by the same
            keys.

    Returns:
        The object that was built, or `into`; for a dict that was saved, a dict with its plain values too.

    Raises:
        CheckpointError: The file is damaged, too new, or holds something else; nothing changed.
    """
    return unpack(*read_path(path), into, str(path))


def to_bytes(what: Any, *, position: Any = None) -> bytes:
    """Return a checkpoint as bytes, to store in a database or to send to another process.

    Args:
        what: As for `save`.
        position: As for `save`.

    Returns:
        The content of the file that `save` writes.
    """
    header, tensors = encode(*describe(what), position)
    return b"".join([header, *map(view, tensors)])


def from_bytes(data: bytes, into: Any = None) -> Any:
    """Load a checkpoint from bytes.

    Args:
        data: The result of `to_bytes`.
        into: As for `load`.

    Returns:
        As for `load`.

    Raises:
        CheckpointError: The bytes are damaged, too new, or hold something else; nothing changed.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data must be bytes, got {type(data).__name__}: to_bytes makes them, load takes a path")
    return unpack(*read(io.BytesIO(data), len(data), "these bytes"), into, "these bytes")


def inspect(path: str | os.PathLike[str]) -> Header:
    """Return the header of a checkpoint. The file is verified completely, and no object is built.

    Args:
        path: The file.

    Returns:
        What was saved, when, and by which version.

    Raises:
        CheckpointError: The file is damaged or too new.
    """
    return read_path(path)[0]


class Saves:
    """Adds `save`, `load`, `to_bytes` and `from_bytes` to a class that `sepsa.load` can build."""

    def save(self, path: str | os.PathLike[str], *, position: Any = None, force: bool = False) -> None:
        """Write a checkpoint, as `sepsa.save` does.

        Args:
            path: The file.
            position: Any plain value, which `sepsa.checkpoint.inspect(path).position` returns.
            force: Whether to save a state with NaN or Inf where the checkpoint at `path` has finite numbers.
        """
        save(self, path, position=position, force=force)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Build the model that was saved, as `sepsa.load` does.

        Args:
            path: The file.

        Returns:
            The model, which continues with the same bits.
        """
        return cls._check_class(load(path), str(path))

    def to_bytes(self, *, position: Any = None) -> bytes:
        """Return a checkpoint as bytes, to store in a database or to send to another process.

        Args:
            position: Any plain value, which is stored with it.

        Returns:
            The content of the file that `save` writes.
        """
        return to_bytes(self, position=position)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Build the model of a checkpoint in bytes.

        Args:
            data: The result of `to_bytes`.

        Returns:
            The model, which continues with the same bits.
        """
        return cls._check_class(from_bytes(data), "these bytes")

    @classmethod
    def _check_class(cls, built: Any, name: str) -> Self:
        if type(built) is not cls:
            raise CheckpointError(f"{name} holds a {type(built).__name__}, not a {cls.__name__}: use sepsa.load")
        return built


def stamp(state: dict[str, Any]) -> dict[str, Any]:
    """A pickled state with the version that wrote it."""
    return state | {"_sepsa_version": __version__}


def check_stamp(state: dict[str, Any]) -> dict[str, Any]:
    """A pickled state without its version; warns where another version wrote it."""
    state = dict(state)
    version = state.pop("_sepsa_version", "unknown")
    if version != __version__:
        warnings.warn(
            f"this pickle was written by sepsa {version} and is read by {__version__}, which may misread it: "
            "use sepsa.save and sepsa.load between versions",
            stacklevel=3,
        )
    return state


# ---------------------------------------------------------------------- from objects to states and back


def describe(what: Any) -> tuple[str, Any, Any]:
    """Kind, configuration and state of an object, or of several in a dict."""
    if type(what) is dict:
        parts = {key: describe(value) if has_state(value) else ("", None, value) for key, value in what.items()}
        return "dict", {key: part[:2] for key, part in parts.items()}, {key: part[2] for key, part in parts.items()}
    if not has_state(what):
        raise TypeError(
            f"what is saved must have state_dict and load_state_dict, or be a dict, got {type(what).__name__}: "
            f"{cure(what)}"
        )
    kind = class_name(what)
    if kind in BUILT:
        return kind, parameters(what), what.state_dict()
    if kind == "sepsa.SepSA":
        return kind, repr(what), {"model": what.model.state_dict(), "optimizer": what.state_dict()}
    return kind, repr(what) if kind.startswith("sepsa.") else None, what.state_dict()


def cure(what: Any) -> str:
    """The cure in the error for an object that cannot be saved, such as a pipeline of River or scikit-learn."""
    if isinstance(what, type):
        return f"save an instance, {what.__name__}(...)"
    if type(what).__name__ == "Pipeline" and has_state(what[-1]):
        return "save its learner, pipeline[-1], and pickle the other steps, or pickle the whole pipeline"
    return "put plain values into a dict, and pickle other objects"


def parameters(what: Any) -> dict[str, Any]:
    """The arguments with which an object of a registered class was made; a model among them as its kind and its own."""
    own = what._get_params() if hasattr(what, "_get_params") else what.get_params()
    if "model" in own:
        model = what.model
        if class_name(model) not in BUILT:
            how = "commit(position=delayed.state_dict())" if hasattr(model, "commit") else "pickle the whole"
            raise TypeError(f"model must be one of sepsa's to be saved, got {type(model).__name__}: {how}")
        own["model"] = [class_name(model), parameters(model)]
    return own


def fitted(learner: Any) -> bool:
    """Whether a learner has a state to save; a scikit-learn estimator has one after its first row."""
    return bool(getattr(learner, "__sklearn_is_fitted__", lambda: True)())


def has_state(what: Any) -> bool:
    """Whether this is an object, not a class, with a state to save and load."""
    return hasattr(what, "state_dict") and hasattr(what, "load_state_dict") and not isinstance(what, type)


def class_name(what: Any) -> str:
    """The public name of an object's class."""
    cls = type(what)
    own = cls.__module__.startswith("sepsa.")
    name = f"sepsa.{cls.__name__}" if own else f"{cls.__module__}.{cls.__qualname__}"
    return next((kind for kind, built in BUILT.items() if built is cls), name)


def unpack(header: Header, state: Any, into: Any, name: str) -> Any:
    """The objects of a checkpoint, built or loaded `into` those given: all of them, or an error and nothing changed."""
    try:
        return load_objects(header, state, into, name)
    except CheckpointError:
        raise
    except (*MISFITS, MemoryError) as error:
        raise CheckpointError(f"{name} cannot be loaded: {error or type(error).__name__}") from error


def load_objects(header: Header, state: Any, into: Any, name: str) -> Any:
    """The objects of a checkpoint, with whatever error their `load_state_dict` raises."""
    if header.kind != "dict":
        if into is None:
            return build(header.kind, header.configuration, state, name, header.bytes)
        check_kind(header.kind, into, name)
        load_into(into, state)
        return into
    into = {} if into is None else into
    if not isinstance(into, Mapping):
        raise CheckpointError(f"{name} holds {list(state)}: into must be a dict of objects under such keys")
    kinds = {key: kind for key, (kind, _) in header.configuration.items() if kind}
    needed = {key for key, kind in kinds.items() if built_class(kind) is None}
    if not needed <= set(into) <= set(kinds):
        raise CheckpointError(f"{name} holds the states of {sorted(map(str, needed))}: into must be a dict with these")
    for key, given in into.items():
        check_kind(kinds[key], given, name)
    objects = {
        key: into[key]
        if key in into
        else build(kind, configuration, state[key], name, header.bytes)
        if kind
        else state[key]
        for key, (kind, configuration) in header.configuration.items()
    }
    load_all(into, state)
    return objects


def load_all(objects: Mapping[Any, Any], states: Mapping[Any, Any]) -> None:
    """Let several objects load their states; where one raises an error, all are restored."""
    before = {key: copy.deepcopy(describe(given)[2]) for key, given in objects.items()} if len(objects) > 1 else {}
    tried = []
    try:
        for key, given in objects.items():
            tried.append(key)
            load_into(given, states[key])
    except BaseException:
        for key in before and reversed(tried):
            load_into(objects[key], before[key])
        raise


def build(kind: str, configuration: Any, state: Any, name: str, size: int) -> Any:
    """A new object of a registered class, with this state, from a checkpoint whose tensors have `size` bytes."""
    with limited_memory(size):
        built = unlearned(kind, configuration, name)
        built.load_state_dict(state)
    return built


def unlearned(kind: str, configuration: Any, name: str) -> Any:
    """A new object of a registered class, from the result of `parameters`."""
    cls = built_class(kind)
    if cls is None:
        raise CheckpointError(f"{name} holds a {kind}: build one as it was built then, and give it as into=")
    if "model" in configuration:
        kind, own = configuration["model"]
        configuration = configuration | {"model": unlearned(kind, own, name)}
    return cls(**configuration)


def check_kind(kind: str, given: Any, name: str) -> None:
    """Raise an error for an object of another class than the one that was saved."""
    if not has_state(given) or kind != class_name(given):
        raise CheckpointError(f"{name} holds a {kind}, and into is a {type(given).__name__}")


def load_into(given: Any, state: Any) -> None:
    """Let an object load a state, a SepSA also that of its model; on an error nothing has changed."""
    if class_name(given) != "sepsa.SepSA":
        given.load_state_dict(state)
        return
    own, saved = given.model.state_dict(), state["model"]
    if list(own) != list(saved):
        odd = sorted(set(own) ^ set(saved))
        raise CheckpointError(f"the checkpoint belongs to another model: {odd or 'its parts in another order'}")
    for key, value in own.items():
        there, here = (f"{one.dtype} {tuple(one.shape)}" if is_tensor(one) else "" for one in (saved[key], value))
        if there != here:
            raise CheckpointError(f"the checkpoint has {key} as {there}, this model as {here}")
    given.load_state_dict(state["optimizer"])  # checks before it changes anything; after it nothing can fail
    given.model.load_state_dict(saved)
