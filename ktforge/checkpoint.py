"""A Hugging Face checkpoint folder: its config, its weight files, and what else lies in it. Loaders build on this."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktforge.errors import CheckpointError
from ktforge.journal import JOURNAL, Journal
from ktforge.sizes import counted
from ktforge.tensors import TensorSpec

#: Files of these kinds hold weights; they are read by a loader or left behind, never carried over.
WEIGHT_SUFFIXES = frozenset(
    [
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".ggml",
        ".onnx",
        ".msgpack",
        ".h5",
        ".npz",
        ".kt",
        ".partial",
    ]
)
INDEX_SUFFIX = ".index.json"
#: What a safetensors header has beside tensors.
METADATA = "__metadata__"
CONFIG = "config.json"
MANIFEST = "ktforge_manifest.json"
#: Where quantisers describe their work beside config.json. Readers take the first, of Model Optimizer, for what
#: config.json does not say; the others are AutoGPTQ's, AWQ's and AutoRound's copies of what it does.
HF_QUANT_CONFIG = "hf_quant_config.json"
QUANTIZATION_FILES = frozenset(
    [HF_QUANT_CONFIG, "quantize_config.json", "quant_config.json", "quantization_config.json"]
)
#: Lies in an output of ktforge that is not finished, and is no safetensors file, so that loaders fail on it.
UNFINISHED = "UNFINISHED.safetensors"
#: What an output grows in; :mod:`ktforge.output` says how.
PARTIAL = ".ktforge-partial"
#: A config or index larger than this is no config or index.
CONFIG_LIMIT = 10 * 1000 * 1000
JSON_LIMIT = 100 * 1000 * 1000
#: Files of an index; the largest models have a few hundred.
FILE_LIMIT = 10_000
#: A second copy of the weights under the publisher's own names, beside the shards of Hugging Face.
DUPLICATE = "consolidated"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
#: What Git LFS leaves in place of a file that was not fetched (https://git-lfs.com, pointer specification).
POINTER = b"version https://git-lfs.github.com/spec/v1"
POINTER_LIMIT = 1024


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder at ``path``. Every method raises CheckpointError with one sentence for what it cannot use."""

    path: Path

    def check(self) -> None:
        if not self.path.exists():
            raise CheckpointError(f"{self.path} does not exist")
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder: give the folder that holds config.json")
        snapshots = self.path / "snapshots"
        if snapshots.is_dir() and not (self.path / CONFIG).exists():
            found = ", ".join(str(p) for p in sorted(snapshots.iterdir())) or "there is none, so download it again"
            raise CheckpointError(f"{self.path} is a folder of the hub's cache: give one of its snapshots: {found}")
        if not any(self.path.iterdir()):
            raise CheckpointError(f"{self.path} is empty: give the folder that holds config.json")
        if not self._is_whole():
            begun = self.begun()
            what = f" ({begun})" if begun else ""
            raise CheckpointError(
                f"{self.path} is an unfinished output of ktforge{what}: run the same command again, which goes on "
                "where it stopped, or with --restart, which begins anew"
            )

    def begun(self) -> str | None:
        """What a run that was cut off, or still goes on, has made so far in this folder; None if there is none."""
        path = self.path / PARTIAL / JOURNAL
        if path.is_file() and path.stat().st_size > JSON_LIMIT:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes: too many to be what its name says")
        journal = Journal(path)
        formats = journal.fingerprint.get("formats")
        if not journal.fingerprint:
            return None
        what = ", ".join(map(str, formats)) if isinstance(formats, list) else ""
        return f"{what or 'no layout'}; {counted(len(journal.written), 'tensor')} written"

    def _is_whole(self) -> bool:
        """Whether there is a checkpoint: one that is to be replaced stays until the new one is complete."""
        if (self.path / UNFINISHED).exists():
            return False
        return not (self.path / PARTIAL / JOURNAL).exists() or (self.path / CONFIG).exists()

    def config(self) -> dict[str, Any]:
        """The parsed config.json, with what Model Optimizer says beside it about quantisation."""
        self.check()
        check_inside(self.path, self.path / CONFIG)
        config = read_json(self.path / CONFIG, CONFIG_LIMIT)
        beside = self.path / HF_QUANT_CONFIG
        if "quantization_config" not in config and beside.is_file():
            check_inside(self.path, beside)
            config["quantization_config"] = read_json(beside, CONFIG_LIMIT)
        return config

    def weight_files(self, pattern: str, index_name: str) -> tuple[list[Path], dict[str, str] | None]:
        """The weight files and, if there is an index, its tensor name → file name.

        With an index, the files are those it names, and all must exist; without, all that match ``pattern``. Files of
        multi-token-prediction layers count in both cases, duplicates under the publisher's own names in neither.
        """
        self.check()
        index = self.path / index_name
        found = sorted(p for p in self.path.glob(pattern) if _is_file(p) or p.is_symlink())  # no pipes
        if index.exists():
            weight_map = self._weight_map(index)
            named = [self.path / n for n in sorted(set(weight_map.values()))]
            known = set(named)
            unnamed = [p for p in found if p not in known and not p.name.startswith(DUPLICATE)]
            mtp = [p for p in unnamed if is_mtp_file(p)]
            strange = [p for p in unnamed if not is_mtp_file(p)]
            problems = [f"{index} names {str(p.relative_to(self.path))[:200]}, which is missing: download it again"
                        for p in named if not _is_file(p)]  # fmt: skip
            problems += [f"{p} is not in {index.name}: remove it, or get the index that belongs to it" for p in strange]
            files = [*named, *mtp]
        else:
            weight_map = None
            files = [p for p in found if not p.name.startswith(DUPLICATE)] or found
            problems = _missing_shards(files)
            problems += [f"{p} is a link to nothing: download it again" for p in files if not p.exists()]
        problems += [pointer for p in files if (pointer := pointer_problem(p))]
        if problems:
            more = [f"and {len(problems) - 20:,} more of the kind"] if len(problems) > 20 else []
            raise CheckpointError(*problems[:20], *more)
        check_inside(self.path, *files)
        if not files:
            self._point_below(pattern)
        return files, weight_map

    def _point_below(self, pattern: str) -> None:
        """Raises CheckpointError where weights are in sub-folders only, and names those."""
        found = (p for depth in range(1, 4) for p in self.path.glob("*/" * depth + pattern))  # it may be a whole disk
        below = sorted(
            {p.parent for p in found if not any(part.startswith(".") for part in p.relative_to(self.path).parts)}
        )
        if below:
            folders = ", ".join(map(str, below[:5])) + (" …" if len(below) > 5 else "")
            raise CheckpointError(f"{self.path} has no index, and {pattern} only in sub-folders: give one of {folders}")

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not set(map(type, weight_map.values())) <= {str}:
            raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
        names = set(weight_map.values())
        if len(names) > FILE_LIMIT:
            raise CheckpointError(f"{index} names {len(names):,} files: too many to be the index of a checkpoint")
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise CheckpointError(f"{index} points outside its folder, to {name[:200]!r}")
        return weight_map

    def side_files(self) -> list[Path]:
        """Files to carry over unchanged, relative to the folder: all but weights, indexes, config.json, hidden ones."""
        found: list[Path] = []
        pointers: list[str] = []
        for path in sorted(self.path.rglob("*")):
            relative = path.relative_to(self.path)
            if any(part.startswith(".") for part in relative.parts) or not path.is_file():
                continue
            if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(INDEX_SUFFIX):
                continue
            if pointer := pointer_problem(path):
                pointers.append(pointer)
            if str(relative) not in (CONFIG, MANIFEST):
                found.append(relative)
        check_inside(self.path, *(self.path / relative for relative in found))
        if pointers:
            raise CheckpointError(*pointers)
        return found


