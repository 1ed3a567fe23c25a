"""Folders that hold what a layout has packed: whose they are, by their manifest or by the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktforge.contract.checks import blame
from ktforge.contract.registry import Registry
from ktforge.contract.stages import Layout, Loader
from ktforge.contract.tensors import TensorSpec
from ktforge.disk.marks import MANIFEST
from ktforge.disk.reading import read_json
from ktforge.errors import CheckpointError, KtforgeError, PluginError, UnknownExperts, Unsupported
from ktforge.model.config import quantization_config, read_model_config
from ktforge.model.units import units_of
from ktforge.text import counted


@dataclass(frozen=True)
class Packed:
    """A folder that ``layout`` packed. ``manifest`` is ktforge's own, empty for files of other programs."""

    layout: Layout
    manifest: Mapping[str, Any]

    @property
    def made_from(self) -> str | None:
        """The folder of the checkpoint that it was made from, if the manifest says so."""
        return made_from(self.manifest)

    def form(self, loader: Loader, specs: Sequence[TensorSpec]) -> tuple[str, int | None]:
        """Its format, such as kt-amx-int4/1, and the NUMA nodes it was made for, None where that makes no difference.

        ``specs`` are the tensors that ``loader`` scans. The format of a folder too broken to tell is what the manifest
        says, or the layout's name.
        """
        parts = self.layout.numa_nodes
        try:
            with blame(self.layout, "the packed tensors"):
                tensors = {spec.name: spec for spec in specs}
                for spec in self.layout.find(tensors, loader.config(), loader.read):
                    count = 1 + max(part.index for part in spec.parts)
                    return self.layout.plan(spec).format, None if parts is None else count
        except KtforgeError:
            pass
        return ", ".join(stated_formats(self.manifest)) or self.layout.name, parts if self.manifest else None

    def sentence(self, folder: Path | None, form: tuple[str, int | None]) -> str:
        """Why this is nothing to convert, and what to do."""
        name, parts = form
        nodes = f" for {counted(parts, 'NUMA node')}" if parts else ""
        source = f", made from {self.made_from}" if self.made_from else ""
        return (
            f"{folder or 'the checkpoint'} is packed already ({name}{nodes}{source}): convert the original, "
            "or make BF16 of this with `ktforge dequantize` first"
        )


def read_manifest(folder: Path | None) -> Mapping[str, Any]:
    """ktforge_manifest.json of a folder; empty if there is none. Raises CheckpointError if it cannot be read."""
    return read_json(folder / MANIFEST) if folder is not None and (folder / MANIFEST).exists() else {}


def stated_formats(manifest: Mapping[str, Any]) -> list[str]:
    """The layouts' formats that a manifest names."""
    formats = manifest.get("formats")
    return [f for f in formats if isinstance(f, str)] if isinstance(formats, list) else []


def made_from(manifest: Mapping[str, Any]) -> str | None:
    """The folder of the source that a manifest names."""
    pipeline = manifest.get("pipeline")
    loader = pipeline.get("loader") if isinstance(pipeline, dict) else None
    path = loader.get("path") if isinstance(loader, dict) else None
    return path if isinstance(path, str) else None


def find_packed(loader: Loader, registry: Registry, ordinary: Sequence[TensorSpec] | None = None) -> Packed | None:
    """What is packed in a folder that ``loader`` reads; None if it is an ordinary checkpoint.

    The layout is the one that the folder's manifest names, or the installed one that finds packed weights there, so
    that files of other programs are known too. Theirs are ordinary if config.json says how they are quantised and
    experts have their usual names. ``ordinary`` are the tensors, where it is known that they have. Raises
    CheckpointError for a manifest that makes no sense.
    """
    manifest = read_manifest(loader.folder())
    pipeline = manifest.get("pipeline")
    named = pipeline.get("layout") if isinstance(pipeline, dict) else None
    if named is not None:
        return Packed(_named_layout(loader, named, registry), manifest)
    specs = tuple(loader.scan()) if ordinary is None else ordinary
    if quantization_config(loader.config()) and (ordinary is not None or _are_ordinary(specs, loader.config())):
        return None
    tensors = {spec.name: spec for spec in specs}
    for entry in registry.entries():
        if not issubclass(entry.cls, Layout):
            continue
        try:
            layout = entry.cls()
            with blame(layout, "the tensors"):
                if any(True for _ in layout.find(tensors, loader.config(), loader.read)):
                    return Packed(layout, manifest)
        except (Unsupported, ValueError):  # it cannot be read back, or needs options that only a manifest would tell
            continue
        except PluginError:
            raise
        except KtforgeError:
            return Packed(layout, manifest)  # its own, and broken: who reads it back says what is wrong
    return None


def check_not_packed(loader: Loader, registry: Registry | None) -> None:
    """Raises CheckpointError for a folder that one of the registry's layouts has packed."""
    packed = find_packed(loader, registry) if registry is not None else None
    if packed is not None:
        raise CheckpointError(packed.sentence(loader.folder(), packed.form(loader, tuple(loader.scan()))))


def _named_layout(loader: Loader, named: Any, registry: Registry) -> Layout:
    try:
        return registry.build("layout", named["use"], {k: v for k, v in named.items() if k != "use"})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        folder = loader.folder()
        raise CheckpointError(
            f"{folder / MANIFEST if folder else MANIFEST} names a layout that cannot be built; it is damaged, or of "
            "another version of ktforge"
        ) from error


def _are_ordinary(specs: Sequence[TensorSpec], config: Mapping[str, Any]) -> bool:
    try:
        units_of(specs, read_model_config(config))
    except UnknownExperts:
        return False
    return True
