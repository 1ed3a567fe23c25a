"""The last step of a run: complete files take their names, so that at no moment a part of them passes for the whole.

A folder cannot be exchanged in one step where a user's files may lie in it, so while its files change, a file called
``UNFINISHED.safetensors`` lies there which is none. A loader that walks the folder for ``*.safetensors`` fails on it.
Every step can be done again, so a run that was cut off here is finished by the next one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import xxhash

from ktforge.contract.checks import blame
from ktforge.contract.plan import Plan
from ktforge.contract.stages import Loader
from ktforge.disk import writing
from ktforge.disk.folders import NONE, Folders
from ktforge.disk.lock import Lock
from ktforge.disk.marks import CONFIG, JOURNAL, LOCK, MANIFEST, PARTIAL, UNFINISHED, WEIGHT_SUFFIXES, staged
from ktforge.disk.reading import content_hash, read_json
from ktforge.errors import CheckpointError, OutputError
from ktforge.output.manifest import manifest_json, weight_files
from ktforge.text import counted

#: The first 8 bytes of UNFINISHED, read as the length of a safetensors header, are more than any file has.
_NOTE = b"This folder holds an unfinished output of ktforge. Run the same command again: it goes on where it stopped.\n"
#: Weights as transformers and the engines find them in a folder; a plan adds what writers make beside these. An earlier
#: output's go when another takes its place.
STALE = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
#: Where the manifest of the output that is being replaced waits until all that it lists is gone.
_PREVIOUS = "previous_manifest.json"


def published(plan: Plan, documents: Iterable[str]) -> list[str]:
    """Every file of an output but its manifest, weights first, relative to its folder."""
    config = [CONFIG] if plan.config_json is not None else []
    return [*(f.path for f in plan.files), *map(str, plan.side_files), *config, *documents]


def collisions(plan: Plan, documents: Iterable[str] = ()) -> list[str]:
    """A sentence for each side file, 20 at most, that would be in the place of a file or folder of ktforge's own: in
    the output, or in the staging folder while it grows."""
    paths, side_files = published(plan, documents), set(map(str, plan.side_files))
    growing = {str(staged(Path(), path)): path for path in (*paths, MANIFEST)}
    pairs = _in_the_way([*paths, MANIFEST, UNFINISHED, PARTIAL]) + _in_the_way([*growing, LOCK, JOURNAL, _PREVIOUS])
    names = {(other if other in side_files else growing.get(path, path)): other for path, other in pairs}
    return [
        f"{name} cannot go into the output, where ktforge needs the name {other} itself: rename it in the checkpoint, "
        "or move it elsewhere"
        for name, other in sorted(names.items())[:20]
    ]


def _in_the_way(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Each path with one of the others that it would have to lie in, or be."""
    known = Counter(paths)
    above = [(path, str(parent)) for path in known for parent in PurePosixPath(path).parents if str(parent) in known]
    return above + [(path, path) for path, count in known.items() if count > 1]