def merge_scans(
    scans: Mapping[Path, Sequence[TensorSpec]], weight_map: Mapping[str, str] | None, folder: Path
) -> Iterator[TensorSpec]:
    """The tensors of all files as one checkpoint. Raises CheckpointError listing every disagreement with the index
    and every tensor that two files hold."""
    problems: list[str] = []
    seen: dict[str, TensorSpec] = {}
    found_in: dict[str, str] = {}
    if weight_map is not None and _agree(scans, weight_map, folder):
        return (spec for specs in scans.values() for spec in specs)
    for file, specs in scans.items():
        place = file.relative_to(folder).as_posix()  # once a file: paths are slow, and tensors are many
        unnamed_too = weight_map is None or is_mtp_file(file)
        for spec in specs:
            if spec.name in seen:
                problems.append(f"{spec.name} is in both {seen[spec.name].file} and {file}: remove one of them")
            elif not unnamed_too and spec.name not in (weight_map or ()):
                problems.append(
                    f"{file} holds {spec.name}, which the index does not name: the two do not belong together"
                )
            seen[spec.name] = spec
            found_in[spec.name] = place
    for name, file_name in (weight_map or {}).items():
        place_found = found_in.get(name)
        if place_found is None:
            problems.append(f"the index places {name} in {folder / file_name}, which does not hold it")
        elif place_found != file_name and folder / place_found != folder / file_name:
            problems.append(f"the index places {name} in {folder / file_name}, but it is in {seen[name].file}")
    if problems:
        problems = [p if len(p) < 500 else p[:500] + "..." for p in problems]
        more = [f"and {len(problems) - 20:,} more of the kind"] if len(problems) > 20 else []
        raise CheckpointError(*problems[:20], *more)
    return iter(seen.values())


