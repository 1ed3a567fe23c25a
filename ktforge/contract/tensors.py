"""What travels between the stages: specifications while planning, arrays while running.

Specifications are cheap (no data, no open file), because a plan of a large model holds hundreds of thousands.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ktforge.contract.identity import Identity

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
F8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

#: safetensors' names of the dtypes (https://huggingface.co/docs/safetensors) and how numpy holds them.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": BF16,
    "F32": F32,
    "F64": np.dtype(np.float64),
    "F8_E4M3": F8_E4M3,
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: np.dtype) -> str:
    """The safetensors name of a dtype; numpy's own where safetensors has none."""
    return _NAMES.get(dtype) or dtype.name


#: The projections of a routed expert, in the order of their roles.
PROJECTIONS = ("gate", "up", "down")
#: The parameter that holds a stored weight's own numbers; the others beside it are there for its sake.
CARRIERS = ("weight", "weight_packed", "qweight", "blocks")


class TensorSpec(NamedTuple):
    """One tensor: its name, dtype and shape, and where a loader finds it (``file``, ``offset`` in bytes).

    A named tuple, as all that a plan has once a tensor or unit: one is made in a third of the time of a frozen
    dataclass, and a large plan has 300,000.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_like(self, other: TensorSpec) -> bool:
        """Whether both have one dtype and shape."""
        return (self.dtype, self.shape) == (other.dtype, other.shape)

    def rows(self, start: int, stop: int) -> TensorSpec:
        """These rows of the first axis, which begin so many bytes later."""
        shape = (stop - start, *self.shape[1:])
        return self._replace(shape=shape, offset=self.offset + start * math.prod(shape[1:]) * self.dtype.itemsize)

    def __str__(self) -> str:
        return f"{self.name} ({dtype_name(self.dtype)} {list(self.shape)})"


def total_bytes(tensors: Iterable[TensorSpec]) -> int:
    """Bytes of all of them, counted by dtype and shape: of those, a hundred thousand tensors have a dozen."""
    counts = Counter(map(attrgetter("dtype", "shape"), tensors))
    return sum(count * TensorSpec("", dtype, shape).nbytes for (dtype, shape), count in counts.items())


class UnitSpec(NamedTuple):
    """The unit of work: one expert's projections, or one other weight with whatever scales belong to it.

    ``tensors`` maps a role to a tensor. The role of an expert's tensor is ``projection.parameter``
    (``gate.weight``, ``down.weight_scale_inv``), with projections called gate, up and down in every architecture;
    that of another tensor is the parameter alone (``weight``). The tensors of a ``fused`` unit hold all experts of a
    layer along their first axis, and gate and up may be one projection, ``gate_up``.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    layer: int | None = None
    expert: int | None = None
    fused: bool = False

    @property
    def is_expert(self) -> bool:
        return self.expert is not None

    @property
    def experts(self) -> int:
        """How many experts the unit holds."""
        if self.fused:
            shape = next(iter(self.tensors.values())).shape
            return shape[0] if shape else 0
        return int(self.is_expert)

    @property
    def first_axis(self) -> int:
        """How many rows or experts the unit could be cut into; 0 for one that has no first axis in common."""
        if self.fused:
            return self.experts
        tensors = list(self.tensors.values())
        return tensors[0].shape[0] if len(tensors) == 1 and tensors[0].shape else 0

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def new_bytes(self, known: Mapping[str, TensorSpec], unmade: Collection[str] = ()) -> int:
        """Bytes of the tensors that are not ``known`` by their role, with that dtype and shape, and not ``unmade``."""
        return sum(
            t.nbytes
            for role, t in self.tensors.items()
            if role not in unmade and not (role in known and t.is_like(known[role]))
        )

    def projections(self) -> dict[str, dict[str, TensorSpec]]:
        """projection → parameter → tensor; the projection of a unit that is no expert is ``""``."""
        found: dict[str, dict[str, TensorSpec]] = {}
        for role, tensor in self.tensors.items():
            projection, _, parameter = role.rpartition(".")
            found.setdefault(projection, {})[parameter] = tensor
        return found

    def shorten(self, problem: str) -> str:
        """``problem`` with the unit's tensors by their short names: then it is one line for all units that share it."""
        return problem.replace(f"{self.name}.", "").replace(f"{self.name.rpartition('.')[0]}.", "")

    def with_tensors(self, tensors: Mapping[str, TensorSpec]) -> UnitSpec:
        return self._replace(tensors=tensors)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit with its data: ``tensors`` has the roles of ``spec.tensors``, with its dtypes and shapes."""

    spec: UnitSpec
    tensors: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a projection's weight that is quantised and packed on its own, such as what one NUMA node gets.

    ``projection`` is ``""`` for a weight that is no expert's.
    """

    projection: str
    index: int
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def role(self) -> str:
        """The role of the weight that this is a part of."""
        return f"{self.projection}.weight" if self.projection else "weight"

    def of(self, weight: np.ndarray) -> np.ndarray:
        """The view of ``weight`` [out, in] that this part covers."""
        return weight[self.rows[0] : self.rows[1], self.cols[0] : self.cols[1]]


