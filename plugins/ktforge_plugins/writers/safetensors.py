"""Writer ``safetensors``: shards of a chosen size and their index."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field

from ktforge import FileSpec, Plan, Sink, TensorSpec, Unsupported, Writer, hookimpl, open_folder
from ktforge.checkpoint.folder import METADATA
from ktforge.contract.tensors import dtype_name, total_bytes
from ktforge.text import parse_size

INDEX = "model.safetensors.index.json"
#: What KTransformers takes for weights of a folder, too, whichever of the writers has made it.
KT_FILES = ("_layer_*/_numa_*/*.kt",)


def _bytes(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


#: Entries of a header that are written at a time.
BLOCK = 2048
#: Far more than anyone has, and sums of sizes stay below 2^63.
MOST_BYTES = 1 << 62
#: What stands in JSON as it is.
_PLAIN = bytes(c for c in range(0x20, 0x7F) if chr(c) not in '"\\')
SIZE_HELP = "Bytes of a file at most, such as 5GB, 500MB or 4GiB; one tensor may be larger."
Size = Annotated[int, BeforeValidator(_bytes), Field(ge=1)]


class SafetensorsWriter(Writer):
    """Writes model-0000i-of-0000n.safetensors and model.safetensors.index.json, as Hugging Face does."""

    name: ClassVar[str] = "safetensors"
    weights: ClassVar[tuple[str, ...]] = KT_FILES
    path: Path = Field(description="The folder to write.")
    max_shard_size: Size = Field(default=5 * 10**9, description=SIZE_HELP)

    def folder(self) -> Path:
        return self.path

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        stored = _stored(tensors)
        shards = _shards(stored.offsets, self.max_shard_size)
        if len(shards) == 1:
            return [_file("model.safetensors", stored)]
        return [
            _file(f"model-{i:05}-of-{len(shards):05}.safetensors", stored.part(shard))
            for i, shard in enumerate(shards, 1)
        ]

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


@dataclass(frozen=True, eq=False)
class _Stored:
    """Tensors one behind the other. What a header says of their dtypes and shapes is in ``texts``: a hundred thousand
    have a dozen. For each tensor ``numbers`` has the place of its text, the text's length, and its bytes: of itself and
    of an element."""

    tensors: Sequence[TensorSpec]
    texts: Sequence[str]
    numbers: np.ndarray

    @property
    def text_lengths(self) -> int:
        return int(self.numbers[1].sum())

    @cached_property
    def offsets(self) -> Sequence[int]:
        """Where each tensor begins, and where the last one ends."""
        return [0, *np.cumsum(self.numbers[2]).tolist()]

    def part(self, places: slice) -> _Stored:
        return _Stored(self.tensors[places], self.texts, self.numbers[:, places])

    def widest_first(self) -> _Stored:
        """As the safetensors library orders a file: then every tensor is aligned to its own element type."""
        order = np.argsort(-self.numbers[3].astype(np.int16), kind="stable")  # numpy sorts these by their digits
        return _Stored(tuple(map(self.tensors.__getitem__, order.tolist())), self.texts, self.numbers[:, order])


def _stored(tensors: Sequence[TensorSpec]) -> _Stored:
    """Raises Unsupported for more bytes than there can be."""
    known: defaultdict[tuple[np.dtype, tuple[int, ...]], int] = defaultdict(count().__next__)
    places = np.fromiter(map(known.__getitem__, map(attrgetter("dtype", "shape"), tensors)), np.int64, len(tensors))
    texts = [f'"dtype":"{dtype_name(dtype)}","shape":[{",".join(map(str, shape))}]' for dtype, shape in known]
    sizes = [TensorSpec("", dtype, shape).nbytes for dtype, shape in known]
    total = sum(size * times for size, times in zip(sizes, np.bincount(places).tolist(), strict=True))
    if total > MOST_BYTES:
        raise Unsupported(f"the output would have {total:,} bytes, which no file system holds")
    of_kinds = np.array([range(len(known)), list(map(len, texts)), sizes, [dtype.itemsize for dtype, _ in known]])
    return _Stored(tensors, texts, of_kinds.astype(np.int64)[:, places])


def _shards(offsets: Sequence[int], limit: int) -> list[slice]:
    """In the given order, a new shard wherever the next tensor would take one over the limit."""
    shards = []
    start = 0
    while start < len(offsets) - 1:
        stop = max(start + 1, bisect_right(offsets, offsets[start] + limit) - 1)
        shards.append(slice(start, stop))
        start = stop
    return shards or [slice(0, 0)]


def _file(path: str, stored: _Stored) -> FileSpec:
    ordered = stored.widest_first()
    return _File(path, _Header(ordered), tuple(ordered.tensors))


@dataclass(frozen=True)
class _File(FileSpec):
    """A file whose header has counted the bytes of its tensors."""

    header: _Header

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + self.header.stored.offsets[-1]


class _Header:
    """A file's header. A plan of 160,000 tensors needs its length alone, which takes a third of the time."""

    #: transformers refuses a file whose metadata does not name a framework.
    _BEGIN = f'{{"{METADATA}":{{"format":"pt"}}'.encode()

    def __init__(self, stored: _Stored) -> None:
        self.stored = stored

    def __len__(self) -> int:
        return 8 + self._length + -self._length % 8

    def __bytes__(self) -> bytes:
        """Put together by hand, since json.dumps of 160,000 nested entries takes ten times as long, and block by block,
        which saves twice its size in memory and a third of the time."""
        parts = [self._BEGIN]
        for start in range(0, len(self.stored.tensors), BLOCK):
            block = self.stored.part(slice(start, start + BLOCK))
            bounds = list(map(str, self.stored.offsets[start : start + BLOCK + 1]))
            entries = [
                _entry(encode_basestring_ascii(tensor.name), block.texts[number], begin, end)
                for tensor, number, begin, end in zip(
                    block.tensors, block.numbers[0].tolist(), bounds, bounds[1:], strict=False
                )
            ]
            parts.append("".join(entries).encode())
        parts += [b"}", b" " * (-self._length % 8)]
        if 8 + sum(map(len, parts)) != len(self):
            raise ValueError("a header is not as long as was planned")
        return b"".join([(len(self) - 8).to_bytes(8, "little"), *parts])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Header) and self.stored.tensors == other.stored.tensors

    def __hash__(self) -> int:
        return hash(len(self))

    @cached_property
    def _length(self) -> int:
        """Bytes of the JSON. Planning asks for it, and so hears of a tensor that has no place in it."""
        tensors, offsets = self.stored.tensors, self.stored.offsets
        names = _quoted_length([tensor.name for tensor in tensors])
        texts = self.stored.text_lengths
        bounds = _digits(offsets[:-1]) + _digits(offsets[1:])
        return len(self._BEGIN) + len(tensors) * len(_entry("", "", "", "")) + names + texts + bounds + len(b"}")


def _entry(name: str, text: str, begin: str, end: str) -> str:
    return f',{name}:{{{text},"data_offsets":[{begin},{end}]}}'


def _quoted_length(names: Sequence[str]) -> int:
    """Characters that the names have in JSON, together. Raises Unsupported for one that a header has no place for."""
    text = "".join(names)
    if METADATA in text and METADATA in names:
        raise Unsupported(f"no tensor of a safetensors file can be called {METADATA}: rename it in the source")
    plain = text.isascii() and not text.encode().translate(None, _PLAIN)
    return len(text) + 2 * len(names) if plain else sum(map(len, map(encode_basestring_ascii, names)))


def _digits(ascending: Sequence[int]) -> int:
    """How many decimal digits all of them have."""
    longest = len(str(ascending[-1])) if ascending else 0
    return sum(len(ascending) - bisect_left(ascending, 10**n if n else 0) for n in range(longest))


@hookimpl
def ktforge_writers() -> Iterable[type[Writer]]:
    return [SafetensorsWriter]
