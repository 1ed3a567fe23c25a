"""Loader ``auto``: looks at the folder, and reads it with the loader that can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge import CheckpointError, FolderLoader, Loader, SourceFile, Stage, TensorSpec, hookimpl
from ktforge.contract.checks import blame
from ktforge.contract.stages import PlanKey, own_plan_key
from ktforge_plugins.loaders import safetensors as safetensors_files
from ktforge_plugins.loaders.bin import BinLoader
from ktforge_plugins.loaders.kt_folder import KtFolderLoader
from ktforge_plugins.loaders.safetensors import SafetensorsLoader

#: Loaders of ktforge's own, which come before those of other plugins.
OWN: tuple[type[FolderLoader], ...] = (KtFolderLoader, SafetensorsLoader, BinLoader)


class AutoLoader(FolderLoader):
    """Reads whichever weight files the folder has; safetensors beside ``.bin`` files must hold the same tensors.

    A folder that none of ktforge's own loaders reads is offered to those of other plugins. ``io`` is that of the loader
    ``safetensors``; a folder of other files is refused with it.
    """

    name: ClassVar[str] = "auto"
    io: safetensors_files.Io | None = None

    _chosen: Loader | None = PrivateAttr(default=None)
    #: Loaders of other plugins.
    _others: tuple[type[Loader], ...] = PrivateAttr(default=())

    def equip(self, classes: Sequence[type[Stage]]) -> Self:
        equipped = self.model_copy()
        equipped._others = tuple(c for c in classes if issubclass(c, Loader) and c not in (AutoLoader, *OWN))
        return equipped

    def delegates(self) -> Sequence[Stage]:
        return [self._choice()]

    def scan(self) -> Iterator[TensorSpec]:
        self._chosen = None  # the folder may have changed
        return self._choice().scan()

    def read(self, spec: TensorSpec) -> np.ndarray:
        return self._choice().read(spec)

    def release(self, spec: TensorSpec) -> None:
        self._choice().release(spec)

    def config(self) -> Mapping[str, Any]:
        return self._choice().config() if self._other_readers() else super().config()

    def side_files(self) -> Sequence[Path]:
        return self._choice().side_files() if self._other_readers() else super().side_files()

    def open_side_file(self, path: Path) -> BinaryIO:
        return self._choice().open_side_file(path)

    def bind(self, config: Mapping[str, Any]) -> Self:
        bound = self.model_copy()
        bound._chosen = self._choice().bind(config)
        return bound

    def plan_key(self) -> PlanKey | None:
        return own_plan_key(self._choice())

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
        own = [loader for loader in OWN if loader.reads(self.path)]
        if KtFolderLoader in own:
            self._refuse_io(KtFolderLoader.name)
            return KtFolderLoader(path=self.path, follow_links=self.follow_links)
        if not own:
            return self._choose_other()
        if SafetensorsLoader not in own:
            self._refuse_io(BinLoader.name)
            return BinLoader(path=self.path, follow_links=self.follow_links)
        safetensors = SafetensorsLoader(path=self.path, follow_links=self.follow_links, io=self.io or "mmap")
        if BinLoader in own:
            self._check_agreement(safetensors, BinLoader(path=self.path, follow_links=self.follow_links))
        return safetensors

    def _choose_other(self) -> Loader:
        readers = self._other_readers()
        if len(readers) > 1:
            names = " or ".join(f"{{use: {loader.name}}}" for loader in readers)
            raise CheckpointError(f"{self.path} can be read by several loaders: choose with loader {names}")
        if readers:
            self._refuse_io(readers[0].name)
            with blame(readers[0], f"{self.path}"):
                return readers[0](path=self.path)  # type: ignore[call-arg]
        self.contents().weight_files("*.safetensors", safetensors_files.INDEX)  # knows where they are
        raise CheckpointError(*self.contents().other_weights())

    def _other_readers(self) -> list[type[Loader]]:
        """The loaders of other plugins that read this folder, where ktforge's own do not."""
        if not self._others or not self.path.is_dir() or any(loader.reads(self.path) for loader in OWN):
            return []
        readers = []
        for loader in self._others:
            with blame(loader, f"{self.path}"):
                if loader.reads(self.path):
                    readers.append(loader)
        return readers

    def _refuse_io(self, loader: str) -> None:
        if self.io is not None:
            raise CheckpointError(
                f"{self.path} is read by the loader {loader}, and io is for safetensors: leave out io: {self.io}"
            )

    def _check_agreement(self, safetensors: Loader, pickled: Loader) -> None:
        one = {s.name: (s.dtype, s.shape) for s in safetensors.scan()}
        other = {s.name: (s.dtype, s.shape) for s in pickled.scan()}
        if one != other:
            name = min(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
            files = sorted({s.path.name for loader in (safetensors, pickled) for s in loader.sources()})
            raise CheckpointError(
                f"{self.path} has two copies of the weights that are not the same ({name} differs): keep one of them "
                f"there and move the other elsewhere, or choose with loader {{use: safetensors}} or {{use: bin}} in a "
                f"pipeline file; the files are {', '.join(files[:6])}{' …' if files[6:] else ''}"
            )


@hookimpl
def ktforge_loaders() -> Iterable[type[Loader]]:
    return [AutoLoader]