class FusedWeight(NamedTuple):
    """How a fused unit's weight [E, rows, columns] holds each expert's ``projections``: one behind the other, or
    ``interleaved``, a row of each in turn; ``transposed``: with the axes of [out, in] exchanged."""

    projections: tuple[str, ...]
    interleaved: bool
    transposed: bool


@dataclass(frozen=True, slots=True)
class Demand:
    """What a layout asks of the quantizer for one unit.

    ``scale_bits``: the stored scale is that of a code of so many bits, so value = code * 2^(scale_bits - bits) * scale;
    None: of the code itself.
    """

    parts: tuple[Part, ...]
    scale_dtype: np.dtype = F32
    scale_bits: int | None = None


class QuantSpec(NamedTuple):
    """What a quantizer will deliver for a unit: for each part int8 codes [n, k] and scales [n, k / group_size].

    ``group_size`` None means one scale a row. ``method`` names rule and version, for the manifest.
    """

    unit: UnitSpec
    parts: tuple[Part, ...]
    bits: int
    method: str
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: np.dtype = F32
    scale_bits: int | None = None

    def groups(self, part: Part) -> int:
        """Scales per row of ``part``."""
        return 1 if self.group_size is None else -(-part.shape[1] // self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, of scales as they are computed and as they are stored, and of zero points."""
        scale = F32.itemsize + self.scale_dtype.itemsize + (0 if self.symmetric else 1)
        return sum(p.shape[0] * p.shape[1] + p.shape[0] * self.groups(p) * scale for p in self.parts)

    @property
    def step(self) -> int:
        """value = code * step * scale."""
        return 1 if self.scale_bits is None else 1 << (self.scale_bits - self.bits)


@dataclass(frozen=True, slots=True)
class QuantPart:
    """codes int8 [n, k]; scales [n, groups] in the spec's dtype; zeros int8 [n, groups], None if symmetric."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class QuantUnit:
    """A quantised unit: one :class:`QuantPart` for each of ``spec.parts``, in their order."""

    spec: QuantSpec
    parts: tuple[QuantPart, ...]


class PackedSpec(NamedTuple):
    """What a layout will write for a unit, byte for byte in size. ``format`` is name/version: ``kt-amx-int4/1``."""

    tensors: tuple[TensorSpec, ...]
    format: str

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


#: The host-owned buffers that a layout fills: tensor name → array of the planned dtype and shape.
PackedUnit = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source checkpoint as the manifest records it. ``header_hash`` is xxh3-128, in hex.

    ``identity`` is that of the handle which the header was read from; where a loader does not say, it is what lies at
    ``path`` as soon as the loader has been asked.
    """

    path: Path
    nbytes: int
    header_hash: str
    identity: Identity | None = None


class Header(Protocol):
    """The bytes that a file begins with; planning needs their number alone."""

    def __len__(self) -> int: ...

    def __bytes__(self) -> bytes: ...


@dataclass(frozen=True)
class FileSpec:
    """A file that a writer will publish: ``header``, then the tensors one behind the other, without gaps.

    ``path`` is relative to the output folder, with ``/`` between its parts. ``header`` may be ``bytes``; who
    reads it calls ``bytes(file.header)``.
    """

    path: str
    header: Header
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + total_bytes(self.tensors)