def texts_of(plan: Plan, documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """All that is neither a weight file nor copied, but the manifest, which lists these."""
    texts = dict(documents)
    if plan.config_json is not None:
        texts[CONFIG] = plan.config_json
    return texts


def hashes(plan: Plan, texts: Mapping[str, bytes], written: Mapping[str, str]) -> dict[str, str]:
    """What :func:`stage_documents` would return now."""
    loader = plan.pipeline.loader
    sizes = {name: len(content) for name, content in texts.items()}
    found = {name: xxhash.xxh3_128_hexdigest(content) for name, content in texts.items()}
    for relative in plan.side_files:
        with _opened(loader, relative) as (opened, name):
            try:
                found[str(relative)] = content_hash(opened)
                sizes[str(relative)] = opened.tell()
            except OSError as error:
                raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    return {**found, MANIFEST: xxhash.xxh3_128_hexdigest(_manifest(plan, written, found, sizes))}


def _manifest(plan: Plan, written: Mapping[str, str], found: Mapping[str, str], sizes: Mapping[str, int]) -> bytes:
    others = ({"file": name, "bytes": sizes[name], "xxh3_128": found[name]} for name in sorted(found))
    return manifest_json(plan, [*weight_files(plan, written), *others])


def stage_documents(
    staging: Path, plan: Plan, texts: Mapping[str, bytes], written: Mapping[str, str], lock: Lock
) -> dict[str, str]:
    """Writes all that is no weight file into the staging folder, synced, the manifest last, which lists the others and
    the weights by the hashes of what was ``written``; name → xxh3-128 of its content, in hex."""
    targets = {name: staged(staging, name) for name in (*map(str, plan.side_files), *texts, MANIFEST)}
    for target in targets.values():
        writing.make_folders(target.parent, lock.folders)
    found = {}
    for name, content in texts.items():
        lock.check()
        writing.write_file(targets[name], content, lock.folders)
        found[name] = xxhash.xxh3_128_hexdigest(content)
    for relative in plan.side_files:
        lock.check()
        with _opened(plan.pipeline.loader, relative) as (opened, source):
            found[str(relative)] = writing.copy_file(opened, source, targets[str(relative)], lock.folders)
    sizes = {name: lock.folders.size(targets[name]) for name in found}
    manifest = _manifest(plan, written, found, sizes)
    lock.check()
    writing.write_file(targets[MANIFEST], manifest, lock.folders)
    found[MANIFEST] = xxhash.xxh3_128_hexdigest(manifest)
    _sync_parents(targets.values(), lock.folders)
    return found


def take_back(folder: Path, staging: Path, names: Collection[str], lock: Lock) -> None:
    """Moves documents that have been published back into the staging folder, for they are to be made again."""
    there = lock.folders.exists
    ready = [name for name in names if not there(staged(staging, name)) and there(folder / name)]
    if ready:
        mark_unfinished(folder, lock.folders)
    for name in sorted(ready, key=lambda name: name != MANIFEST):
        lock.check()
        _check_inside(folder, folder / name)
        writing.make_folders(staged(staging, name).parent, lock.folders)
        writing.rename(folder / name, staged(staging, name), lock.folders)
    _sync_parents([p for name in ready for p in (staged(staging, name), folder / name)], lock.folders)
    if there(folder / UNFINISHED):  # publishing makes their folders first
        _remove_emptied(folder, [folder / name for name in names], lock.folders)


@contextmanager
def _opened(loader: Loader, relative: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A side file, and what to call it."""
    name = (loader.folder() or Path()) / relative
    with blame(loader, str(relative)):
        try:
            opened = loader.open_side_file(relative)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    with opened:
        yield opened, name


#: A file that a run was to put in place, and that it no longer finds.
_NOT_THERE = "it was taken away, or added to the source since the run began; start over with"


def nested_weights(folder: Path, folders: Folders = NONE) -> list[str]:
    """A sentence for each folder below ``folder`` with files that no output of ktforge has, and a loader would take,
    and for one that cannot be looked into."""
    below: dict[Path, list[Path]] = {}
    try:
        for path in folders.files(folder) if folders.is_folder(folder) else ():
            if path.parent != folder and path.suffix == ".safetensors":
                below.setdefault(path.parent, []).append(path)
    except OSError as error:
        return [
            f"{error.filename} cannot be looked into: {error.strerror}: a loader may find weights there; make it "
            "readable, or choose another folder"
        ]
    found = []
    for files in list(below.values())[:20]:
        more = f" and {counted(len(files) - 1, 'file')} more there hold" if files[1:] else " holds"
        found.append(
            f"{files[0]}{more} weights, and a loader that walks {folder} would take them for the output's: move them "
            "elsewhere"
        )
    return found


def _appeared(folder: Path, staging: Path, paths: list[str], stale: Sequence[str], folders: Folders) -> list[str]:
    """A sentence for each file that was put into a folder which was empty when the run began, and is in the way."""
    own = {folder / p for p in (*paths, UNFINISHED)}
    weights = {path for pattern in stale for path in folders.glob(folder, pattern)} - own
    taken = {folder / p for p in paths if folders.exists(staged(staging, p)) and folders.exists(folder / p)}
    return [
        f"{path} has appeared since the run began: move it elsewhere, then run the same command again"
        for path in sorted(weights | taken)[:20]
    ]


def publish(folder: Path, staging: Path, paths: list[str], plan: Plan, lock: Lock, *, overwrite: bool) -> None:
    """Renames ``paths`` into place, then the manifest, and takes away what an earlier output left: the side files that
    its manifest lists, and its weights.

    Files that have been renamed already are passed over. ``lock`` is looked at before each change to ``folder``.
    """
    lock.check()
    folders, there = lock.folders, lock.folders.exists
    targets = [folder / p for p in paths]
    manifest, waiting = folder / MANIFEST, staged(staging, MANIFEST)
    if not there(waiting):
        gone = next((target for target in (manifest, *targets) if not there(target)), None)
        if any(there(staged(staging, path)) for path in paths):  # what is in place is of the output before
            gone = waiting
        if gone is not None:
            again = "--restart --overwrite" if overwrite else "--restart"
            raise OutputError(f"{gone} is not in the unfinished output: {_NOT_THERE} {again}")
    else:
        problems = nested_weights(folder, folders)
        if not problems and not overwrite:
            problems = _appeared(folder, staging, paths, _stale(plan, folders), folders)
        if problems:
            raise OutputError(*problems)
        previous = staging / _PREVIOUS
        replaced = [*_listed(manifest, folders), *_listed(previous, folders)]
        stale = _stale(plan, folders, manifest, previous)
        removed = _removals(folder, replaced, stale, {*targets, folder / UNFINISHED}, folders)
        for target in targets:
            _check_inside(folder, target)
        again = "--restart --overwrite" if overwrite else "--restart"
        if not there(folder / UNFINISHED):  # what lies in a place so far is of the output before
            _check_staged(staging, paths, again, folders)
        mark_unfinished(folder, folders)
        lock.check()
        if there(manifest):
            writing.rename(manifest, previous, folders)
            _sync_parents([previous, manifest], folders)
        _remove_files(folder, removed, lock)
        for target in targets:
            lock.check()
            writing.make_folders(target.parent, folders)
        for path, target in zip(paths, targets, strict=True):
            lock.check()
            if there(staged(staging, path)):
                writing.rename(staged(staging, path), target, folders)
            elif not there(target):
                raise OutputError(f"{target} is not in the unfinished output: {_NOT_THERE} --restart")
        _sync_parents(targets, folders)
        lock.check()
        writing.rename(waiting, manifest, folders)
        writing.sync_folder(folder, folders)
    lock.check()
    writing.remove(folder / UNFINISHED, folders)
    writing.sync_folder(folder, folders)
    lock.check()
    clear(staging, folders)


def _check_staged(staging: Path, paths: Iterable[str], again: str, folders: Folders) -> None:
    """Raises OutputError unless every file is there that is to be renamed."""
    for path in paths:
        if not folders.exists(staged(staging, path)):
            raise OutputError(f"{staged(staging, path)} is not in the unfinished output: {_NOT_THERE} {again}")


def mark_unfinished(folder: Path, folders: Folders) -> None:
    if not folders.exists(folder / UNFINISHED):
        writing.write_file(folder / UNFINISHED, _NOTE, folders)
        writing.sync_folder(folder, folders)


def discard(folder: Path, staging: Path, plan: Plan, lock: Lock) -> None:
    """Removes an unfinished output, what it has published so far too; the folder then stays marked."""
    folders = lock.folders
    if folders.exists(folder / UNFINISHED):
        manifests = (staging / _PREVIOUS, staged(staging, MANIFEST), folder / MANIFEST)
        listed = [name for manifest in manifests for name in _listed(manifest, folders)]
        stale = _stale(plan, folders, staging / _PREVIOUS)
        removed = _removals(folder, listed, stale, {folder / UNFINISHED}, folders)
        lock.check()
        writing.remove(folder / MANIFEST, folders)
        _remove_files(folder, removed, lock)
    clear(staging, folders)


def clear(staging: Path, folders: Folders) -> None:
    """Empties the staging folder, the journal last; the lock stays."""
    for name in sorted(folders.names(staging), key=lambda name: name == JOURNAL):
        if folders.is_folder(staging / name):
            writing.remove_tree(staging / name, folders)
        elif name != LOCK:
            writing.remove(staging / name, folders)


def _listed(manifest: Path, folders: Folders) -> Iterator[str]:
    """The side files that a manifest names, as far as they can be any; none if it is missing or no manifest.

    It may be a stranger's: what is none of an output's side files is not removed for being listed.
    """
    try:
        names = read_json(manifest, folders=folders).get("side_files", [])
    except CheckpointError:
        return
    yield from (n for n in names if isinstance(n, str) and _may_be_side_file(n)) if isinstance(names, list) else ()


def _may_be_side_file(name: str) -> bool:
    path = Path(name)
    hidden = path.is_absolute() or any(part.startswith(".") for part in path.parts)  # ``..`` and the staging folder too
    return not hidden and path.suffix.lower() not in WEIGHT_SUFFIXES and name not in (CONFIG, MANIFEST)


def _stale(plan: Plan, folders: Folders, *manifests: Path) -> list[str]:
    """Patterns of weights that a folder may have: those that every loader finds, and those of this plan's writer and of
    the writers that manifests name. Other writers' are none: what they match is somebody's own file here."""
    names = {plan.pipeline.writer.name, *(_writer_of(manifest, folders) for manifest in manifests)}
    return [*STALE, *(pattern for name in sorted(names) for pattern in plan.stale.get(name, ()))]


def _writer_of(manifest: Path, folders: Folders) -> str:
    """The name of the writer that made an output; "" if its manifest is missing or does not say."""
    try:
        named = read_json(manifest, folders=folders)["pipeline"]["writer"]["use"]
    except (CheckpointError, KeyError, TypeError):
        return ""
    return named if isinstance(named, str) else ""


def _removals(
    folder: Path, names: Iterable[str], stale: Sequence[str], keep: set[Path], folders: Folders
) -> list[Path]:
    """An earlier output's files, which are to go; other files of the user's stay. Raises OutputError if one lies behind
    a link."""
    listed = (folder / n for n in names)
    found = (p for pattern in stale for p in folders.glob(folder, pattern))
    weights = sorted(p for p in found if PARTIAL not in p.relative_to(folder).parts)
    removed = [
        p for p in dict.fromkeys((*listed, *weights)) if p not in keep and (os.path.isfile(p) or os.path.islink(p))
    ]
    for path in removed:
        _check_inside(folder, path)
    return removed


def _remove_files(folder: Path, removed: Sequence[Path], lock: Lock) -> None:
    """Removes files, and the folders that are empty without them."""
    for path in removed:
        lock.check()
        _check_inside(folder, path)
        writing.remove(path, lock.folders)
    _sync_parents(removed, lock.folders)
    _remove_emptied(folder, removed, lock.folders)


def _remove_emptied(folder: Path, removed: Iterable[Path], folders: Folders) -> None:
    emptied = {parent for path in removed for parent in path.relative_to(folder).parents if parent.parts}
    for parent in sorted(emptied, key=lambda p: len(p.parts), reverse=True):  # of the files that went, and no other
        path = folder / parent
        if folders.is_folder(path) and not folders.names(path):
            writing.remove_folder(path, folders)


def _check_inside(folder: Path, path: Path) -> None:
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise OutputError(f"{path} would lie outside {folder}, behind a symbolic link: remove the link")
    between = (p for p in path.parents if p != folder and p.is_relative_to(folder))
    if link := next((p for p in between if p.is_symlink()), None):
        raise OutputError(f"{path} would lie behind {link}, a symbolic link, which ktforge does not make: remove it")


def _sync_parents(paths: Iterable[Path], folders: Folders) -> None:
    for parent in {p.parent for p in paths}:
        writing.sync_folder(parent, folders)
