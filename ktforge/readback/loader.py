"""A quantised output, read back as the BF16 checkpoint that it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import numpy as np
from pydantic import InstanceOf, PrivateAttr

from ktforge import native
from ktforge.contract.checks import blame, expected
from ktforge.contract.finite import check_finite
from ktforge.contract.registry import Registry
from ktforge.contract.stages import Layout, Loader
from ktforge.contract.tensors import BF16, QuantPart, QuantSpec, SourceFile, TensorSpec, UnitSpec
from ktforge.disk.marks import MANIFEST
from ktforge.errors import CheckpointError
from ktforge.model.config import quantization_config, without_quantization
from ktforge.model.units import NAMELESS
from ktforge.readback.joined import Joined, joined_weights
from ktforge.readback.packed import Packed, find_packed

#: Weights that are restored at a time: 1 MB of float32, which stays in the cache.
BAND = 1 << 18


def require_packed(loader: Loader, registry: Registry, ordinary: Sequence[TensorSpec] | None = None) -> Packed:
    """What :func:`ktforge.readback.packed.find_packed` finds. Raises CheckpointError if that is nothing."""
    packed = find_packed(loader, registry, ordinary)
    if packed is None and quantization_config(loader.config()):
        raise CheckpointError(
            f"{loader.folder()} was not packed by ktforge, but its config.json says how it is quantised: "
            "`ktforge moe-to-bf16` makes BF16 of it, and `ktforge convert` reads it as it is"
        )
    if packed is None:
        raise CheckpointError(f"{loader.folder()} holds no packed weights that an installed layout can read back")
    return packed


def packed_loader(inner: Loader, packed: Packed, *, one_by_one: bool = False) -> PackedLoader:
    """A loader of what is packed in the folder that ``inner`` reads."""
    loader = PackedLoader(inner=inner, layout=packed.layout, one_by_one=one_by_one)
    loader.name_by(packed.manifest)
    return loader


class PackedLoader(Loader):
    """Presents what ``inner`` loads, packed by ``layout``, as BF16 weights under the names of the source.

    Experts that were in one tensor there are in one again, as the manifest has it, unless ``one_by_one``.
    """

    name: ClassVar[str] = "packed"
    inner: InstanceOf[Loader]
    layout: InstanceOf[Layout]
    one_by_one: bool = False

    #: Weight name → the spec of its unit and its role there.
    _packed: dict[str, tuple[QuantSpec, str]] = PrivateAttr(default_factory=dict)
    #: Stored name → stored tensor; and the stored name of every tensor that passes through.
    _stored: dict[str, TensorSpec] = PrivateAttr(default_factory=dict)
    _passed: dict[str, str] = PrivateAttr(default_factory=dict)

    #: What only the manifest knows: output name → source name; layer → role → name of an expert's weight, with
    #: ``{expert}`` for its number; and fields that config.json lacks.
    _renamed: dict[str, str] = PrivateAttr(default_factory=dict)
    _experts: dict[str, dict[str, str]] = PrivateAttr(default_factory=dict)
    _settled: dict[str, Any] = PrivateAttr(default_factory=dict)
    #: What the manifest says of fused weights, and those that there are by name.
    _fused: dict[str, Any] = PrivateAttr(default_factory=dict)
    _joined: dict[str, Joined] = PrivateAttr(default_factory=dict)

    def name_by(self, manifest: Mapping[str, Any]) -> None:
        """Takes the source's names from a manifest of ktforge, as far as it has them."""
        renamed, experts, more = (_mapping(manifest.get(key)) for key in ("renamed", "experts", "settled"))
        self._renamed = {k: v for k, v in renamed.items() if isinstance(v, str)}
        self._experts = {k: {r: n for r, n in _mapping(v).items() if isinstance(n, str)} for k, v in experts.items()}
        self._fused, self._settled = _mapping(manifest.get("fused")), more

    def bind(self, config: Mapping[str, Any]) -> Self:
        with blame(self.inner, "the pipeline"):
            inner = expected(self.inner, self.inner.bind(config), type(self.inner), "the pipeline")
        with blame(self.layout, "the pipeline"):
            layout = expected(self.layout, self.layout.bind(config), type(self.layout), "the pipeline")
        return self.model_copy(update={"inner": inner, "layout": layout})

    def folder(self) -> Path | None:
        return self.inner.folder()

    def config(self) -> Mapping[str, Any]:
        return without_quantization(self.inner.config())

    def side_files(self) -> Sequence[Path]:
        return self.inner.side_files()

    def open_side_file(self, path: Path) -> BinaryIO:
        return self.inner.open_side_file(path)

    def sources(self) -> Sequence[SourceFile]:
        return self.inner.sources()

    def scan(self) -> Iterator[TensorSpec]:
        self._stored = {spec.name: spec for spec in self.inner.scan()}
        problems: list[str] = []
        used: set[str] = set()
        with blame(self.layout, "the packed tensors"):
            known = {**self.inner.config(), **self._settled}
            found = list(self.layout.find(self._stored, known, self.inner.read))
            found = [spec._replace(unit=self._named(spec.unit)) for spec in found]
            for spec in found:
                planned = self.layout.plan(spec).tensors
                used.update(t.name for t in planned)
                problems += [p for t in planned if (p := self._problem(t))]
                self._packed.update({t.name: (spec, role) for role, t in spec.unit.tensors.items()})
        if problems:
            more = [f"and {len(problems) - 20:,} more of the kind"] if len(problems) > 20 else []
            raise CheckpointError(*problems[:20], *more)
        singles = {tensor.name: tensor for spec in found for tensor in spec.unit.tensors.values()}
        for name, tensor in self._stored.items():
            if name not in used:
                original = self._renamed.get(name) or self.layout.original(name)
                self._passed[original] = name
                if original in singles:
                    yield tensor._replace(name=original)  # twice, which is said of them
                singles[original] = tensor._replace(name=original)
        if not self.one_by_one:
            self._joined = {j.spec.name: j for j in joined_weights(self._fused, self._experts, singles)}
        for joined in self._joined.values():
            for member in chain.from_iterable(joined.members):
                singles.pop(member.name, None)
            yield joined.spec
        yield from singles.values()

    def read(self, spec: TensorSpec) -> np.ndarray:
        if (joined := self._joined.get(spec.name)) is not None:
            fused = np.empty(spec.shape, BF16)
            for row, expert in enumerate(joined.experts(spec)):
                for number, member in enumerate(joined.members[expert]):
                    joined.place(number, self.read(member), fused[row])
                    self.release(member)
            return fused
        if spec.name not in self._packed:
            return self.inner.read(self.as_stored(spec))
        weight = np.empty(spec.shape, BF16)
        for wanted, part in self.parts(spec):
            restore(wanted, part, wanted.parts[0].of(weight))
        (stored, *_) = next(self.stored(spec))[1]
        check_finite(spec._replace(file=stored.file), weight)
        return weight

    def is_packed(self, spec: TensorSpec) -> bool:
        """Whether a tensor was quantised; all others pass through."""
        return spec.name in self._packed

    def parts(self, spec: TensorSpec) -> Iterator[tuple[QuantSpec, QuantPart]]:
        """The quantised parts of a packed weight, each with what it is alone."""
        for wanted, stored in self.stored(spec):
            packed = {t.name: self.inner.read(t) for t in stored}
            (part,) = self.layout.unpack(packed, wanted).parts
            yield wanted, part
            for tensor in stored:
                self.inner.release(tensor)

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        """Of what passes through, and of fused experts; a packed weight has its rows in no order that a file knows."""
        if spec.name in self._joined:
            return spec.rows(start, stop)
        if spec.name in self._packed:
            return None
        inner = self.inner.rows(self.as_stored(spec), start, stop)
        return inner and inner._replace(name=spec.name)

    def scratch_bytes(self, spec: TensorSpec) -> int:
        if (joined := self._joined.get(spec.name)) is not None:
            members = joined.members[joined.experts(spec)[0]]
            return max(member.nbytes + self.scratch_bytes(member) for member in members)
        if spec.name not in self._packed:
            return self.inner.scratch_bytes(self.as_stored(spec))
        return max(
            sum(t.nbytes + self.inner.scratch_bytes(t) for t in stored) + _codes_bytes(wanted)
            for wanted, stored in self.stored(spec)
        )

    def _named(self, unit: UnitSpec) -> UnitSpec:
        """An expert under the names that it had in the source.

        Raises CheckpointError if neither the manifest has them nor a file of architectures.
        """
        if not unit.is_expert:
            return unit
        names = self._experts.get(str(unit.layer), {})
        if names.keys() >= unit.tensors.keys():
            new = {r: names[r].replace("{expert}", str(unit.expert)) for r in unit.tensors}
            return unit.with_tensors({r: t._replace(name=new[r]) for r, t in unit.tensors.items()})
        if unit.name.startswith(NAMELESS):
            raise CheckpointError(
                f"{self.folder()}: no manifest says what the experts of layer {unit.layer} were called, and the family "
                f"(model_type {self.inner.config().get('model_type')!r}) is not a known one: put the {MANIFEST} back "
                "that was written with it, or convert the original again"
            )
        return unit

    def release(self, spec: TensorSpec) -> None:
        if spec.name not in self._packed and spec.name not in self._joined:
            self.inner.release(self.as_stored(spec))

    def as_stored(self, spec: TensorSpec) -> TensorSpec:
        """What passes through, or rows of it, under its stored name."""
        return spec._replace(name=self._passed[spec.name])

    def stored(self, spec: TensorSpec) -> Iterator[tuple[QuantSpec, list[TensorSpec]]]:
        """Each part of a packed weight, with the stored tensors that it is made of."""
        quant, role = self._packed[spec.name]
        for part in quant.parts:
            if part.role == role:
                alone = quant._replace(parts=(part,))
                yield alone, [self._stored[t.name] for t in self.layout.plan(alone).tensors]

    def _problem(self, planned: TensorSpec) -> str | None:
        stored = self._stored.get(planned.name)
        if stored is None:
            return f"{planned.name} is missing from {self.folder()}: the output is not whole"
        if (stored.dtype, stored.shape) != (planned.dtype, planned.shape):
            return f"{stored.file}: {stored} should be {planned}"
        return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def restore(spec: QuantSpec, part: QuantPart, weight: np.ndarray) -> None:
    """Fills BF16 ``weight`` [n, k] from a quantised part: (code - zero) * step * scale in float32, then rounded."""
    n, k = part.codes.shape
    band = max(1, BAND // max(1, k))
    for start in range(0, n, band):
        rows = slice(start, min(n, start + band))
        codes = part.codes[rows].reshape(rows.stop - start, part.scales.shape[1], -1).astype(np.float32)
        if part.zeros is not None:
            codes -= part.zeros[rows].astype(np.float32)[:, :, None]
        codes *= np.float32(spec.step)
        codes *= part.scales[rows].astype(np.float32)[:, :, None]
        weight[rows] = native.to_bf16(codes.reshape(-1, k))


def _codes_bytes(spec: QuantSpec) -> int:
    """Bytes of one part's codes and zero points, and of a band of :func:`restore`."""
    (part,) = spec.parts
    (n, k), groups = part.shape, spec.groups(part)
    return n * k + (0 if spec.symmetric else 2 * n * groups) + 6 * max(BAND, k)
