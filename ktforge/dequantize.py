"""A quantised output, read back as the BF16 checkpoint that it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import InstanceOf, PrivateAttr

from ktforge import native
from ktforge.checkpoint import MANIFEST, read_json
from ktforge.errors import CheckpointError, KtforgeError, Unsupported
from ktforge.pipeline import Pipeline
from ktforge.registry import Registry, blame
from ktforge.stages import Layout, Loader
from ktforge.tensors import BF16, QuantPart, QuantSpec, SourceFile, TensorSpec, UnitSpec


def dequantize_pipeline(source: Path, output: Path, registry: Registry) -> Pipeline:
    """The pipeline that turns the quantised folder ``source`` into a BF16 checkpoint at ``output``.

    The layout is the one that the folder's manifest names, or the installed one that finds packed weights there, so
    that files of other programs can be read too. Raises CheckpointError if there is none.
    """
    inner = registry.build("loader", "auto", {"path": source})
    assert isinstance(inner, Loader)
    loader = PackedLoader(inner=inner, layout=_layout(inner, source, registry))
    if (source / MANIFEST).exists():
        loader.name_by(read_json(source / MANIFEST))
    return Pipeline(loader=loader, writer=registry.build("writer", "safetensors", {"path": output}))


class PackedLoader(Loader):
    """Presents what ``inner`` loads, packed by ``layout``, as BF16 weights under the names of the source."""

    name: ClassVar[str] = "packed"
    inner: InstanceOf[Loader]
    layout: InstanceOf[Layout]

    #: Weight name → the spec of its unit and its role there.
    _packed: dict[str, tuple[QuantSpec, str]] = PrivateAttr(default_factory=dict)
    #: Stored name → stored tensor; and the stored name of every tensor that passes through.
    _stored: dict[str, TensorSpec] = PrivateAttr(default_factory=dict)
    _passed: dict[str, str] = PrivateAttr(default_factory=dict)

    #: What only the manifest knows: output name → source name, and what stood before ``layers.`` in experts' names.
    _renamed: dict[str, str] = PrivateAttr(default_factory=dict)
    _prefix: str | None = PrivateAttr(default=None)

    def name_by(self, manifest: Mapping[str, Any]) -> None:
        """Takes the source's names from a manifest of ktforge, as far as it has them."""
        renamed, prefix = manifest.get("renamed"), manifest.get("expert_prefix")
        if isinstance(renamed, dict):
            self._renamed = {k: v for k, v in renamed.items() if isinstance(v, str)}
        if isinstance(prefix, str):
            self._prefix = prefix

    def folder(self) -> Path | None:
        return self.inner.folder()

    def config(self) -> Mapping[str, Any]:
        return {k: v for k, v in self.inner.config().items() if k != "quantization_config"}

    def side_files(self) -> Sequence[Path]:
        return self.inner.side_files()

    def sources(self) -> Sequence[SourceFile]:
        return self.inner.sources()

    def scan(self) -> Iterator[TensorSpec]:
        self._stored = {spec.name: spec for spec in self.inner.scan()}
        problems: list[str] = []
        used: set[str] = set()
        with blame(self.layout, "the packed tensors"):
            found = list(self.layout.find(self._stored, self.inner.config(), self.inner.read))
            found = [replace(spec, unit=self._named(spec.unit)) for spec in found]
            for spec in found:
                planned = self.layout.plan(spec).tensors
                used.update(t.name for t in planned)
                problems += [p for t in planned if (p := self._problem(t))]
                self._packed.update({t.name: (spec, role) for role, t in spec.unit.tensors.items()})
        if problems:
            more = [f"and {len(problems) - 20:,} more of the kind"] if len(problems) > 20 else []
            raise CheckpointError(*problems[:20], *more)
        for spec in found:
            yield from spec.unit.tensors.values()
        for name, tensor in self._stored.items():
            if name not in used:
                original = self._renamed.get(name) or self.layout.original(name)
                self._passed[original] = name
                yield replace(tensor, name=original)

    def read(self, spec: TensorSpec) -> np.ndarray:
        if spec.name not in self._packed:
            return self.inner.read(self._stored[self._passed[spec.name]])
        wanted = self._wanted(spec)
        packed = {stored.name: self.inner.read(stored) for stored in self._stored_of(spec)}
        weight = np.empty(spec.shape, BF16)
        for part, codes in zip(wanted.parts, self.layout.unpack(packed, wanted).parts, strict=True):
            part.of(weight)[:] = restored(wanted, codes)
        return weight

    def _named(self, unit: UnitSpec) -> UnitSpec:
        """An expert under the prefix that it had in the source."""
        if self._prefix is None or not unit.is_expert:
            return unit
        names = {r: self._prefix + t.name[t.name.index("layers.") :] for r, t in unit.tensors.items()}
        return unit.with_tensors({r: replace(t, name=names[r]) for r, t in unit.tensors.items()})

    def release(self, spec: TensorSpec) -> None:
        for stored in self._stored_of(spec):
            self.inner.release(stored)

    def _stored_of(self, spec: TensorSpec) -> list[TensorSpec]:
        """The stored tensors that a presented one is made of."""
        if spec.name not in self._packed:
            return [self._stored[self._passed[spec.name]]]
        return [self._stored[t.name] for t in self.layout.plan(self._wanted(spec)).tensors]

    def _wanted(self, spec: TensorSpec) -> QuantSpec:
        """The spec of the parts of one packed weight."""
        quant, role = self._packed[spec.name]
        return replace(quant, parts=tuple(p for p in quant.parts if p.role == role))

    def _problem(self, planned: TensorSpec) -> str | None:
        stored = self._stored.get(planned.name)
        if stored is None:
            return f"{planned.name} is missing from {self.folder()}: the output is not whole"
        if (stored.dtype, stored.shape) != (planned.dtype, planned.shape):
            return f"{stored.file}: {stored} should be {planned}"
        return None


