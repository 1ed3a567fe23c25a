"""A Hugging Face checkpoint folder: its config, its weight files, and what else lies in it. Loaders build on this."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktforge.errors import CheckpointError
from ktforge.tensors import TensorSpec

#: Files of these kinds hold weights; they are read by a loader or left behind, never carried over.
WEIGHT_SUFFIXES = frozenset(
    [".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".msgpack", ".h5", ".npz", ".partial"]
)
INDEX_SUFFIX = ".index.json"
CONFIG = "config.json"
MANIFEST = "ktforge_manifest.json"
#: A config or index larger than this is no config or index.
JSON_LIMIT = 100 * 1000 * 1000


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder at ``path``. Every method raises CheckpointError with one sentence for what it cannot use."""

    path: Path

    def check(self) -> None:
        if not self.path.exists():
            raise CheckpointError(f"{self.path} does not exist")
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder: give the folder that holds config.json")

    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        self.check()
        return read_json(self.path / CONFIG)

    def weight_files(self, pattern: str, index_name: str) -> tuple[list[Path], dict[str, str] | None]:
        """The weight files and, if there is an index, its tensor name → file name.

        With an index, the files are those it names, and all must exist; without, all that match ``pattern``.
        """
        self.check()
        index = self.path / index_name
        if index.exists():
            weight_map = self._weight_map(index)
            names = sorted(set(weight_map.values()))
            missing = [n for n in names if not (self.path / n).is_file()]
            if missing:
                raise CheckpointError(*(f"{index} names {n}, which is missing: download it again" for n in missing))
            return [self.path / n for n in names], weight_map
        return sorted(p for p in self.path.glob(pattern) if p.is_file()), None

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
        for name in set(weight_map.values()):
            if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise CheckpointError(f"{index} points outside its folder, to {name!r}")
        return weight_map

    def side_files(self) -> list[Path]:
        """Files to carry over unchanged, relative to the folder: all but weights, indexes, config.json, hidden ones."""
        found = []
        for path in sorted(self.path.rglob("*")):
            relative = path.relative_to(self.path)
            if any(part.startswith(".") for part in relative.parts) or not path.is_file():
                continue
            if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(INDEX_SUFFIX):
                continue
            if str(relative) not in (CONFIG, MANIFEST):
                found.append(relative)
        return found


def merge_scans(
    scans: Mapping[Path, Sequence[TensorSpec]], weight_map: Mapping[str, str] | None, folder: Path
) -> Iterator[TensorSpec]:
    """The tensors of all files as one checkpoint. Raises CheckpointError listing every disagreement with the index
    and every tensor that two files hold."""
    problems: list[str] = []
    seen: dict[str, TensorSpec] = {}
    for file, specs in scans.items():
        for spec in specs:
            if spec.name in seen:
                problems.append(f"{spec.name} is in both {seen[spec.name].file} and {file}: remove one of them")
            elif weight_map is not None and spec.name not in weight_map:
                problems.append(
                    f"{file} holds {spec.name}, which the index does not name: the two do not belong together"
                )
            seen[spec.name] = spec
    paths = {file_name: folder / file_name for file_name in set((weight_map or {}).values())}
    for name, file_name in (weight_map or {}).items():
        if name not in seen:
            problems.append(f"the index places {name} in {paths[file_name]}, which does not hold it")
        elif seen[name].file != paths[file_name]:
            problems.append(f"the index places {name} in {paths[file_name]}, but it is in {seen[name].file}")
    if problems:
        more = [f"and {len(problems) - 20:,} more of the kind"] if len(problems) > 20 else []
        raise CheckpointError(*problems[:20], *more)
    return iter(seen.values())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or CheckpointError."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes: too many to be what its name says")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
