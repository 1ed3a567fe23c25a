"""A Hugging Face checkpoint folder: its config, its weight files, and what else lies in it. Loaders build on this."""

from __future__ import annotations

import json
import stat
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
#: Lies in an output of ktforge that is not finished, and is no safetensors file, so that loaders fail on it.
UNFINISHED = "UNFINISHED.safetensors"
#: A config or index larger than this is no config or index.
CONFIG_LIMIT = 10 * 1000 * 1000
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
        if (self.path / UNFINISHED).exists():
            raise CheckpointError(f"{self.path} is an unfinished output of ktforge: finish it with the same command")

    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        self.check()
        check_inside(self.path, self.path / CONFIG)
        return read_json(self.path / CONFIG, CONFIG_LIMIT)

    def weight_files(self, pattern: str, index_name: str) -> tuple[list[Path], dict[str, str] | None]:
        """The weight files and, if there is an index, its tensor name → file name.

        With an index, the files are those it names, and all must exist; without, all that match ``pattern``.
        """
        self.check()
        index = self.path / index_name
        if index.exists():
            weight_map = self._weight_map(index)
            names = sorted(set(weight_map.values()))
            missing = [n for n in names if not _is_file(self.path / n)]
            if missing:
                raise CheckpointError(
                    *(f"{index} names {n[:200]}, which is missing: download it again" for n in missing[:20])
                )
            found = [self.path / n for n in names]
        else:
            weight_map, found = None, sorted(p for p in self.path.glob(pattern) if p.is_file())
        for path in found:
            check_inside(self.path, path)
        return found, weight_map

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
        for name in set(weight_map.values()):
            if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise CheckpointError(f"{index} points outside its folder, to {name[:200]!r}")
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
                check_inside(self.path, path)
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
    for name, file_name in (weight_map or {}).items():
        if name not in seen:
            problems.append(f"the index places {name} in {folder / file_name}, which does not hold it")
        elif seen[name].file != folder / file_name:
            problems.append(f"the index places {name} in {folder / file_name}, but it is in {seen[name].file}")
    if problems:
        problems = [p if len(p) < 500 else p[:500] + "..." for p in problems]
        more = [f"and {len(problems) - 20:,} more of the kind"] if len(problems) > 20 else []
        raise CheckpointError(*problems[:20], *more)
    return iter(seen.values())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is longer than the system allows
        return False


def check_inside(folder: Path, path: Path) -> None:
    """Raises CheckpointError for a symbolic link out of the checkpoint, which could bring any file into the output.

    The hub's cache is of such links: ``snapshots/<revision>/<file>`` leads to ``blobs/<hash>`` beside ``snapshots``.
    """
    here, target = folder.resolve(), path.resolve()
    blobs = here.parent.parent / "blobs"
    if not target.is_relative_to(here) and not (here.parent.name == "snapshots" and target.is_relative_to(blobs)):
        raise CheckpointError(f"{path} is a link to {target}, outside the checkpoint: put the file itself there")


def parse_json(text: bytes) -> Any:
    """Strict JSON: raises ValueError for a key that an object has twice, and for NaN; RecursionError if too deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key stands there twice")
        return made

    def number(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=number)


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from a file of at most ``limit`` bytes, or CheckpointError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a file")
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes: too many to be what its name says")
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}: download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
