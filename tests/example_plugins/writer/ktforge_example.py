"""The writer ``example``: all tensors one behind the other in weights.raw, and an index that says where."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ktforge import FileSpec, Plan, Sink, TensorSpec, Writer, hookimpl, open_folder
from ktforge.contract.tensors import dtype_name

FILE, INDEX = "weights.raw", "weights.json"


class ExampleWriter(Writer):
    """Writes weights.raw and weights.json, which maps names to dtype, shape and offset in bytes."""

    name: ClassVar[str] = "example"
    #: What goes when another output replaces this one.
    weights: ClassVar[tuple[str, ...]] = (FILE,)
    path: Path = Field(description="The folder to write.")

    def folder(self) -> Path:
        return self.path

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        widest_first = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # then each of them is aligned
        return [FileSpec(FILE, b"", tuple(widest_first))]

    def open(
        self, plan: Plan, *, overwrite: bool = False, restart: bool = False, verify: bool = False
    ) -> AbstractContextManager[Sink]:
        """`open_folder` publishes what is complete, with config.json and side files, and goes on with what is not."""
        documents = {INDEX: _index(plan.files[0])}
        return open_folder(self.path, plan, documents, overwrite=overwrite, restart=restart, verify=verify)


def _index(file: FileSpec) -> bytes:
    entries, offset = {}, len(file.header)
    for tensor in file.tensors:
        entries[tensor.name] = {"dtype": dtype_name(tensor.dtype), "shape": tensor.shape, "offset": offset}
        offset += tensor.nbytes
    return json.dumps(entries).encode()


@hookimpl
def ktforge_writers() -> Iterable[type[Writer]]:
    return [ExampleWriter]
