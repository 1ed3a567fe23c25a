"""Layout ``kt-amx``: the packed INT4/INT8 experts that KTransformers' AMX and AVX-512 backends read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from ktforge import (
    CheckpointError,
    Demand,
    Layout,
    PackedSpec,
    PackedUnit,
    Part,
    PluginError,
    Preset,
    Quantizer,
    QuantPart,
    QuantSpec,
    QuantUnit,
    Result,
    TensorSpec,
    Unit,
    UnitSpec,
    Unsupported,
    hookimpl,
    native,
)  # fmt: skip
from ktforge.contract.pending import pending
from ktforge.contract.stages import Fused, PlanKey, alike
from ktforge.contract.tensors import F32, PROJECTIONS
from ktforge.model.architectures import NUMBER
from ktforge.model.config import read_model_config
from ktforge.model.names import canonical
from ktforge.model.units import expert_unit
from ktforge_plugins.layouts.engines import kt_command
from ktforge_plugins.quantize.integer import SCALES, IntegerQuantizer, kt_method, not_finite

COLS_MULTIPLE = {8: 64, 4: 128}
_STEM = re.compile(
    rf"blk\.(?P<layer>{NUMBER})\.ffn_(?:gate|up|down)_exps\.(?P<expert>{NUMBER})\.numa\.(?P<part>{NUMBER})\.weight$"
)
INT8 = np.dtype(np.int8)
#: More NUMA nodes than any machine has.
MOST_PARTS = 64


class KtAmx(Layout):
    """Names ``blk.{layer}.ffn_{gate,up,down}_exps.{expert}.numa.{part}.{weight,scale}``, one part a thread pool.

    ``threadpool_count`` is the number of NUMA nodes the engine will run on (its ``--kt-threadpool-count``).
    ``non_experts``: ``rename`` as upstream's converter does (``model.layers.`` → ``blk.``), ``keep`` or ``omit``.
    """

    name: ClassVar[str] = "kt-amx"
    served_from: ClassVar[tuple[str, ...]] = ("safetensors", "kt-folder")
    experts_only: ClassVar[bool] = True
    refuses_lowest_codes: ClassVar[bool] = True
    threadpool_count: int = Field(default=2, ge=1, le=MOST_PARTS)
    non_experts: Literal["rename", "keep", "omit"] = "rename"

    @property
    def numa_nodes(self) -> int:
        return self.threadpool_count

    def plan_key(self) -> PlanKey:
        return alike

    def demand(self, unit: UnitSpec) -> Demand:
        parts = []
        if not unit.is_expert or unit.projections().keys() != set(PROJECTIONS):
            raise Unsupported(f"{self.name} holds whole routed experts only: gate, up and down in one precision")
        biases = [p for p, tensors in unit.projections().items() if "bias" in tensors]
        if biases:
            raise Unsupported(
                f"{self.name} has no place for the biases of {', '.join(biases)}: `ktforge moe-to-bf16` keeps them"
            )
        for projection, tensors in unit.projections().items():
            rows, cols = tensors["weight"].shape
            for p in range(self.threadpool_count):
                if projection == "down":
                    parts.append(Part(projection, p, (0, rows), self._portion(cols, p)))
                else:
                    parts.append(Part(projection, p, self._portion(rows, p), (0, cols)))
        return Demand(tuple(parts), F32, scale_bits=8)

    def plan(self, spec: QuantSpec) -> PackedSpec:
        if spec.bits not in COLS_MULTIPLE:
            raise Unsupported(f"{self.name} holds 4 or 8 bits, not {spec.bits}")
        if spec.group_size is not None or not spec.symmetric:
            raise Unsupported(
                f"{self.name} has room for one scale a row and no zero point: set group_size: channel, symmetric: true"
            )
        if spec.scale_dtype != F32 or spec.scale_bits != 8:
            raise Unsupported(f"{self.name} stores float32 scales of 8-bit codes")
        self._check_sizes(spec)
        tensors = []
        for part in spec.parts:
            n, k = part.shape
            stem = self._stem(spec.unit, part)
            tensors.append(TensorSpec(f"{stem}.weight", INT8, (n * k * spec.bits // 8,)))
            tensors.append(TensorSpec(f"{stem}.scale", F32, (n,)))
        return PackedSpec(tuple(tensors), f"kt-amx-int{spec.bits}/1")

    def check(self, results: Sequence[Result]) -> Iterable[str]:
        """The engine counts experts upward and stops at the first gap, and reads all in one precision."""
        kept = [r.unit.name for r in results if r.unit.is_expert and r.quant is None]
        if kept:
            yield f"rules keep {kept[0]}{f' and {len(kept) - 1:,} more' if kept[1:] else ''}, but {self.name} needs all"
        bits = sorted({r.quant.bits for r in results if r.quant is not None})
        if len(bits) > 1:
            yield f"rules ask for experts of {' and '.join(map(str, bits))} bits, but {self.name} has one precision"

    def edit_config(self, config: Mapping[str, Any], results: Sequence[Result]) -> Mapping[str, Any]:
        """Says what the folder is, so that no loader of ordinary checkpoints takes it for one.

        A ``quantization_config`` without ``quant_method`` is what transformers refuses; of a method that it does not
        know it only warns, and fills the experts that it cannot find with random numbers. ``amx_quantization`` is what
        KTransformers' own converter writes, and its command line shows; its engine reads the original's config.json.
        """
        packed = next((r.packed for r in results if r.packed is not None), None)
        if not config or packed is None:
            return config
        said = {"format": packed.format, "read_by": "KTransformers as --kt-weight-path, beside the original checkpoint"}
        method = packed.format.removeprefix("kt-amx-").partition("/")[0]
        amx = {"converted": True, "method": method, "numa_count": self.threadpool_count}
        return {**config, "quantization_config": said, "amx_quantization": amx}

    def pack(self, unit: QuantUnit, out: PackedUnit) -> None:
        for part, quantised in zip(unit.spec.parts, unit.parts, strict=True):
            stem = self._stem(unit.spec.unit, part)
            self._check_codes(unit.spec, part, quantised.codes)
            native.kt_amx_pack(quantised.codes, unit.spec.bits, out[f"{stem}.weight"])
            out[f"{stem}.scale"][:] = quantised.scales[:, 0]

    def find(
        self, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any], read: Callable[[TensorSpec], np.ndarray]
    ) -> Iterator[QuantSpec]:
        experts: dict[tuple[int, int], int] = {}
        for name in tensors:
            if match := _STEM.match(name):
                key = int(match["layer"]), int(match["expert"])
                experts[key] = max(experts.get(key, 0), 1 + int(match["part"]))
        if not experts:
            return
        model = read_model_config(config)
        count = max(experts.values())
        if count > MOST_PARTS:
            raise CheckpointError(f"an expert's weight is called numa.{count - 1}; {MOST_PARTS} parts are the most")
        for layer, expert in sorted(experts):
            unit = expert_unit(model, layer, expert)
            demand = self.model_copy(update={"threadpool_count": count}).demand(unit)
            first = demand.parts[0]
            weight = tensors.get(f"{self._stem(unit, first)}.weight")
            codes = first.shape[0] * first.shape[1]
            bits = 8 * weight.nbytes // codes if weight and codes else 8
            if bits not in COLS_MULTIPLE:
                raise CheckpointError(f"{weight} is no weight of {list(first.shape)} in 4 or 8 bits: see config.json")
            yield QuantSpec(unit, demand.parts, bits, kt_method(bits), scale_bits=8)

    def unpack(self, packed: PackedUnit, spec: QuantSpec) -> QuantUnit:
        parts = []
        for part in spec.parts:
            stem = self._stem(spec.unit, part)
            codes = native.kt_amx_unpack(packed[f"{stem}.weight"], part.shape, spec.bits)
            parts.append(QuantPart(codes, packed[f"{stem}.scale"].reshape(-1, 1)))
        return QuantUnit(spec, tuple(parts))

    def fused(self, quantizer: Quantizer, spec: QuantSpec) -> Fused | None:
        """One pass for the absmax quantizers, unless a subclass of theirs or of this layout does something else."""
        known = type(quantizer).quantize is IntegerQuantizer.quantize and type(self).pack is KtAmx.pack
        return partial(self._quantise_and_pack, spec) if known and spec.method == kt_method(spec.bits) else None

    def _quantise_and_pack(self, spec: QuantSpec, unit: Unit, out: PackedUnit) -> None:
        for part in spec.parts:
            role, stem = part.role, self._stem(spec.unit, part)
            weight = pending(unit.tensors, role)
            try:
                native.absmax_kt_amx(
                    weight if isinstance(weight, native.Fp8Blocks) else unit.tensors[role], part, spec.bits,
                    out[f"{stem}.weight"], out[f"{stem}.scale"],
                )  # fmt: skip
            except native.NotFinite as error:
                raise not_finite(spec.unit.tensors[role], part, error) from error

    def lowest_codes(self, spec: QuantSpec) -> str | None:
        return "kt-kernel up to 0.7.0 computes wrongly on AVX-512: convert the original again, and there are none"

    def serving(self, results: Iterable[Result], source: Path | None, output: Path, threads: int | None) -> str | None:
        bits = next((r.quant.bits for r in results if r.quant is not None), None)
        return None if bits is None else kt_command(f"AMXINT{bits}", source, output, threads, self.threadpool_count)

    def passthrough(self, tensor: TensorSpec) -> str | None:
        if self.non_experts == "omit":
            return None
        if self.non_experts == "keep":
            return tensor.name
        name = canonical(tensor.name)
        if name.startswith("model.layers."):  # the language model's own layers, not those of a vision tower
            return "blk." + name.removeprefix("model.layers.")
        return name.removeprefix("model.")

    def original(self, name: str) -> str:
        if self.non_experts != "rename":
            return name
        if name.startswith("blk."):
            return "model.layers." + name.removeprefix("blk.")
        return name if name.startswith("lm_head.") else "model." + name

    def _portion(self, size: int, part: int) -> tuple[int, int]:
        return part * size // self.threadpool_count, (part + 1) * size // self.threadpool_count

    @staticmethod
    def _stem(unit: UnitSpec, part: Part) -> str:
        return f"blk.{unit.layer}.ffn_{part.projection}_exps.{unit.expert}.numa.{part.index}"

    def _check_codes(self, spec: QuantSpec, part: Part, codes: np.ndarray) -> None:
        """Raises PluginError for the lowest code that bits can say: kernels negate codes, and for it there is no other.

        See docs/formats/kt-amx.md. The pass of :meth:`fused` never makes one.
        """
        most = (1 << (spec.bits - 1)) - 1
        lowest = codes.min(initial=0)
        if lowest < -most:
            raise PluginError(
                f"{spec.unit.tensors[part.role].name}: the quantizer (method {spec.method}) made the code {lowest}; "
                f"{self.name} takes int{spec.bits} codes from {-most} to {most}, since kt-kernel up to 0.7.0 computes "
                f"{-most - 1} wrongly on AVX-512: have the quantizer clamp at {-most}"
            )

    def _check_sizes(self, spec: QuantSpec) -> None:
        """Refuses what upstream aborts on after minutes, and says which thread-pool counts fit."""
        expert_size, hidden = spec.unit.tensors["gate.weight"].shape
        cols = COLS_MULTIPLE[spec.bits]
        problems = []
        if hidden % cols:
            problems.append(f"hidden size {hidden} is not a multiple of {cols}, as {self.name} int{spec.bits} needs")

        def fits(count: int) -> bool:
            return expert_size % count == 0 and expert_size // count % cols == 0  # cols is a multiple of 32

        cut = (part.shape[1 if part.projection == "down" else 0] for part in spec.parts)
        if any(count % cols for count in cut):
            count = 1 + max(part.index for part in spec.parts)
            fitting = [count for count in range(1, MOST_PARTS + 1) if fits(count)]
            mend = f"counts that fit: {', '.join(map(str, fitting))}" if fitting else "no count fits"
            problems.append(
                f"threadpool_count {count} does not split expert size {expert_size} into multiples of "
                f"{cols}, as {self.name} int{spec.bits} needs; {mend}"
            )
        if problems:
            raise Unsupported(*problems)


@hookimpl
def ktforge_layouts() -> Iterable[type[Layout]]:
    return [KtAmx]


@hookimpl
def ktforge_presets() -> Iterable[Preset]:
    for order, (bits, scales, own, other) in enumerate(((4, {"scales": "auto"}, SCALES, "or int8"), (8, {}, {}, ""))):
        yield Preset(
            f"int{bits}", {"use": f"int{bits}", **scales}, {"use": KtAmx.name},
            f"INT{bits} with a scale a row, for KTransformers' AMXINT{bits}",
            options={
                "threadpool_count": "layout.threadpool_count", "no_merge_safetensor": "writer.use=kt-folder", **own,
            },
            tries=tuple({"threadpool_count": count} for count in (2, 1, 4, 8)),
            notes={"quantize": other, "layout": "NUMA nodes that the engine will run on"}, order=order,
        )  # fmt: skip
