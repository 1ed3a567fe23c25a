"""Writer ``safetensors``: shards of a chosen size and their index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from ktforge import FileSpec, Plan, Sink, TensorSpec, Writer, hookimpl, open_folder
from ktforge.sizes import parse_size
from ktforge.tensors import dtype_name

INDEX = "model.safetensors.index.json"


def _bytes(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


#: Entries of a header that are written at a time.
BLOCK = 2048
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
        shards = _shards(tensors, self.max_shard_size)
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
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _shards(tensors: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """In the given order, a new shard wherever the next tensor would take one over the limit."""
    sizes = [tensor.nbytes for tensor in tensors]
    if sum(sizes) <= limit:
        return [list(tensors)]
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    return shards


def _file(path: str, tensors: Iterable[TensorSpec]) -> FileSpec:
    """Wider element types first, as the safetensors library does: then every tensor is aligned to its own."""
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    return FileSpec(path, _header(ordered), tuple(ordered))


def _header(tensors: Sequence[TensorSpec]) -> bytes:
    """Put together by hand, since json.dumps of 160,000 nested entries takes five times as long, and block by block,
    which saves twice its size in memory and a third of the time."""
    kinds = {(t.dtype, t.shape): (_stored(t), t.nbytes) for t in {(t.dtype, t.shape): t for t in tensors}.values()}
    # transformers refuses a file whose metadata does not name a framework.
    parts = [b'{"__metadata__":{"format":"pt"}']
    offset = 0
    for start in range(0, len(tensors), BLOCK):
        block = tensors[start : start + BLOCK]
        names = json.dumps([t.name for t in block], separators=("\n", ""))[1:-1].split("\n")
        stored = [kinds[t.dtype, t.shape] for t in block]
        offsets = list(accumulate((nbytes for _, nbytes in stored), initial=offset))
        entries = [
            f',{name}:{{{text},"data_offsets":[{begin},{end}]}}'
            for name, (text, _), (begin, end) in zip(names, stored, pairwise(offsets), strict=True)
        ]
        parts.append("".join(entries).encode())
        offset = offsets[-1]
    length = sum(map(len, parts)) + 1
    padding = -length % 8
    return b"".join([(length + padding).to_bytes(8, "little"), *parts, b"}", b" " * padding])


def _stored(tensor: TensorSpec) -> str:
    return f'"dtype":"{dtype_name(tensor.dtype)}","shape":[{",".join(map(str, tensor.shape))}]'


@hookimpl
def ktforge_writers() -> Iterable[type[Writer]]:
    return [SafetensorsWriter]
