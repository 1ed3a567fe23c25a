"""Writer ``kt-folder``: a raw file per packed weight and scale, as upstream's ``--no-merge-safetensor`` leaves them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ktforge import FileSpec, Plan, Sink, TensorSpec, Unsupported, Writer, hookimpl, open_folder
from ktforge.model.architectures import NUMBER
from ktforge_plugins.writers.safetensors import INDEX, KT_FILES, SIZE_HELP, SafetensorsWriter, Size, index_json

_PACKED = re.compile(rf"blk\.({NUMBER})\.ffn_(gate|up|down)_exps\.({NUMBER})\.numa\.({NUMBER})\.(weight|scale)")
_METHODS = {"kt-amx-int4/1": "INT4", "kt-amx-int8/1": "INT8"}
_CONTENT = {"weight": "quant", "scale": "scale"}


class KtFolderWriter(Writer):
    """Writes _layer_L/_numa_P/INT4_up_E_NByte_quant_.kt and the like; tensors that are no experts go to safetensors."""

    name: ClassVar[str] = "kt-folder"
    weights: ClassVar[tuple[str, ...]] = KT_FILES
    path: Path = Field(description="The folder to write.")
    max_shard_size: Size = Field(default=5 * 10**9, description=SIZE_HELP)

    def folder(self) -> Path:
        return self.path

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        methods = {_METHODS.get(f) for f in formats}
        if len(methods) != 1 or None in methods:
            raise Unsupported(
                f"{self.name} holds packed experts of one kt-amx format, not {', '.join(formats) or 'unquantised ones'}"
            )
        (method,) = methods
        files = [FileSpec(_kt_path(t, str(method)), b"", (t,)) for t in tensors if _PACKED.fullmatch(t.name)]
        rest = [t for t in tensors if not _PACKED.fullmatch(t.name)]
        return [*files, *(self._shards().plan(rest, formats) if rest else ())]

    def open(
        self, plan: Plan, *, overwrite: bool = False, restart: bool = False, verify: bool = False
    ) -> AbstractContextManager[Sink]:
        shards = [f for f in plan.files if f.path.endswith(".safetensors")]
        documents = {INDEX: index_json(shards)} if shards else {}
        return open_folder(self.path, plan, documents, overwrite=overwrite, restart=restart, verify=verify)

    def _shards(self) -> SafetensorsWriter:
        return SafetensorsWriter(path=self.path, max_shard_size=self.max_shard_size)


def _kt_path(tensor: TensorSpec, method: str) -> str:
    match = _PACKED.fullmatch(tensor.name)
    assert match is not None
    layer, projection, expert, part, parameter = match.groups()
    return f"_layer_{layer}/_numa_{part}/{method}_{projection}_{expert}_{tensor.nbytes}Byte_{_CONTENT[parameter]}_.kt"


@hookimpl
def ktforge_writers() -> Iterable[type[Writer]]:
    return [KtFolderWriter]
