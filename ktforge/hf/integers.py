"""A projection as the engine's integer kernels compute it: codes times activations that are rounded to int8."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ktforge.contract.tensors import QuantPart, QuantSpec
from ktforge.hf.arrays import tensor_of

#: float32 holds every integer up to this: sums of products are exact as long as they stay below.
EXACT = 1 << 24
#: The largest code of an activation.
LARGEST = 127


class IntegerProjection:
    """Codes of one projection [out, in], in the parts that the layout made of it.

    Activations are rounded to int8 for each token over the columns of a part, scale = largest / 127; the products with
    the codes are summed as integers, and both scales are applied to the sum. So do the AMX and AVX-512 kernels of
    kt-kernel (``moe_kernel.hpp``: a NUMA node has a part and rounds what it is given).
    """

    def __init__(
        self,
        parts: Iterable[tuple[QuantSpec, QuantPart]],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape, self._dtype = shape, dtype
        self._parts = [_Part(spec, part, device) for spec, part in parts]
        self.nbytes = sum(p.nbytes for p in self._parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]."""
        out = torch.zeros(len(x), self._shape[0], dtype=torch.float32, device=x.device)
        rounded: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for part in self._parts:
            columns = part.columns
            if columns not in rounded:
                rounded[columns] = rounded_to_int8(x[:, slice(*columns)])
            codes, scales = rounded[columns]
            out[:, part.rows] += part.times(codes) * scales
        return out.to(self._dtype)


def rounded_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, k], integers in float32, and scales [n, 1] of activations [n, k]. A row of zeros has the scale 0."""
    x = x.float()
    scales = x.abs().amax(dim=-1, keepdim=True) / LARGEST
    return torch.where(scales > 0, x / scales, 0.0).round_(), scales


class _Part:
    def __init__(self, spec: QuantSpec, part: QuantPart, device: torch.device) -> None:
        (place,) = spec.parts
        self.rows, self.columns = slice(*place.rows), place.cols
        self._codes = tensor_of(np.ascontiguousarray(part.codes)).to(device, copy=True)
        self._scales = tensor_of(part.scales.astype(np.float32)).to(device) * spec.step
        self._zeros = None if part.zeros is None else tensor_of(np.ascontiguousarray(part.zeros)).to(device, copy=True)
        self._group = spec.group_size or self._codes.shape[1]
        self._most = EXACT // (LARGEST << (spec.bits - 1 if part.zeros is None else spec.bits))
        self.nbytes = self._codes.nbytes + self._scales.nbytes + (0 if self._zeros is None else self._zeros.nbytes)

    def times(self, activations: torch.Tensor) -> torch.Tensor:
        """Integers [n, k] in float32 → [n, rows]: each group's integer sum, times its scale."""
        out = torch.zeros(len(activations), len(self._codes), dtype=torch.float32, device=activations.device)
        for number, start in enumerate(range(0, self._codes.shape[1], self._group)):
            stop = min(start + self._group, self._codes.shape[1])
            codes = self._codes[:, start:stop].float()
            if self._zeros is not None:
                codes -= self._zeros[:, number : number + 1].float()
            out += self._sum(activations[:, start:stop], codes) * self._scales[:, number]
        return out

    def _sum(self, activations: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """The integer sum, by float32 products of so few columns that they are exact."""
        width = codes.shape[1]
        if width <= self._most:
            return activations @ codes.T
        cuts = range(0, width, self._most)
        exact = sum((activations[:, c : c + self._most] @ codes[:, c : c + self._most].T).double() for c in cuts)
        assert isinstance(exact, torch.Tensor)
        return exact.float()
