"""Writer ``safetensors``: shards of a chosen size and their index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field

from ktforge import FileSpec, Plan, Sink, TensorSpec, Writer, hookimpl, open_folder
from ktforge.sizes import parse_size
from ktforge.tensors import dtype_name

INDEX = "model.safetensors.index.json"


def _bytes(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


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
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
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
    """Put together by hand, since json.dumps of 160,000 nested entries takes five times as long."""
    names = json.dumps([t.name for t in tensors], separators=("\n", ""))[1:-1].split("\n")
    stored = {kind: _stored(*kind) for kind in {(t.dtype, t.shape) for t in tensors}}
    ends = list(accumulate((t.nbytes for t in tensors), initial=0))
    entries = [
        f'{name}:{{{stored[tensor.dtype, tensor.shape]},"data_offsets":[{begin},{end}]}}'
        for name, tensor, begin, end in zip(names, tensors, ends, ends[1:], strict=False)
    ]
    # transformers refuses a file whose metadata does not name a framework.
    text = ",".join(['{"__metadata__":{"format":"pt"}', *entries]).encode() + b"}"
    padding = -len(text) % 8
    return b"".join([(len(text) + padding).to_bytes(8, "little"), text, b" " * padding])


def _stored(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    return f'"dtype":"{dtype_name(dtype)}","shape":[{",".join(map(str, shape))}]'


@hookimpl
def ktforge_writers() -> Iterable[type[Writer]]:
    return [SafetensorsWriter]
