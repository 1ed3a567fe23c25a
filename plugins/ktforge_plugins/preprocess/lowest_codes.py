"""Whether experts in packed INT4 have codes of -8: see docs/formats/compressed-tensors.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ktforge import CheckpointError, Loader, ModelConfig, TensorSpec, UnitSpec, native
from ktforge.contract.checks import blame
from ktforge.contract.tensors import BF16, DTYPES, F32

#: How much is looked at: so many weights, evenly spread, and so many bytes of each. That is 16 million codes.
MOST_WEIGHTS, MOST_BYTES = 32, 1 << 18


#: Which readers compute a code of -8 wrongly, and the mend.
RAWINT4_MINDS = (
    "RAWINT4 of kt-kernel up to 0.7.0 computes wrongly on AVX-512: serve it with 0.7.0.post4 or later, or convert it "
    "with --quant-method rawint4"
)


@dataclass(frozen=True)
class LowestCodes:
    """The fraction of codes that are -8 among ``codes`` looked at, in ``looked_at`` of ``weights`` weights."""

    fraction: float
    codes: int
    looked_at: int
    weights: int

    def __str__(self) -> str:
        """For a user: which readers mind, and what mends it."""
        sample = f"{self.codes:,} looked at, in {self.looked_at:,} of {self.weights:,} weights"
        if not self.fraction:
            return f"none of the INT4 codes is -8 ({sample})"
        return f"{100 * self.fraction:.2g} % of the INT4 codes are -8 ({sample}), which {RAWINT4_MINDS}"


def lowest_codes(loader: Loader, model: ModelConfig, experts: Iterable[UnitSpec]) -> LowestCodes | None:
    """A look at experts in the form that KTransformers' RAWINT4 reads; None if there are none.

    Raises CheckpointError for a part of a file that cannot be read.
    """
    weights = [weight for unit in experts for weight in _packed_int4(unit, model)]
    if not weights:
        return None
    looked_at = min(len(weights), MOST_WEIGHTS)
    lowest = codes = 0
    lost = native.lost_pages()
    with native.lost_pages_caught():
        for i in range(looked_at):
            packed = _first_rows(loader, weights[i * len(weights) // looked_at])
            lowest += int(np.count_nonzero(packed & 0x0F == 0) + np.count_nonzero(packed & 0xF0 == 0))
            codes += 2 * packed.size
    if native.lost_pages() != lost:
        raise CheckpointError(native.UNREADABLE)
    return LowestCodes(lowest / codes, codes, looked_at, len(weights))


def _packed_int4(unit: UnitSpec, model: ModelConfig) -> Iterator[TensorSpec]:
    """Its weights of symmetric integers, two a byte: 4-bit floats have no float scales."""
    if not unit.is_expert or not any([role.endswith(".weight_packed") for role in unit.tensors]):
        return
    for parameters in unit.projections().values():
        weight, scale = parameters.get("weight_packed"), parameters.get("weight_scale")
        if weight is None or scale is None or "weight_zero_point" in parameters:
            continue
        is_integer = weight.dtype in (DTYPES["I32"], DTYPES["U8"]) and scale.dtype in (BF16, F32, DTYPES["F16"])
        if is_integer and len(weight.shape) == 2 and 0 < 2 * weight.nbytes == model.expert_size * model.hidden:
            yield weight


def _first_rows(loader: Loader, weight: TensorSpec) -> np.ndarray:
    """The bytes of its first rows; of all, if the loader reads nothing less."""
    rows = max(1, MOST_BYTES * weight.shape[0] // weight.nbytes)
    with blame(loader, weight.name):
        part = loader.rows(weight, 0, min(rows, weight.shape[0])) or weight
        return np.ascontiguousarray(loader.read(part)).view(np.uint8)
