"""Loader ``kt-folder``: the .kt files that the writer of the same name leaves, with the safetensors beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash
from pydantic import PrivateAttr

from ktforge import CheckpointError, FolderLoader, Loader, SourceFile, TensorSpec, hookimpl
from ktforge.checkpoint.downloads import unfinished
from ktforge.checkpoint.links import check_links
from ktforge.checkpoint.shards import merge_scans
from ktforge.contract.identity import Identity
from ktforge.contract.tensors import F32
from ktforge.model.architectures import NUMBER
from ktforge.text import first_of
from ktforge_plugins.loaders.safetensors import SafetensorsLoader, cut_short, map_file

PATTERN = "_layer_*/_numa_*/*.kt"
_FOLDERS = ("_layer_*", "_layer_*/_numa_*")
_FILE = re.compile(
    rf"_layer_(?P<layer>{NUMBER})/_numa_(?P<part>{NUMBER})/"
    rf"INT[48]_(?P<projection>gate|up|down)_(?P<expert>{NUMBER})_(?P<bytes>[0-9]{{1,18}})Byte_(?P<content>quant|scale)_\.kt"
)
_CONTENTS: dict[str, tuple[str, np.dtype]] = {
    "quant": ("weight", np.dtype(np.int8)),
    "scale": ("scale", F32),
}


class KtFolderLoader(FolderLoader):
    """Reads _layer_L/_numa_P/INT4_up_E_NByte_quant_.kt and the like under the names of the layout kt-amx."""

    name: ClassVar[str] = "kt-folder"

    #: The .kt files as the last scan found them.
    _identities: dict[Path, Identity] = PrivateAttr(default_factory=dict)
    _rest_loader: SafetensorsLoader | None = PrivateAttr(default=None)

    @classmethod
    def reads(cls, folder: Path) -> bool:
        return any(folder.glob(PATTERN))

    def scan(self) -> Iterator[TensorSpec]:
        self._identities.clear()
        scans = {file: [self._spec(file)] for file in self._files()}
        for spec in self._rest().scan() if self._has_rest() else ():
            assert spec.file is not None
            scans.setdefault(spec.file, []).append(spec)
        return merge_scans(scans, None, self.path, self.same)

    def read(self, spec: TensorSpec) -> np.ndarray:
        assert spec.file is not None
        if spec.file.suffix != ".kt":
            return self._rest().read(spec)
        mapped = map_file(spec.file, self._identities.get(spec.file))
        if len(mapped) < spec.nbytes:
            raise cut_short(spec)
        return np.frombuffer(mapped, np.uint8, spec.nbytes).view(spec.dtype).reshape(spec.shape)

    def release(self, spec: TensorSpec) -> None:
        """A .kt file is mapped for as long as its array lives."""
        if spec.file is not None and spec.file.suffix != ".kt":
            self._rest().release(spec)

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        return self._rest().rows(spec, start, stop) if spec.file is not None and spec.file.suffix != ".kt" else None

    def sources(self) -> Sequence[SourceFile]:
        """A .kt file has no header; its name, which holds its size, stands for one."""
        if not self._identities:
            self.scan()
        found = [
            SourceFile(file, identity.nbytes, xxhash.xxh3_128_hexdigest(file.name.encode()), identity)
            for file, identity in self._identities.items()
        ]
        return [*found, *(self._rest().sources() if self._has_rest() else ())]

    def _files(self) -> list[Path]:
        self.contents().check()
        files = sorted(self.path.glob(PATTERN))
        for folder in (p for above in _FOLDERS for p in self.path.glob(above) if p.is_dir()):
            try:
                os.listdir(folder)  # a pattern passes over what cannot be looked into
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be looked into: {error.strerror}") from error
        if not files:
            raise CheckpointError(f"{self.path} has no {PATTERN} files")
        check_links(self.path, files, follow=bool(self.follow_links))  # such a file has no header
        if problems := list(unfinished(files)):
            raise CheckpointError(*first_of(problems))
        return files

    def _spec(self, file: Path) -> TensorSpec:
        match = _FILE.fullmatch(file.relative_to(self.path).as_posix())
        if match is None:
            raise CheckpointError(f"{file} is not named as a .kt file is: INT4_up_0_1024Byte_quant_.kt, for example")
        identity = self._identities[file] = Identity.of(file.stat())
        size = identity.nbytes
        if size != int(match["bytes"]):
            raise CheckpointError(f"{file} has {size:,} bytes, its name says otherwise: copy or make it again")
        parameter, dtype = _CONTENTS[match["content"]]
        name = f"blk.{match['layer']}.ffn_{match['projection']}_exps.{match['expert']}.numa.{match['part']}.{parameter}"
        return TensorSpec(name, dtype, (size // dtype.itemsize,), file)

    def _has_rest(self) -> bool:
        return any(self.path.glob("*.safetensors"))

    def _rest(self) -> SafetensorsLoader:
        if self._rest_loader is None:
            self._rest_loader = SafetensorsLoader(path=self.path, follow_links=self.follow_links)
        return self._rest_loader


@hookimpl
def ktforge_loaders() -> Iterable[type[Loader]]:
    return [KtFolderLoader]
