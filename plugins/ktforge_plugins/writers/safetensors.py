"""Writer ``safetensors``: shards of a chosen size and their index."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field

from ktforge import FileSpec, Plan, Sink, TensorSpec, Writer, hookimpl, open_folder
from ktforge.sizes import parse_size
from ktforge.tensors import dtype_name, total_bytes

INDEX = "model.safetensors.index.json"


def _bytes(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


#: Entries of a header that are written at a time.
BLOCK = 2048
#: What stands in JSON as it is.
_PLAIN = re.compile(r"[ !#-\[\]-~]*")
SIZE_HELP = "Bytes of a file at most, such as 5GB, 500MB or 4GiB; one tensor may be larger."
Size = Annotated[int, BeforeValidator(_bytes), Field(ge=1)]


class SafetensorsWriter(Writer):
    """Writes model-0000i-of-0000n.safetensors and model.safetensors.index.json, as Hugging Face does."""

    name: ClassVar[str] = "safetensors"
    path: Path = Field(description="The folder to write.")
    max_shard_size: Size = Field(default=5 * 10**9, description=SIZE_HELP)

    def folder(self) -> Path:
        return self.path

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        kinds = _Kinds()
        stored = list(zip(tensors, map(kinds.__getitem__, map(itemgetter(1, 2), tensors)), strict=True))
        shards = _shards(stored, self.max_shard_size)
        if len(shards) == 1:
            return [_file("model.safetensors", shards[0])]
        count = len(shards)
        return [_file(f"model-{i:05}-of-{count:05}.safetensors", shard) for i, shard in enumerate(shards, 1)]

    def open(
        self, plan: Plan, *, overwrite: bool = False, restart: bool = False, verify: bool = False
    ) -> AbstractContextManager[Sink]:
        documents = {INDEX: index_json(plan.files)}
        return open_folder(self.path, plan, documents, overwrite=overwrite, restart=restart, verify=verify)


def index_json(files: Iterable[FileSpec]) -> bytes:
    """The index of these shards; ``total_size`` counts the tensors' bytes, not the headers'."""
    weight_map = {tensor.name: file.path for file in files for tensor in file.tensors}
    total = total_bytes(tensor for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


class _Kind(NamedTuple):
    """What tensors of one dtype and shape have in common: what a header says of it, and its bytes."""

    text: str
    nbytes: int
    itemsize: int


class _Kinds(dict[tuple[np.dtype, tuple[int, ...]], _Kind]):
    """Looked up, since a hundred thousand tensors have a dozen dtypes and shapes."""

    def __missing__(self, key: tuple[np.dtype, tuple[int, ...]]) -> _Kind:
        dtype, shape = key
        text = f'"dtype":"{dtype_name(dtype)}","shape":[{",".join(map(str, shape))}]'
        self[key] = _Kind(text, TensorSpec("", dtype, shape).nbytes, dtype.itemsize)
        return self[key]


Stored = tuple[TensorSpec, _Kind]


def _shards(stored: list[Stored], limit: int) -> list[list[Stored]]:
    """In the given order, a new shard wherever the next tensor would take one over the limit."""
    if sum([kind.nbytes for _, kind in stored]) <= limit:
        return [stored]
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor, kind in stored:
        if shards[-1] and size + kind.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append((tensor, kind))
        size += kind.nbytes
    return shards


def _file(path: str, stored: Sequence[Stored]) -> FileSpec:
    """Wider element types first, as the safetensors library does: then every tensor is aligned to its own."""
    sizes = {kind.itemsize for _, kind in stored}
    ordered = [one for size in sorted(sizes, reverse=True) for one in stored if one[1].itemsize == size]
    return _File(path, _Header(ordered), tuple([tensor for tensor, _ in ordered]))


@dataclass(frozen=True)
class _File(FileSpec):
    """A file whose header has counted the bytes of its tensors."""

    header: _Header

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + self.header.offsets[-1]


class _Header:
    """A file's header. A plan of 160,000 tensors needs its length alone, which takes a third of the time."""

    #: transformers refuses a file whose metadata does not name a framework.
    _BEGIN = b'{"__metadata__":{"format":"pt"}'

    def __init__(self, stored: Sequence[Stored]) -> None:
        self._stored = stored

    def __len__(self) -> int:
        return 8 + self._length + -self._length % 8

    def __bytes__(self) -> bytes:
        """Put together by hand, since json.dumps of 160,000 nested entries takes ten times as long, and block by block,
        which saves twice its size in memory and a third of the time."""
        parts = [self._BEGIN]
        for start in range(0, len(self._stored), BLOCK):
            block = self._stored[start : start + BLOCK]
            bounds = list(map(str, self.offsets[start : start + BLOCK + 1]))
            entries = [
                _entry(encode_basestring_ascii(tensor.name), kind.text, begin, end)
                for (tensor, kind), begin, end in zip(block, bounds, bounds[1:], strict=False)
            ]
            parts.append("".join(entries).encode())
        parts += [b"}", b" " * (-self._length % 8)]
        if 8 + sum(map(len, parts)) != len(self):
            raise ValueError("a header is not as long as was planned")
        return b"".join([(len(self) - 8).to_bytes(8, "little"), *parts])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Header) and self._stored == other._stored

    def __hash__(self) -> int:
        return hash(len(self))

    @cached_property
    def offsets(self) -> Sequence[int]:
        """Where each tensor begins behind the header, and where the last one ends."""
        return list(accumulate([kind.nbytes for _, kind in self._stored], initial=0))

    @cached_property
    def _length(self) -> int:
        """Bytes of the JSON."""
        kinds, offsets = [kind for _, kind in self._stored], self.offsets
        names = _quoted_length([tensor.name for tensor, _ in self._stored])
        texts = sum([len(kind.text) for kind in kinds])
        bounds = _digits(offsets[:-1]) + _digits(offsets[1:])
        return len(self._BEGIN) + len(kinds) * len(_entry("", "", "", "")) + names + texts + bounds + len(b"}")


def _entry(name: str, kind: str, begin: str, end: str) -> str:
    return f',{name}:{{{kind},"data_offsets":[{begin},{end}]}}'


def _quoted_length(names: Sequence[str]) -> int:
    """Characters that the names have in JSON, together."""
    text = "".join(names)
    return len(text) + 2 * len(names) if _PLAIN.fullmatch(text) else sum(map(len, map(encode_basestring_ascii, names)))


def _digits(ascending: Sequence[int]) -> int:
    """How many decimal digits all of them have."""
    longest = len(str(ascending[-1])) if ascending else 0
    return sum(len(ascending) - bisect_left(ascending, 10**n if n else 0) for n in range(longest))


@hookimpl
def ktforge_writers() -> Iterable[type[Writer]]:
    return [SafetensorsWriter]
