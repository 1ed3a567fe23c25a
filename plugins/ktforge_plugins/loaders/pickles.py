"""The pickle of a torch.save archive, read for what it asks for, before torch makes any of it.

``weights_only`` lets a pickle call some functions that make tensors and storages of any size out of nothing. Here a
pickle holds names, tensors that lie in its archive, and plain values; all that it names is a stand-in.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ktforge import CheckpointError

#: What torch.save writes for state dicts. Of the others, some make objects of a size that they only state.
_OPCODES = frozenset(
    """PROTO STOP MARK GLOBAL REDUCE BUILD BINPERSID NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    BINUNICODE SHORT_BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM
    SETITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT""".split()  # noqa: SIM905 - as a list, one line each
)


class _Storage:
    """Stands for a storage class: it can be named, and calling it is refused."""

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize

    def __call__(self, *arguments: object) -> NoReturn:
        raise pickle.UnpicklingError("a storage that is made of nothing")


class _Stored(NamedTuple):
    """Stands for a storage that lies in the archive."""

    nbytes: int
    itemsize: int


class _Tensor:
    """Stands for a tensor."""

    def __setstate__(self, state: object) -> NoReturn:
        raise pickle.UnpicklingError("a tensor is given another state")


def check_pickle(file: Path, pickled: bytes, sizes: Mapping[str, int]) -> None:
    """Raises CheckpointError if a pickle names anything but tensors and plain values, or more bytes than its archive
    has. ``sizes``: the archive's storages by key → bytes."""
    try:
        _check_opcodes(pickled)
        _Reader(pickled, sizes).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds pickled objects other than tensors, which could run code, so it is not loaded "
            f"({str(error)[:200]}): convert it to safetensors where you trust it"
        ) from error
    except Exception as error:  # a broken pickle raises nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"{file} is not as torch.save writes it: {reason}: download it again") from error


def _check_opcodes(pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in _OPCODES:
            raise pickle.UnpicklingError(f"the opcode {opcode.name}")
        if opcode.name == "LONG_BINPUT" and argument is not None and argument > len(pickled):
            raise ValueError("a place in memory beyond all that it holds")  # for which pickle would make room


class _Reader(pickle.Unpickler):
    def __init__(self, pickled: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(pickled), fix_imports=False)
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) == ("collections", "OrderedDict"):
            return _plain_dict
        if module == "torch._utils" and name in _REBUILDS:
            return _REBUILDS[name]
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _Storage(1)
        if isinstance(found, torch.dtype):
            return found
        if isinstance(found, type) and issubclass(found, torch.storage._LegacyStorage):
            return _Storage(_itemsize(found))
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Stored:
        _, storage, key, _, count = pid
        if not isinstance(storage, _Storage) or type(count) is not int:
            raise ValueError("a storage without a kind")
        nbytes, has = count * storage.itemsize, self._sizes.get(key, -1)
        if not 0 <= nbytes <= has:
            raise ValueError(f"the storage {key!r} is to have {nbytes:,} bytes, and has {max(has, 0):,} in the archive")
        return _Stored(nbytes, storage.itemsize)


def _itemsize(storage: Any) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that typed storages are deprecated: torch.save names them
        return int(storage.dtype.itemsize)


def _plain_dict(*arguments: object) -> OrderedDict[Any, Any]:
    if arguments:
        raise ValueError("a dict that is made of something")
    return OrderedDict()


def _tensor_v2(storage: _Stored, offset: Any, shape: Any, strides: Any, *_: object) -> _Tensor:
    return _tensor(storage.nbytes // storage.itemsize, offset, shape, strides)


def _tensor_v3(
    storage: _Stored, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: object
) -> _Tensor:
    return _tensor(storage.nbytes // dtype.itemsize, offset, shape, strides)


def _tensor(count: int, offset: Any, shape: Any, strides: Any) -> _Tensor:
    """A tensor in a storage of so many items, which torch makes larger for one that goes beyond it."""
    if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)) or len(shape) != len(strides):
        raise ValueError("a tensor without a shape")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and last >= count:
        raise ValueError(f"a tensor of shape {list(shape)} goes beyond its storage of {count:,} items")
    return _Tensor()


def _parameter(tensor: Any, *_: object) -> _Tensor:
    if not isinstance(tensor, _Tensor):
        raise ValueError("a parameter that is no tensor")
    return tensor


_REBUILDS = {
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
}
