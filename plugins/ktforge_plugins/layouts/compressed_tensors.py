"""Layout ``compressed-tensors``: the standard files that KTransformers' RAWINT4, vLLM, SGLang and transformers read."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from ktforge import (
    CheckpointError,
    Demand,
    Layout,
    PackedSpec,
    PackedUnit,
    Part,
    Preset,
    QuantPart,
    QuantSpec,
    QuantUnit,
    Result,
    TensorSpec,
    UnitSpec,
    Unsupported,
    hookimpl,
    native,
)
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import BF16
from ktforge.model.config import quantization_config
from ktforge_plugins.layouts.engines import kt_command
from ktforge_plugins.preprocess.lowest_codes import RAWINT4_MINDS
from ktforge_plugins.quantize.integer import SCALES

INT8, INT32, INT64 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64)
WORD_BITS = 32
#: Columns that share a scale where KTransformers' backend RAWINT4 reads it.
RAWINT4_GROUP = 32


class CompressedTensors(Layout):
    """Names stay those of the source; ``weight`` becomes ``weight_packed`` and ``weight_scale``, and so on.

    ``format``: ``pack-quantized`` packs codes of 4 or 8 bits into int32 words, ``int-quantized`` stores 8-bit codes as
    they are. Scales are BF16. See docs/formats/compressed-tensors.md.
    """

    name: ClassVar[str] = "compressed-tensors"
    format: Literal["pack-quantized", "int-quantized"] = "pack-quantized"

    def plan_key(self) -> PlanKey:
        return alike

    def demand(self, unit: UnitSpec) -> Demand:
        biases = [p for p, tensors in unit.projections().items() if "bias" in tensors]
        if biases:  # of experts; elsewhere a bias is a unit of its own
            raise Unsupported(
                f"readers of {self.name} know no biases of experts, and {', '.join(biases)} have some: "
                "`ktforge moe-to-bf16` keeps them"
            )
        return Demand(super().demand(unit).parts, scale_dtype=BF16)

    def plan(self, spec: QuantSpec) -> PackedSpec:
        if spec.bits not in (4, 8) or (self.format == "int-quantized" and spec.bits != 8):
            raise Unsupported(f"{self.format} does not hold {spec.bits} bits")
        if spec.scale_dtype != BF16 or spec.scale_bits is not None:
            raise Unsupported(f"{self.name} stores BF16 scales of the codes themselves")
        tensors = [tensor for part in spec.parts for tensor in self._tensors(spec, part)]
        return PackedSpec(tuple(tensors), f"{self.name}-{self.format}-int{spec.bits}/1")

    def pack(self, unit: QuantUnit, out: PackedUnit) -> None:
        for part, quantised in zip(unit.spec.parts, unit.parts, strict=True):
            module = _module(unit.spec.unit, part)
            out[f"{module}.weight_scale"][:] = quantised.scales
            if self.format == "int-quantized":
                out[f"{module}.weight"][:] = quantised.codes
                if quantised.zeros is not None:
                    out[f"{module}.weight_zero_point"][:] = quantised.zeros
                continue
            out[f"{module}.weight_shape"][:] = part.shape
            _pack_words(quantised.codes, unit.spec.bits, out[f"{module}.weight_packed"])
            if quantised.zeros is not None:  # packed along the rows
                words = out[f"{module}.weight_zero_point"]
                padded = np.full((quantised.zeros.shape[1], words.shape[0] * (WORD_BITS // unit.spec.bits)), 0, np.int8)
                padded[:] = -(1 << (unit.spec.bits - 1))  # the code that is stored as 0
                padded[:, : part.shape[0]] = quantised.zeros.T
                packed = np.empty((words.shape[1], words.shape[0]), np.int32)
                _pack_words(padded, unit.spec.bits, packed)
                words[:] = packed.T

    def find(
        self, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any], read: Callable[[TensorSpec], np.ndarray]
    ) -> Iterator[QuantSpec]:
        for name, scale in tensors.items():
            if not name.endswith(".weight_scale"):
                continue
            module = name.removesuffix(".weight_scale")
            codes = tensors.get(f"{module}.weight" if self.format == "int-quantized" else f"{module}.weight_packed")
            if codes is None or codes.dtype not in (INT8, INT32) or len(scale.shape) != 2:
                continue
            n, k = codes.shape
            if self.format == "pack-quantized":
                shape = tensors.get(f"{module}.weight_shape")
                if shape is None or shape.shape != (2,):
                    raise CheckpointError(f"{module}.weight_packed has no weight_shape beside it: get a whole copy")
                n, k = (int(size) for size in read(shape))
            if min(n, k, *scale.shape) < 1 or k % scale.shape[1]:
                raise CheckpointError(f"{name} is {list(scale.shape)}, which does not fit a weight of [{n}, {k}]")
            bits = 8 if self.format == "int-quantized" else WORD_BITS * codes.shape[1] // k
            weight = TensorSpec(f"{module}.weight", BF16, (n, k), codes.file)
            unit = UnitSpec(weight.name, {"weight": weight})
            size = None if scale.shape[1] == 1 else k // scale.shape[1]
            symmetric = f"{module}.weight_zero_point" not in tensors
            parts = (Part("", 0, (0, n), (0, k)),)
            yield QuantSpec(unit, parts, bits, f"minmax-int{bits}/1", size, symmetric, BF16)

    def unpack(self, packed: PackedUnit, spec: QuantSpec) -> QuantUnit:
        parts = []
        for part in spec.parts:
            module = _module(spec.unit, part)
            zeros = None
            if self.format == "int-quantized":
                codes = packed[f"{module}.weight"]
                zeros = None if spec.symmetric else packed[f"{module}.weight_zero_point"]
            else:
                codes = _unpack_words(packed[f"{module}.weight_packed"], spec.bits)
                if not spec.symmetric:
                    words = np.ascontiguousarray(packed[f"{module}.weight_zero_point"].T)
                    zeros = np.ascontiguousarray(_unpack_words(words, spec.bits)[:, : part.shape[0]].T)
            parts.append(QuantPart(codes, packed[f"{module}.weight_scale"], zeros))
        return QuantUnit(spec, tuple(parts))

    def edit_config(self, config: Mapping[str, Any], results: Sequence[Result]) -> Mapping[str, Any]:
        """Adds ``quantization_config``: a config group per scheme, and everything left unquantised under ``ignore``."""
        if quantization_config(config):
            raise Unsupported(
                "config.json has a quantization_config already, for weights that stay as they are: put moe-to-bf16 "
                "under preprocess, which makes them BF16"
            )
        schemes: dict[tuple[Any, ...], list[str]] = {}
        for result in results:
            if result.quant is not None:
                key = (result.quant.bits, result.quant.group_size, result.quant.symmetric)
                schemes.setdefault(key, []).extend(_module(result.unit, part) for part in result.quant.parts)
        if not schemes:
            return config
        # The largest group is "every Linear that no other group names and ignore does not list".
        main = max(schemes, key=lambda key: len(schemes[key]))
        groups = {}
        for i, (key, modules) in enumerate(sorted(schemes.items(), key=lambda item: item[0] != main)):
            targets = ["Linear"] if key == main else sorted(modules)
            groups[f"group_{i}"] = {"targets": targets, "weights": _weights(*key), "format": self.format}
        ignored = sorted({m for r in results if r.quant is None for m in _linear_modules(r.unit)})
        quantization = {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
        }
        return {**config, "quantization_config": quantization}

    def lowest_codes(self, spec: QuantSpec) -> str | None:
        is_raw = spec.symmetric and spec.bits == 4 and spec.group_size == RAWINT4_GROUP
        if self.format != "pack-quantized" or not is_raw or ".experts." not in spec.unit.name:
            return None
        return RAWINT4_MINDS

    def serving(self, results: Iterable[Result], source: Path | None, output: Path, threads: int | None) -> str | None:
        """By KTransformers where experts alone are quantised, as its RAWINT4 reads them; else by vLLM."""
        quantised = [r for r in results if r.quant is not None]
        if not quantised:
            return None
        raw = self.format == "pack-quantized" and all(
            r.unit.is_expert and r.quant and r.quant.bits == 4 and r.quant.group_size == RAWINT4_GROUP
            and r.quant.symmetric for r in quantised
        )  # fmt: skip
        return (
            kt_command("RAWINT4", source, output, threads, None) if raw else shlex.join(["vllm", "serve", str(output)])
        )

    def _tensors(self, spec: QuantSpec, part: Part) -> list[TensorSpec]:
        (n, k), groups, module = part.shape, spec.groups(part), _module(spec.unit, part)
        per_word = WORD_BITS // spec.bits
        scale = TensorSpec(f"{module}.weight_scale", BF16, (n, groups))
        if self.format == "int-quantized":
            made = [TensorSpec(f"{module}.weight", INT8, (n, k)), scale]
            return made if spec.symmetric else [*made, TensorSpec(f"{module}.weight_zero_point", INT8, (n, groups))]
        if k % per_word:
            raise Unsupported(f"{module}.weight has {k} columns, which is not a multiple of {per_word} codes a word")
        made = [
            TensorSpec(f"{module}.weight_packed", INT32, (n, k // per_word)),
            scale,
            TensorSpec(f"{module}.weight_shape", INT64, (2,)),
        ]
        if not spec.symmetric:
            made.append(TensorSpec(f"{module}.weight_zero_point", INT32, (-(-n // per_word), groups)))
        return made


def _module(unit: UnitSpec, part: Part) -> str:
    return unit.tensors[part.role].name.removesuffix(".weight")


def _linear_modules(unit: UnitSpec) -> Iterable[str]:
    """The modules of a unit that may be Linear: those with a matrix for a weight."""
    for tensor in unit.tensors.values():
        if tensor.name.endswith(".weight") and len(tensor.shape) == 2:
            yield tensor.name.removesuffix(".weight")


def _weights(bits: int, group_size: int | None, symmetric: bool) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
    }


def _pack_words(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """codes [n, k] of ``bits`` bits as int32 words, the first code in the lowest bits, each as code + 2^(bits - 1)."""
    if bits == 4:
        native.nibbles_pack(codes, out)
    else:
        np.bitwise_xor(codes.view(np.uint8), 0x80, out=out.view(np.uint8))


def _unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    shape = (words.shape[0], words.shape[1] * WORD_BITS // bits)
    if bits == 4:
        return native.nibbles_unpack(words, shape)
    return (words.view(np.uint8) ^ 0x80).view(np.int8).reshape(shape)


@hookimpl
def ktforge_layouts() -> Iterable[type[Layout]]:
    return [CompressedTensors]


@hookimpl
def ktforge_presets() -> Iterable[Preset]:
    layout, readers = {"use": CompressedTensors.name}, "for KTransformers' RAWINT4, vLLM, SGLang, transformers"
    columns = f"columns that share a scale, {RAWINT4_GROUP}, and codes -7 to 7: as every RAWINT4 reads them"
    # A code of -8 its kernels up to 0.7.0 compute wrongly on AVX-512.
    grouped = {"use": "int4", "group_size": RAWINT4_GROUP, "narrow_range": True, "scales": "auto"}
    yield Preset(
        "rawint4", grouped, layout, f"INT4 in groups of {RAWINT4_GROUP}, codes -7 to 7, {readers}", options=SCALES,
        notes={"quantize": columns, "layout": readers}, order=10,
    )  # fmt: skip
    for order, (bits, scales, own) in enumerate(((8, {}, {}), (4, {"scales": "auto"}, SCALES)), 11):
        yield Preset(
            f"int{bits}", {"use": f"int{bits}", **scales}, layout, f"INT{bits} for vLLM, SGLang, transformers",
            with_layout=True, options={"group_size": "quantize.group_size", **own}, notes={"layout": readers},
            order=order,
        )  # fmt: skip
