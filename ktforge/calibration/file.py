"""ktforge's file of statistics: written, and read with care."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ktforge.calibration.imatrix import is_gguf, read_gguf, read_legacy
from ktforge.calibration.statistics import Calibration, LayerStatistics, checked
from ktforge.disk import writing
from ktforge.disk.reading import open_regular
from ktforge.errors import CheckpointError, OutputError

FORMAT, VERSION = "ktforge-calibration", "1"
#: Tensors of a layer → their dtypes as safetensors calls them.
_DTYPES = {"tokens": "I64", "gate_up": "F32", "down": "F32", "inputs": "BF16", "routed": "I32"}
_NAME = re.compile(r"layers\.(\d{1,6})\.(\w+)")


def write_calibration(path: Path | str, layers: Mapping[int, LayerStatistics], metadata: Mapping[str, str]) -> None:
    """Writes a file as the package describes it; ``metadata`` is added to ``format`` and ``version``.

    Raises OutputError, and leaves nothing behind, if it cannot be written.
    """
    path = Path(path)
    checked(path, layers)
    tensors = {
        f"layers.{number}.{name}": np.ascontiguousarray(array)
        for number, layer in sorted(layers.items())
        for name in _DTYPES
        if (array := getattr(layer, name)) is not None
    }
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, {"format": FORMAT, "version": VERSION, **metadata})
        writing.rename(partial, path)
        writing.sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        writing.remove(partial)
        raise OutputError(f"{path} cannot be written: {said}") from error


def open_calibration(path: Path | str) -> Calibration:
    """Reads ktforge's file, or an imatrix of llama.cpp in either of its forms.

    Raises CheckpointError for a file that is none of these, is damaged, or has statistics of no routed experts.
    """
    path = Path(path)
    try:
        with open_regular(path) as opened:
            start = opened.read(9)
    except OSError as error:
        raise CheckpointError(f"the calibration {path} cannot be read: {error.strerror}") from error
    if is_gguf(start):
        return checked(path, read_gguf(path))
    if len(start) == 9 and start[8:9] == b"{":  # a length, then JSON
        return _read(path)
    return checked(path, read_legacy(path))


def _read(path: Path) -> Calibration:
    try:
        with safe_open(path, "numpy") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path} is no calibration: `ktforge calibrate` writes one")
            if metadata.get("version") != VERSION:
                raise CheckpointError(
                    f"{path} is a calibration of version {metadata.get('version', '?')[:20]}, and this ktforge reads "
                    f"version {VERSION}"
                )
            found: dict[int, dict[str, np.ndarray]] = {}
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                match = _NAME.fullmatch(name)
                if match is None or match[2] not in _DTYPES:
                    raise CheckpointError(f"{path} holds {name[:100]}, which no calibration does")
                stored = opened.get_slice(name).get_dtype()
                if stored != _DTYPES[match[2]]:
                    raise CheckpointError(f"{path}: {name} is {stored}, and should be {_DTYPES[match[2]]}")
                found.setdefault(int(match[1]), {})[match[2]] = opened.get_tensor(name)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}; calibrate again") from error
    for number, layer in found.items():
        for name in ("tokens", "gate_up", "down"):
            if name not in layer:
                raise CheckpointError(f"{path} has no {name} of layer {number}: calibrate again")
        if layer["tokens"].ndim != 1:
            raise CheckpointError(
                f"{path}, layer {number}: tokens is {list(layer['tokens'].shape)}, and should be a row"
            )
    layers = {number: LayerStatistics(**found[number]) for number in sorted(found)}
    return checked(path, layers, metadata.get("activation"))
