"""The five stages. A stage is a frozen pydantic model: its fields are its options in pipeline.yaml."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, field_validator

from ktforge.contract.tensors import (
    Demand,
    FusedWeight,
    PackedSpec,
    PackedUnit,
    Part,
    QuantSpec,
    QuantUnit,
    SourceFile,
    TensorSpec,
    Unit,
    UnitSpec,
)
from ktforge.errors import Unsupported


class Result(NamedTuple):
    """What becomes of one unit behind the preprocessors: it is packed, or its tensors are renamed.

    ``fused``: whether the layout quantises and packs it in one step (:meth:`ktforge.Layout.fused`).

    ``renamed`` maps roles to output tensors; a role that is missing there is left out.
    """

    unit: UnitSpec
    quantizer: Quantizer | None = None
    quant: QuantSpec | None = None
    packed: PackedSpec | None = None
    fused: bool = False
    renamed: Mapping[str, TensorSpec] | None = None

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        if self.packed is not None:
            return self.packed.tensors
        return tuple((self.renamed or {}).values())


#: A function from a unit to what tells it from others.
PlanKey = Callable[[UnitSpec], Hashable]


def alike(unit: UnitSpec) -> Hashable:
    """The :data:`PlanKey` of a stage that looks at roles, dtypes and shapes alone."""
    return ()


class Stage(BaseModel, ABC):
    """Common to all stages.

    ``plan`` methods read no data and may raise :class:`~ktforge.Unsupported`, which becomes a refusal in the plan.
    Methods that do the work run in several threads at once and keep no state between units.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: The word after ``use:``.
    name: ClassVar[str]
    #: The key of the stage in pipeline.yaml.
    stage: ClassVar[str]
    #: Whether a layout has room, or a preprocessor work, for routed experts alone; a dense model is then refused.
    experts_only: ClassVar[bool] = False

    @field_validator("*")
    @classmethod
    def _is_a_path(cls, value: Any) -> Any:
        if isinstance(value, Path) and "\0" in str(value):
            raise ValueError("no path has a NUL character in it")
        return value

    def equip(self, classes: Sequence[type[Stage]]) -> Self:
        """This stage, told which stage classes are installed; called before anything else, where there is a registry.

        For a stage that leaves work to others by what they are, such as a loader that looks who can read a folder.
        """
        return self

    def bind(self, config: Mapping[str, Any]) -> Self:
        """This stage, told what the source's config.json says; called before ``plan``, on loader and writer too."""
        return self

    def delegates(self) -> Sequence[Stage]:
        """Stages that do some of this one's work, so that their code counts as its own; by default those among its
        options."""
        return [value for option in type(self).model_fields if isinstance(value := getattr(self, option), Stage)]

    def input_files(self) -> Sequence[Path]:
        """Files that decide what this stage makes, beside its options, such as statistics from a calibration.

        Their content counts: it is recorded in the manifest, and an unfinished output does not go on with another.
        """
        return ()

    def plan_key(self) -> PlanKey | None:
        """What ``plan``, and whatever else is asked in planning, looks at in a unit beside roles, dtypes and shapes.

        Units of equal keys that differ in the numbers of layer and expert alone are planned once, with numbers that
        stand for any (planning/kinds.py). :func:`alike` says that nothing else decides; None, the default, that each
        unit is planned by itself. A subclass does not inherit the answer: it may plan otherwise.
        """
        return None

    def edit_config(self, config: Mapping[str, Any], results: Sequence[Result]) -> Mapping[str, Any]:
        """What config.json becomes, given what the stages before this one made of it; unchanged by default.

        ``results`` says what becomes of every unit.
        """
        return config


def own_plan_key(stage: Stage) -> PlanKey | None:
    """What :meth:`Stage.plan_key` of a stage says, unless it is inherited: a subclass may plan otherwise than the class
    that answers for it. A loader whose ``rows`` and ``scratch_bytes`` are the default looks at nothing."""
    if isinstance(stage, Loader):
        asked = type(stage).rows, type(stage).scratch_bytes
        if asked == (Loader.rows, Loader.scratch_bytes):
            return alike
    return stage.plan_key() if "plan_key" in vars(type(stage)) else None


