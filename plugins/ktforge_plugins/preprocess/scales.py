"""Scales as the formats store them, and what they mean: told by dtype and shape, never by name. Not a plugin itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ktforge import TensorSpec, Unsupported, native
from ktforge.contract.tensors import BF16, DTYPES, F32, dtype_name
from ktforge_plugins.preprocess import integers

#: Names in use for the scale of a weight: DeepSeek's, compressed-tensors', DeepSeek-V4's, Mistral's.
NAMES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
FLOATS = (F32, np.dtype(np.float16), BF16)
E8M0 = DTYPES["F8_E8M0"]
U8 = DTYPES["U8"]
#: Powers of two: E8M0 under its own name, or its bytes as U8 (OCP Microscaling Formats 1.0, section 5.4.1).
EXPONENTS = (E8M0, U8)


def scale_of(parameters: Mapping[str, TensorSpec]) -> tuple[str, TensorSpec] | None:
    """The parameter that scales a weight and its tensor. Raises Unsupported for two of them."""
    found = [n for n in NAMES if n in parameters]
    if len(found) > 1:
        raise Unsupported(f"{parameters[found[0]].name} and {parameters[found[1]].name} would both be its scale")
    return (found[0], parameters[found[0]]) if found else None


def block_of(
    weight: TensorSpec, shape: tuple[int, int], scale: TensorSpec, announced: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Rows and columns of a weight of ``shape`` that one number of ``scale`` is for.

    One number is for all, [rows] and [rows, 1] for a row each. Blocks over the edge are only known from ``announced``,
    and where that is given, no other grid is. Raises Unsupported for a shape that makes no grid.
    """
    rows, cols = shape
    count = math.prod(scale.shape)
    grid = (-(-rows // announced[0]), -(-cols // announced[1])) if announced else (1, 1)
    if count == 1 and (grid == (1, 1) or len(scale.shape) < 2):
        return rows, cols
    if scale.shape in ((rows,), (rows, 1)):
        return 1, cols
    if count and len(scale.shape) == 2:
        if announced:  # what config.json says is what the scales mean, even where another grid would divide evenly
            if scale.shape == grid:
                return announced
            if scale.shape == (rows, grid[1]):  # of rows that were cut out of blocks which gate and up share
                return 1, announced[1]
        elif rows % scale.shape[0] == 0 and cols % scale.shape[1] == 0:
            return rows // scale.shape[0], cols // scale.shape[1]
    blocks = f"blocks of {list(announced)} (config.json)" if announced else "blocks of one size (config.json has none)"
    raise Unsupported(
        f"{scale.name} is {list(scale.shape)}, which is no scale for all, for rows or for {blocks} of {weight.name} "
        f"{list(shape)}"
    )


def values_of(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """A stored scale as contiguous float32, one number for each block of a weight of ``shape``."""
    if scale.dtype == U8:
        scale = scale.view(E8M0)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return np.ascontiguousarray(scale.astype(np.float32).reshape(grid))


def scratch(scale: TensorSpec) -> int:
    """Bytes that :func:`values_of` needs of a stored scale, and a product with one number more."""
    return 12 * math.prod(scale.shape)


def scaled(values: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """BF16 [n, k]: ``values`` times ``scale`` (of :func:`values_of`) as float32, rounded once."""
    n, k = values.shape
    out = np.empty((n, k), BF16)
    for band in integers.bands(n, k):
        which = np.arange(band.start, band.stop) // block[0]
        product = values[band].astype(np.float32)
        product *= np.repeat(scale[which], block[1], axis=1)[:, :k]
        out[band] = native.to_bf16(product)
    return out


def check_dtype(scale: TensorSpec, dtypes: tuple[np.dtype, ...]) -> None:
    """Raises Unsupported for a scale of another dtype."""
    if scale.dtype not in dtypes:
        names = " or ".join(dtype_name(d) for d in dtypes)
        raise Unsupported(f"{scale.name} is {dtype_name(scale.dtype)}; it must be {names}")