def restored(spec: QuantSpec, part: QuantPart) -> np.ndarray:
    """The BF16 weights [n, k] of a quantised part: (code - zero) * step * scale in float32, then rounded."""
    n, k = part.codes.shape
    codes = part.codes.reshape(n, part.scales.shape[1], -1).astype(np.float32)
    if part.zeros is not None:
        codes -= part.zeros.astype(np.float32)[:, :, None]
    codes *= np.float32(spec.step)
    codes *= part.scales.astype(np.float32)[:, :, None]
    return native.to_bf16(codes.reshape(n, k))


def _layout(inner: Loader, source: Path, registry: Registry) -> Layout:
    manifest = source / MANIFEST
    if manifest.exists():
        pipeline = read_json(manifest).get("pipeline")
        named = pipeline.get("layout") if isinstance(pipeline, dict) else None
        if named is not None:
            try:
                return registry.build("layout", named["use"], {k: v for k, v in named.items() if k != "use"})
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"{manifest} names a layout that cannot be built; it is damaged, or of another version of ktforge"
                ) from error
    if "quantization_config" in inner.config():
        raise CheckpointError(
            f"{source} was not written by ktforge, but its config.json says how it is quantised: `ktforge moe-to-bf16` "
            "reads it"
        )
    tensors = {spec.name: spec for spec in inner.scan()}
    for entry in registry.entries():
        if not issubclass(entry.cls, Layout):
            continue
        try:
            candidate = entry.cls()
        except ValueError:  # it needs options that only a manifest would tell
            continue
        try:
            with blame(candidate, "the packed tensors"):
                if any(True for _ in candidate.find(tensors, inner.config(), inner.read)):
                    return candidate
        except Unsupported:  # it cannot be read back
            continue
        except KtforgeError:
            return candidate  # its own, and broken: the scan says what is wrong
    raise CheckpointError(f"{source} holds no packed weights that an installed layout can read back")
