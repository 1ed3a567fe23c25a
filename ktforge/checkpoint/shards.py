"""The shards of one checkpoint: which there should be, and whether they agree with their index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ktforge.contract.tensors import TensorSpec
from ktforge.errors import CheckpointError
from ktforge.text import first_of

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")


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
        raise CheckpointError(*first_of(problems))
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


def missing_shards(files: Sequence[Path]) -> list[str]:
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
