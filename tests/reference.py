"""KTransformers' quantisation, packing and names once more, in NumPy and from the format's description alone.

Nothing here calls ktforge: this is what the kernels and the whole pipeline are compared with.
"""

import numpy as np


def quantise(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [n, k] and float32 scales [n] of a bf16 matrix."""
    w = weight.astype(np.float32)
    amax = np.abs(w).max(axis=1)
    scale = amax * np.float32(1 / 127) if bits == 8 else (amax.astype(np.float64) / 112.0).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(scale != 0, np.float32(1) / scale, np.float32(0))
        product = w * inverse[:, None]
    # An infinite inverse (rows below 2^-121) makes 0 * inf; the code of zero is zero.
    codes = np.clip(np.rint(np.nan_to_num(product, nan=0.0, posinf=127, neginf=-127)), -127, 127).astype(np.int32)
    if bits == 4:
        codes = np.sign(codes) * np.minimum((np.abs(codes) + 8) >> 4, 7)
    return codes.astype(np.int8), scale


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """The AMX B-operand layout of codes [n, k], as int8 [n * k * bits / 8]."""
    n, k = codes.shape
    block_rows, step_cols, block_cols = {8: (64, 64, 3584), 4: (128, 128, 3584)}[bits]
    tiles = []
    for n0 in range(0, n, block_rows):
        for k0 in range(0, k, block_cols):
            for row in range(n0, min(n, n0 + block_rows), 32):
                for col in range(k0, min(k, k0 + block_cols), step_cols):
                    for half in (row, row + 16):
                        tile = codes[half : half + 16, col : col + step_cols]
                        if bits == 4:
                            tile = (tile[:, :64] & 0x0F) | ((tile[:, 64:] & 0x0F) << 4)
                        words = np.ascontiguousarray(tile.astype(np.int8)).view(np.uint32)
                        tiles.append(np.ascontiguousarray(words.T).view(np.int8).ravel())
    return np.concatenate(tiles)


def packed_expert(layer: int, expert: int, weights: dict[str, np.ndarray], bits: int, parts: int) -> dict:
    """Output name → array for one expert. ``weights``: gate and up [I, H], down [H, I], bf16."""
    out = {}
    for projection, weight in weights.items():
        for p, share in enumerate(np.split(weight, parts, axis=1 if projection == "down" else 0)):
            codes, scale = quantise(np.ascontiguousarray(share), bits)
            stem = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{p}"
            out[f"{stem}.weight"], out[f"{stem}.scale"] = pack(codes, bits), scale
    return out


def quantise_groups(
    weight: np.ndarray, bits: int, size: int, symmetric: bool, bf16_scales: bool = True, narrow: bool = False
):
    """Codes int8 [n, k], float32 scales and int zeros [n, groups] of a bf16 matrix, by compressed-tensors' rule.

    Symmetric: scale = amax / ((2^bits - 1) / 2); narrow: amax / (2^(bits - 1) - 1), and no lowest code.
    Asymmetric: scale = (max - min) / (2^bits - 1) over a range that includes zero, and a zero point that puts min on
    the lowest code.
    """
    n, k = weight.shape
    half = 1 << (bits - 1)
    lowest = 1 - half if narrow else -half
    codes = np.empty((n, k), np.int8)
    scales, zeros = (np.zeros((n, -(-k // size)), dtype) for dtype in (np.float32, np.int8))
    for g, start in enumerate(range(0, k, size)):
        w = weight[:, start : start + size].astype(np.float64)
        low, high = w.min(axis=1), w.max(axis=1)
        if narrow:
            scale = np.maximum(-low, high) / (half - 1)
        elif symmetric:
            scale = 2 * np.maximum(-low, high) / (2 * half - 1)
        else:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            scale = (high - low) / (2 * half - 1)
        scale = scale.astype(np.float32)
        if bf16_scales:
            scale = scale.astype(weight.dtype).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = np.where(scale != 0, np.float32(1) / scale, np.float32(0))
            product = w.astype(np.float32) * inverse[:, None]
            zero = np.where(scale != 0, np.clip(np.rint(-half - low / scale.astype(np.float64)), -half, half - 1), 0)
        zero = np.zeros(n) if symmetric else zero
        rounded = np.rint(np.clip(np.nan_to_num(product, nan=0.0), -512, 512))
        codes[:, start : start + size] = np.clip(rounded + zero[:, None], lowest, half - 1)
        scales[:, g], zeros[:, g] = scale, zero
    return codes, scales, zeros


def _direct(m, h, factors, largest, most):
    """The best fit of a short run: float32 sums of every eighth number, added as a tree."""
    f32 = np.float32

    def total(values):
        lanes = np.zeros(8, f32)
        for row in np.concatenate([values, np.zeros(-len(values) % 8, f32)]).reshape(-1, 8):
            lanes = lanes + row
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        return float(lanes[0])

    def fit(inverse):
        q = np.rint(np.minimum(m * inverse, most))
        return total(h * q * m), total(h * q * q)

    return [fit(most / (factor * largest)) for factor in factors], lambda n, d: fit(f32(d / n))


def _binned(w, h, factors, largest, most, power):
    """The best fit of a long run: sums of the bf16 magnitudes above each, from the largest down."""
    f32 = np.float32
    bits = w.view(np.uint16) & 0x7FFF
    least = int((factors[0] * largest / (f32(4) * most) / power).view(np.uint32)) >> 16
    lowest = max(least, int(bits.max()) + 1 - 1024, 0)
    magnitudes = np.arange(lowest, int(bits.max()) + 1, dtype=np.uint16).view(w.dtype).astype(f32) * power
    there = bits >= lowest
    sums = np.zeros(len(magnitudes), f32)
    if h is None:
        sums = np.bincount(bits[there] - lowest, minlength=len(magnitudes)).astype(f32) * magnitudes
    else:
        np.add.at(sums, bits[there] - lowest, h[there])
    tails = [np.append(np.cumsum(s[::-1])[::-1], 0) for s in (sums.astype(float), sums.astype(float) * magnitudes)]

    def fit(scale):
        edges = [((f32(q) - f32(0.5)) * scale / power).view(np.uint32) for q in range(1, int(most) + 1)]
        bins = [min(max(((int(e) + 0xFFFF) >> 16) - lowest, 0), len(magnitudes)) for e in edges]
        n = d = 0.0
        for q, b in enumerate(bins):
            n, d = n + tails[1][b], d + (2 * q + 1) * tails[0][b]
        return n, d

    return [fit(factor * largest / most) for factor in factors], lambda n, d: fit(f32(n / d))


def search(
    weight: np.ndarray, bits: int, size: int, factors: np.ndarray, weights: np.ndarray | None, step: int, bf16: bool
):
    """Codes int8 [n, k] and float32 scales [n, groups] of a bf16 matrix: the best of ``factors`` of amax / most by the
    squared error weighted with ``weights`` [k] or |w|, then fitted to its codes as long as that helps."""
    f32 = np.float32
    most = f32((1 << (bits - 1)) - 1)
    codes, scales = np.empty(weight.shape, np.int8), np.empty((len(weight), -(-weight.shape[1] // size)), f32)

    def score(fit):
        return fit[0] * fit[0] / fit[1] if fit[1] > 0 else 0.0

    for row, g in np.ndindex(scales.shape):
        columns = slice(g * size, (g + 1) * size)
        stored, h = weight[row, columns], None if weights is None else weights[columns]
        w = stored.astype(f32)
        amax = np.abs(w).max()
        power = f32(2.0) ** f32(-np.clip(np.frexp(amax)[1], -126, 126))
        m, largest, best = np.abs(w) * power, amax * power, (0.0, 0.0)
        if amax:
            short = len(w) <= 256
            tried, again = (
                _direct(m, m if h is None else h, factors, largest, most) if short
                else _binned(np.ascontiguousarray(stored), h, factors, largest, most, power)
            )  # fmt: skip
            for found in tried:
                best = found if score(found) > score(best) else best
            for _ in range(8):
                if not score(best) > 0 or not score(found := again(*best)) > score(best):
                    break
                best = found
        scale = (f32(best[0] / best[1]) if score(best) > 0 else largest / most) / power / f32(step)
        scales[row, g] = scale.astype(weight.dtype).astype(f32) if bf16 else scale
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = f32(1) / (scales[row, g] * f32(step)) if scales[row, g] else f32(0)
            product = np.nan_to_num(w * inverse, nan=0.0)
        codes[row, columns] = np.rint(np.clip(product, -most, most))
    return codes, scales
