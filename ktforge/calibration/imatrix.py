"""llama.cpp's importance matrices, which are published for nearly every large model.

Facts from llama.cpp, ``tools/imatrix``: both forms hold, for the weight ``blk.N.ffn_{gate,up,down}_exps.weight`` of
layer N, sums of the squares of each input channel, one expert behind the other.

- The old form (``.dat``), little-endian: int32 count of entries; for each int32 length of the name, the name, int32
  calls, int32 count of values, float32 values. A value is a mean times the calls. What follows says which text it was.
- GGUF: tensors ``NAME.in_sum2`` F32 [experts, channels] and ``NAME.counts`` F32 [experts, 1], the tokens of each.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ktforge.calibration.statistics import LayerStatistics
from ktforge.disk.reading import open_regular
from ktforge.errors import CheckpointError, ConfigError

_NAME = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down|gate_up)_exps\.weight")
#: No model has so many entries, nor a name of so many bytes.
MOST_ENTRIES, LONGEST_NAME = 1_000_000, 1_000


class _Known(NamedTuple):
    """Mean squares [experts, channels] of a weight's inputs, and the tokens [experts], 0 where nobody counted."""

    squares: np.ndarray
    tokens: np.ndarray


def is_gguf(start: bytes) -> bool:
    """Whether a file that begins so is GGUF."""
    return start.startswith(b"GGUF")


def read_legacy(path: Path) -> Mapping[int, LayerStatistics]:
    """Raises CheckpointError for a file that is not of the old form."""
    try:
        with open_regular(path) as opened:
            entries = dict(_entries(opened.read()))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError) as error:
        raise CheckpointError(
            f"{path} is neither a calibration of ktforge nor an imatrix of llama.cpp, or it is damaged"
        ) from error
    return _layers(path, {name: _cut(path, name, entries) for name in entries if _NAME.fullmatch(name)})


def _cut(path: Path, name: str, entries: Mapping[str, np.ndarray]) -> _Known:
    """An entry of the old form does not say where one expert ends: the router, whose input is that of gate and up, has
    as many channels as these."""
    layer = name.partition(".ffn_")[0]
    router = entries.get(f"{layer}.ffn_gate_inp.weight")
    first = next(
        (e for n in ("gate", "up", "gate_up") if (e := entries.get(f"{layer}.ffn_{n}_exps.weight")) is not None), None
    )
    if router is None or first is None or not router.size or first.size % router.size:
        raise CheckpointError(f"{path} does not say how many experts {layer} has: make it again with a newer llama.cpp")
    experts = first.size // router.size
    if not experts or entries[name].size % experts:
        raise CheckpointError(f"{path}: {name} has {entries[name].size:,} values for {experts} experts")
    return _Known(entries[name].reshape(experts, -1), np.zeros(experts, np.int64))


def _entries(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    (count,), place = struct.unpack_from("<i", data), 4
    if not 0 < count <= MOST_ENTRIES:
        raise ValueError("no count of entries")
    for _ in range(count):
        (length,) = struct.unpack_from("<i", data, place)
        if not 0 < length <= LONGEST_NAME:
            raise ValueError("no length of a name")
        name = data[place + 4 : place + 4 + length].decode()
        place += 4 + length
        calls, values = struct.unpack_from("<ii", data, place)
        place += 8
        if calls < 0 or values < 0 or place + 4 * values > len(data):
            raise ValueError("no count of values")
        squares = np.frombuffer(data, "<f4", values, place)
        place += 4 * values
        yield name, squares / np.float32(max(1, calls))


def read_gguf(path: Path) -> Mapping[int, LayerStatistics]:
    """Raises ConfigError without the ``gguf`` package, CheckpointError for a file that is damaged or no imatrix."""
    if find_spec("gguf") is None:
        raise ConfigError(f"{path} is GGUF, and to read it takes the package gguf: pip install 'ktforge[imatrix]'")
    from gguf import GGUFReader  # an extra, and slow to import

    try:
        tensors: dict[str, Any] = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    except Exception as error:  # whatever it trips over in a file of somebody else's
        raise CheckpointError(f"{path} cannot be read as GGUF: {' '.join(str(error).split())[:200]}") from error
    found = {}
    for name, sums in tensors.items():
        if not name.endswith(".in_sum2"):
            continue
        weight = name.removesuffix(".in_sum2")
        counts = tensors.get(f"{weight}.counts")
        if counts is None:
            raise CheckpointError(f"{path} has {name} without its counts: it is damaged")
        if _NAME.fullmatch(weight):
            counts = np.asarray(counts, np.float32).reshape(-1)
            if sums.ndim != 2 or len(sums) != len(counts) or not np.isfinite(counts).all() or (counts < 0).any():
                raise CheckpointError(f"{path}: {name} is {list(sums.shape)}, and there are {len(counts)} counts")
            squares = np.asarray(sums, np.float32) / np.maximum(counts, 1)[:, None]
            found[weight] = _Known(squares, counts.astype(np.int64))
    return _layers(path, found)


def _layers(path: Path, found: Mapping[str, _Known]) -> dict[int, LayerStatistics]:
    by_layer: dict[int, dict[str, _Known]] = {}
    for name, known in found.items():
        if match := _NAME.fullmatch(name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = known
    if not by_layer:
        raise CheckpointError(f"{path} has no blk.N.ffn_*_exps: it is of a model without routed experts")
    layers = {}
    for number, layer in sorted(by_layer.items()):
        first = layer.get("gate") or layer.get("up") or layer.get("gate_up")
        down = layer.get("down")
        if first is None or down is None:
            raise CheckpointError(
                f"{path} has not both gate or up and down of layer {number}: it is of too short a text"
            )
        if len(first.tokens) != len(down.tokens):
            raise CheckpointError(f"{path}: gate and down of layer {number} have different numbers of experts")
        layers[number] = LayerStatistics(first.tokens, first.squares, down.squares)
    return layers
