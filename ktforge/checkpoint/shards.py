"""The shards of one checkpoint: which there should be, and whether they agree with their index."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ktforge.contract.tensors import TensorSpec
from ktforge.errors import CheckpointError
from ktforge.text import counted, first_of

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")


def merge_scans(
    scans: Mapping[Path, Sequence[TensorSpec]],
    weight_map: Mapping[str, str] | None,
    folder: Path,
    same: Callable[[TensorSpec, TensorSpec], bool],
) -> Iterator[TensorSpec]:
    """The tensors of all files as one checkpoint; one that two files hold, with equal bytes as ``same`` says, is one.

    Raises CheckpointError with a sentence for each two files that disagree with each other, and for each file that
    disagrees with the index.
    """
    if weight_map is not None and _agree(scans, weight_map, folder):
        return (spec for specs in scans.values() for spec in specs)
    found = _Disagreements()
    seen: dict[str, tuple[TensorSpec, str]] = {}
    for file, specs in scans.items():
        place = file.relative_to(folder).as_posix()  # once a file: paths are slow, and tensors are many
        unnamed_too = weight_map is None or is_mtp_file(file)
        for spec in specs:
            if spec.name in seen:
                found.twice(seen[spec.name][0], spec, same)
                if (weight_map or {}).get(spec.name) != place:
                    continue
            elif not unnamed_too and spec.name not in (weight_map or ()):
                found.unnamed.setdefault(file, []).append(spec.name)
            seen[spec.name] = spec, place
    for name, file_name in (weight_map or {}).items():
        spec_place = seen.get(name)
        if spec_place is None:
            found.absent.setdefault(folder / file_name, []).append(name)
        elif spec_place[1] != file_name and folder / spec_place[1] != folder / file_name:
            found.elsewhere.setdefault((folder / file_name, folder / spec_place[1]), []).append(name)
    if problems := list(found.sentences()):
        raise CheckpointError(*first_of(problems))
    return (spec for spec, _ in seen.values())


class _Disagreements:
    """Names of tensors, by the files that disagree about them."""

    def __init__(self) -> None:
        self.copies: dict[tuple[Path | None, Path | None], list[str]] = {}
        self.unnamed: dict[Path, list[str]] = {}
        self.absent: dict[Path, list[str]] = {}
        self.elsewhere: dict[tuple[Path, Path], list[str]] = {}

    def twice(self, one: TensorSpec, other: TensorSpec, same: Callable[[TensorSpec, TensorSpec], bool]) -> None:
        """Files that differ in one tensor are not read on: they may be of hundreds of gigabytes."""
        pair = one.file, other.file
        if pair in self.copies or not same(one, other):
            self.copies.setdefault(pair, []).append(one.name)

    def sentences(self) -> Iterator[str]:
        for (one, other), names in self.copies.items():
            yield (
                f"{one} and {other} both hold {_among(names)}, and not with the same content: if they are two copies "
                "of the model, such as in two precisions, keep one of them here and move the other elsewhere"
            )
        for file, names in self.unnamed.items():
            yield (
                f"{file} holds {_among(names)}, which the index does not name: the two do not belong together; "
                "download both again"
            )
        for file, names in self.absent.items():
            yield f"the index places {_among(names)} in {file}, which does not hold it: download both again"
        for (file, found), names in self.elsewhere.items():
            yield f"the index places {_among(names)} in {file}, but it is in {found}: download the index again"


def _among(names: Sequence[str]) -> str:
    """One name, and how many more there are."""
    more = f" and {counted(len(names) - 1, 'more tensor')}" if len(names) > 1 else ""
    return f"{names[0][:200]}{more}"


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
