"""The files of an output against what its manifest lists: which there are, their sizes, their hashes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ktforge.disk.marks import MANIFEST, PARTIAL, SAFETENSORS, UNFINISHED, WEIGHT_SUFFIXES
from ktforge.disk.reading import open_regular, parse_json
from ktforge.errors import CheckpointError, Problems
from ktforge.output.hashing import add_range, joined_hash
from ktforge.output.manifest import FILES

#: More than any safetensors header has, as its library says.
HEADER_LIMIT = 100_000_000
AGAIN = "copy it again from where it was made, or convert the original again"


@dataclass(frozen=True)
class Listed:
    """A published file as the manifest has it: its name in the folder, its bytes, its hash in hex, and the sizes of the
    parts that the hash goes over where the file itself does not say them."""

    name: str
    nbytes: int
    hash: str
    parts: tuple[int, ...] | None = None


def listed_files(manifest: Mapping[str, Any]) -> list[Listed] | None:
    """The files of a manifest; None if it lists none, as those of earlier versions.

    Raises CheckpointError for a list that makes no sense.
    """
    entries = manifest.get(FILES)
    if entries is None:
        return None
    try:
        return [_listed(entry) for entry in entries]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise CheckpointError(f"{MANIFEST} lists files in a form that makes no sense: it is damaged; {AGAIN}") from None


def _listed(entry: Mapping[str, Any]) -> Listed:
    name, nbytes, found, parts = entry["file"], entry["bytes"], entry["xxh3_128"], entry.get("parts")
    inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
    sizes = [nbytes, *(parts or ())]
    if not inside or not all(isinstance(size, int) and size >= 0 for size in sizes) or len(bytes.fromhex(found)) != 16:
        raise ValueError
    if parts is not None and sum(parts) != nbytes:
        raise ValueError
    return Listed(name, nbytes, found, None if parts is None else tuple(parts))


def check_files(folder: Path, listed: Sequence[Listed] | None, problems: Problems) -> list[str]:
    """Adds what is missing, of another size, or there though it should not be; returns what to know beside."""
    if (folder / UNFINISHED).exists():
        problems.add(f"{folder} holds an unfinished output: run the same command again, and it goes on")
    for file in listed or ():
        path = folder / file.name
        if not path.is_file():
            problems.add(f"{path} is missing, and the manifest lists it: {AGAIN}")
        elif (size := path.stat().st_size) != file.nbytes:
            problems.add(f"{path} has {size:,} bytes; {file.nbytes:,} were written: {AGAIN}")
    if listed is None:
        return []
    known, others = {file.name for file in listed}, []
    for name in found_files(folder):
        if name in known or name == MANIFEST:
            continue
        path = folder / name
        if path.suffix.lower() in WEIGHT_SUFFIXES or name.endswith(".index.json"):
            if name != UNFINISHED:
                problems.add(f"{path} is not in the manifest, and readers take it for weights: move it elsewhere")
        else:
            others.append(name)
    if not others:
        return []
    return [f"not of the conversion, and not looked at: {', '.join(others[:5])}{' …' if others[5:] else ''}"]


def found_files(folder: Path) -> Iterator[str]:
    """All files of a folder but hidden ones, which nobody reads."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != PARTIAL)
        for name in sorted(names):
            if not name.startswith("."):
                yield (Path(root) / name).relative_to(folder).as_posix()


#: Where a part of a file begins → its bytes and their xxh3-128, of parts that were read for other reasons.
Known = Mapping[int, tuple[int, bytes]]


def hash_problem(folder: Path, file: Listed, known: Known) -> str | None:
    """What is wrong with the bytes of a file that has its size; what is not ``known`` of it is read."""
    path, digests, offset = folder / file.name, [], 0
    try:
        with open_regular(path) as opened:
            descriptor = opened.fileno()
            for nbytes in _parts(descriptor, file):
                if known.get(offset, (0, b""))[0] == nbytes:
                    digests.append(known[offset][1])
                else:
                    found = xxhash.xxh3_128()
                    add_range(found, descriptor, offset, nbytes)
                    digests.append(found.digest())
                offset += nbytes
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}: look at the disk's health, then {AGAIN}"
    except ValueError:
        return f"{path} begins with no header of safetensors, so it is not what was written: {AGAIN}"
    if offset != file.nbytes or joined_hash(digests) != file.hash:
        return f"{path} is not what was written (its hash is another): {AGAIN}"
    return None


def _parts(descriptor: int, file: Listed) -> Collection[int]:
    """The sizes of a file's parts. Raises ValueError for a header that says none."""
    if file.parts is not None:
        return file.parts
    if not file.name.endswith(SAFETENSORS):
        return (file.nbytes,) if file.nbytes else ()
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(HEADER_LIMIT, file.nbytes):
        raise ValueError
    header = parse_json(os.pread(descriptor, length, 8))
    try:
        bounds = sorted(tuple(map(int, t["data_offsets"])) for n, t in header.items() if n != "__metadata__")
    except (AttributeError, KeyError, TypeError):
        raise ValueError from None
    sizes = [end - begin for begin, end in bounds if end != begin]
    if any(size < 0 for size in sizes):
        raise ValueError
    return [8 + length, *sizes]