class Loader(Stage):
    """Opens a checkpoint. Raises :class:`~ktforge.CheckpointError` for what it cannot read."""

    stage: ClassVar[str] = "loader"

    @classmethod
    def reads(cls, folder: Path) -> bool:
        """Whether a folder holds weights in the form of this loader, by the names of its files.

        The loader ``auto`` asks, and with it ``inspect``, ``init`` and ``convert``; then it reads with
        ``cls(path=folder)``. By default a loader has to be named.
        """
        return False

    @abstractmethod
    def scan(self) -> Iterator[TensorSpec]:
        """Every tensor of the checkpoint, from headers alone."""

    @abstractmethod
    def read(self, spec: TensorSpec) -> np.ndarray:
        """The data of a scanned tensor in its dtype and shape; thread-safe, read-only, without a copy if possible."""

    def release(self, spec: TensorSpec) -> None:
        """A hint that what :meth:`read` gave of a tensor is not needed any more: memory behind it may go."""

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        """The spec under which :meth:`read` and :meth:`release` know these rows of the first axis of a scanned tensor.

        Then a layer's fused experts are read one by one. None if this loader reads whole tensors only.
        """
        return None

    def scratch_bytes(self, spec: TensorSpec) -> int:
        """Bytes that :meth:`read` needs beside the array that it gives, until it returns."""
        return 0

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json."""

    def folder(self) -> Path | None:
        """The folder of the checkpoint, None if it is in memory."""
        return None

    def side_files(self) -> Sequence[Path]:
        """Files that go into the output unchanged, by their relative paths there: tokenizer, templates, code."""
        return ()

    def open_side_file(self, path: Path) -> BinaryIO:
        """The content of one of :meth:`side_files`; that below :meth:`folder` by default. Raises OSError."""
        folder = self.folder()
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "the loader has no folder to find it in", str(path))
        descriptor = os.open(folder / path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb", buffering=0)
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file that has an end, but a folder, a pipe or a device", str(path))

    def sources(self) -> Sequence[SourceFile]:
        """The weight files, for the manifest."""
        return ()


class Preprocessor(Stage):
    """Turns units into other units: another dtype, or a fused tensor into its experts."""

    stage: ClassVar[str] = "preprocess"
    #: Whether it treats each expert of a fused unit by itself, and each row of a tensor that it leaves alone. Then it
    #: may be given a part of them, a fused unit of one expert for example. Each class says so for itself: a subclass,
    #: which may look across experts, does not inherit it.
    rowwise: ClassVar[bool] = False

    @abstractmethod
    def plan(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        """The units that :meth:`apply` will make of this one; ``[unit]`` itself leaves it alone."""

    @abstractmethod
    def apply(self, unit: Unit) -> Iterator[Unit]:
        """The planned units with their data, in the planned order."""

    def scratch_bytes(self, unit: UnitSpec) -> int:
        """The most bytes that :meth:`apply` needs at once for this unit, beside its arrays and those of the units that
        it makes; 0 if it makes no others.

        A planned tensor with the dtype and shape of the source's is taken for the same array: one that is made anew,
        such as a rotated weight, is to be counted here.
        """
        return 0

    def unmade(self, unit: UnitSpec) -> Collection[str]:
        """Roles of what :meth:`apply` makes of this unit that it delivers unmade (:mod:`ktforge.contract.pending`)."""
        return ()

    def taken_apart(self, unit: UnitSpec) -> Mapping[str, FusedWeight]:
        """How the weights of a fused unit held the experts that :meth:`plan` makes of it, by their names, so that
        ``ktforge dequantize`` can put them together again; by default nothing, and experts come back one by one."""
        return {}


class Quantizer(Stage):
    """Turns an expert's weights into integer codes and scales."""

    stage: ClassVar[str] = "quantize"
    #: Whether a kernel sees to it that codes fit their bits and scales are finite and not negative. Then they are not
    #: looked at again, which takes 0.2 ns a weight: a hundredth of what numpy or torch take to quantise one, a tenth of
    #: what a kernel takes. Each class says so for itself.
    trusted: ClassVar[bool] = False

    @abstractmethod
    def plan(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        """What :meth:`quantize` will deliver for the parts that the layout demands."""

    @abstractmethod
    def quantize(self, unit: Unit, spec: QuantSpec) -> QuantUnit:
        """Codes and scales as planned. Raises :class:`~ktforge.CheckpointError` for a weight that is not finite."""

    def scratch_bytes(self, unit: UnitSpec, spec: QuantSpec) -> int:
        """Bytes that :meth:`quantize` needs for a moment, beside the unit's arrays and what it delivers."""
        return 0


#: Fills the buffers of a packed unit from a unit that is not quantised.
Fused = Callable[[Unit, PackedUnit], None]


class Layout(Stage):
    """Arranges codes and scales as an engine reads them, and names the tensors of the output."""

    stage: ClassVar[str] = "layout"
    #: Whether readers of its outputs take a negative scale.
    signed_scales: ClassVar[bool] = False
    #: Whether an output with the lowest code of its bits (-8 of 4) is wrong, as :meth:`lowest_codes` says.
    refuses_lowest_codes: ClassVar[bool] = False
    #: Names of writers whose folders the readers of its outputs take; :meth:`serving` goes for these.
    served_from: ClassVar[tuple[str, ...]] = ("safetensors",)

    def demand(self, unit: UnitSpec) -> Demand:
        """How the quantizer shall cut the unit up; by default each projection is one part."""
        parts = [Part(p, 0, *[(0, n) for n in t["weight"].shape]) for p, t in unit.projections().items()]
        return Demand(tuple(parts))

    @abstractmethod
    def plan(self, spec: QuantSpec) -> PackedSpec:
        """The tensors that :meth:`pack` will fill, with their exact sizes."""

    def check(self, results: Sequence[Result]) -> Iterable[str]:
        """What speaks against the whole output, such as experts that one rule keeps and another packs."""
        return ()

    @abstractmethod
    def pack(self, unit: QuantUnit, out: PackedUnit) -> None:
        """Fills every byte of every buffer in ``out``."""

    def scratch_bytes(self, spec: QuantSpec) -> int:
        """Bytes that :meth:`pack`, or what :meth:`fused` gives, needs for a moment beside codes, scales and buffers."""
        return 0

    @property
    def numa_nodes(self) -> int | None:
        """For how many NUMA nodes weights are packed; None where that makes no difference."""
        return None

    def find(
        self, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any], read: Callable[[TensorSpec], np.ndarray]
    ) -> Iterator[QuantSpec]:
        """The units that this layout packed, among an output's tensors; their weights as BF16 under the source's names.

        ``read`` gets small tensors that shapes depend on. Raises Unsupported if the layout cannot be read back.
        """
        raise Unsupported(f"the layout {self.name} cannot be read back")

    def unpack(self, packed: PackedUnit, spec: QuantSpec) -> QuantUnit:
        """The inverse of :meth:`pack`, for the parts of ``spec``. Raises Unsupported if there is none."""
        raise Unsupported(f"the layout {self.name} cannot be read back")

    def lowest_codes(self, spec: QuantSpec) -> str | None:
        """What a reader makes of the lowest code (-8 of 4 bits) in a unit of ``spec``, and the mend, behind "which";
        None if it is a code like any other."""
        return None

    def serving(self, results: Iterable[Result], source: Path | None, output: Path, threads: int | None) -> str | None:
        """The command line that serves the output, as a user may copy it; None where there is none to name.

        ``results`` say what becomes of every unit, ``source`` is the checkpoint's folder if it has one, ``output`` the
        folder that was written, and ``threads`` those of the engine, where the pipeline's ``runtime`` says them.
        """
        return None

    def original(self, name: str) -> str:
        """The inverse of :meth:`passthrough`, as far as names tell."""
        return name

    def fused(self, quantizer: Quantizer, spec: QuantSpec) -> Fused | None:
        """A function that does ``quantizer.quantize`` and :meth:`pack` in one step, to the same bytes; None if this
        layout knows no such function for that quantizer and what it planned.

        It may read tensors that :func:`ktforge.contract.pending.pending` finds without having them made; with those
        that :meth:`Preprocessor.unmade` names it must, since no memory is planned for them. It is asked for while
        planning, with one spec of each kind where ``plan_key`` allows it, and again when a unit is worked on. Where few
        units are left, it is asked for with some of the parts of a spec, too, and fills what :meth:`plan` names for
        those.
        """
        return None

    def passthrough(self, tensor: TensorSpec) -> str | None:
        """The output name of a tensor that is not quantised; None leaves it out."""
        return tensor.name
