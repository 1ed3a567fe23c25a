"""Loader ``auto``: looks at the folder and reads it with ``safetensors`` or ``bin``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
from pydantic import PrivateAttr

from ktforge import CheckpointError, FolderLoader, Loader, SourceFile, TensorSpec, hookimpl
from ktforge.contract.stages import PlanKey
from ktforge_plugins.loaders import bin as bin_files
from ktforge_plugins.loaders import kt_folder
from ktforge_plugins.loaders import safetensors as safetensors_files


class AutoLoader(FolderLoader):
    """Reads whichever weight files the folder has; if both kinds, they must hold the same tensors.

    ``io`` is that of the loader ``safetensors``; a folder of other files is refused with it.
    """

    name: ClassVar[str] = "auto"
    io: safetensors_files.Io | None = None

    _chosen: Loader | None = PrivateAttr(default=None)

    def scan(self) -> Iterator[TensorSpec]:
        self._chosen = None  # the folder may have changed
        return self._choice().scan()

    def read(self, spec: TensorSpec) -> np.ndarray:
        return self._choice().read(spec)

    def release(self, spec: TensorSpec) -> None:
        self._choice().release(spec)

    def plan_key(self) -> PlanKey | None:
        return self._choice().plan_key()

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        return self._choice().rows(spec, start, stop)

    def scratch_bytes(self, spec: TensorSpec) -> int:
        return self._choice().scratch_bytes(spec)

    def sources(self) -> Sequence[SourceFile]:
        return self._choice().sources()

    def _choice(self) -> Loader:
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> Loader:
        self.contents().check()
        if any(self.path.glob(kt_folder.PATTERN)):
            self._refuse_io(kt_folder.PATTERN)
            return kt_folder.KtFolderLoader(path=self.path)
        has_safetensors = (self.path / safetensors_files.INDEX).exists() or any(self.path.glob("*.safetensors"))
        has_bin = (self.path / bin_files.INDEX).exists() or any(self.path.glob(bin_files.PATTERN))
        if not has_safetensors and not has_bin:
            self.contents().weight_files("*.safetensors", safetensors_files.INDEX)  # knows where they are
            if any(self.path.glob("*.gguf")):
                raise CheckpointError(
                    f"{self.path} has *.gguf files, which llama.cpp has quantised already: get its *.safetensors"
                )
            raise CheckpointError(f"{self.path} has no weights: neither *.safetensors nor {bin_files.PATTERN}")
        if not has_safetensors:
            self._refuse_io(bin_files.PATTERN)
        safetensors = safetensors_files.SafetensorsLoader(path=self.path, io=self.io or "mmap")
        pickled = bin_files.BinLoader(path=self.path)
        if has_safetensors and has_bin:
            self._check_agreement(safetensors, pickled)
        return safetensors if has_safetensors else pickled

    def _refuse_io(self, pattern: str) -> None:
        if self.io is not None:
            raise CheckpointError(f"{self.path} has {pattern} files, which are always mapped: leave out io: {self.io}")

    def _check_agreement(self, safetensors: Loader, pickled: Loader) -> None:
        one = {s.name: (s.dtype, s.shape) for s in safetensors.scan()}
        other = {s.name: (s.dtype, s.shape) for s in pickled.scan()}
        if one != other:
            name = min(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
            raise CheckpointError(
                f"{self.path} has *.safetensors and {bin_files.PATTERN} that disagree ({name} differs): "
                "choose with loader {use: safetensors} or {use: bin}, or remove one kind"
            )


@hookimpl
def ktforge_loaders() -> Iterable[type[Loader]]:
    return [AutoLoader]