def _agree(scans: Mapping[Path, Sequence[TensorSpec]], weight_map: Mapping[str, str], folder: Path) -> bool:
    """Whether every tensor is where the index says, and nowhere else; False also where it takes a closer look."""
    found: dict[str, str] = {}
    for file, specs in scans.items():
        found |= dict.fromkeys([spec.name for spec in specs], file.relative_to(folder).as_posix())
    return len(found) == sum(map(len, scans.values())) and found == weight_map


def is_mtp_file(path: Path) -> bool:
    """Whether a shard holds multi-token-prediction layers alone: mtp.safetensors, model_mtp.safetensors."""
    return "mtp" in re.split(r"[-_.]", path.stem)


def pointer_problem(path: Path) -> str | None:
    """What to say about a Git-LFS pointer in place of a file; None for anything else."""
    if not _is_file(path) or path.stat().st_size > POINTER_LIMIT:
        return None
    with path.open("rb") as opened:
        if opened.read(len(POINTER)) != POINTER:
            return None
    return f"{path} is a Git-LFS pointer, not the file itself: run `git lfs pull` in its repository"


def _missing_shards(files: Sequence[Path]) -> list[str]:
    """By their names alone, for folders without an index: x-00002-of-00003 needs the other two."""
    sets: dict[tuple[Path, str, int, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            sets.setdefault((file.parent, match[1], int(match[3]), match[4]), set()).add(int(match[2]))
    return [
        f"{folder / stem}-{i:05}-of-{count:05}{suffix} is missing: download it again"
        for (folder, stem, count, suffix), there in sets.items()
        for i in range(1, count + 1)
        if i not in there
    ]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is longer than the system allows
        return False


def check_inside(folder: Path, *paths: Path) -> None:
    """Raises CheckpointError for a symbolic link out of the checkpoint, which could bring any file into the output.

    The hub's cache is of such links: ``snapshots/<revision>/<file>`` leads to ``blobs/<hash>`` beside ``snapshots``.
    """
    here = folder.resolve()
    allowed = [here] + ([here.parent.parent / "blobs"] if here.parent.name == "snapshots" else [])
    for path in paths:
        target = path.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
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
        if pointer := pointer_problem(path):
            raise CheckpointError(pointer)
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: download it again, or give the folder that holds it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}: download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
