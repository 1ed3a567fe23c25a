"""An output folder that is either finished or says that it is not. Folder writers build on this.

Everything grows below ``.ktforge-partial`` under names that no weight loader picks up. A journal there says what is
in place, so that a run which was cut off, by an error or by ``kill -9``, goes on where it stopped.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ktforge.contract.checks import check_paths
from ktforge.contract.plan import Plan
from ktforge.contract.tensors import FileSpec
from ktforge.disk import writing
from ktforge.disk.folders import Folders
from ktforge.disk.journal import Journal
from ktforge.disk.lock import Lock, held, locked
from ktforge.disk.marks import JOURNAL, PARTIAL, UNFINISHED, staged
from ktforge.errors import AlreadyDone, OutputError
from ktforge.native.cores import available_cores
from ktforge.output.finished import is_finished
from ktforge.output.publish import (
    collisions,
    discard,
    hashes,
    nested_weights,
    publish,
    published,
    stage_documents,
    take_back,
    texts_of,
)
from ktforge.output.reread import check_documents, check_file, check_staged
from ktforge.output.resume import check_unchanged, fingerprint
from ktforge.output.sink import FolderSink
from ktforge.text import counted

logger = logging.getLogger(__name__)


def check_output(folder: Path, source: Path | None) -> list[str]:
    """Why this folder cannot take an output at all, one sentence each; empty if it can."""
    if folder.exists() and not folder.is_dir():
        return [f"{folder} is a file: give a folder for the output"]
    if folder.resolve() == folder.resolve().parent:
        return [f"{folder} is the root of the file system: give a folder for the output"]
    above = next(p for p in folder.absolute().parents if p.exists())
    if not above.is_dir():
        return [f"{folder} would lie below {above}, which is a file: give another folder for the output"]
    if (folder / PARTIAL).is_symlink():
        return [f"{folder / PARTIAL} is a symbolic link, which ktforge does not make: remove it"]
    if source is not None:
        here, there = folder.resolve(), source.resolve()
        if here == there or here in there.parents or there in here.parents:
            return [f"the output {folder} and the checkpoint {source} overlap: choose another folder"]
    return nested_weights(folder)


def is_unfinished(folder: Path) -> bool:
    """Whether the same command would go on with what is in ``folder``."""
    return bool(Journal(folder / PARTIAL / JOURNAL).fingerprint)


def outlook(plan: Plan) -> str | None:
    """What a run of ``plan`` would do about what its output folder holds already, in one sentence; None if there is
    nothing, no folder, or no plan.

    Raises CheckpointError if a source file is no longer the one that was planned with.
    """
    folder = plan.pipeline.writer.folder()
    if folder is None or plan.problems:
        return None
    if other := held(folder / PARTIAL):
        return other
    journal = Journal(folder / PARTIAL / JOURNAL)
    if journal.fingerprint:
        again = _again(folder, journal)
        try:
            check_unchanged(folder, journal.fingerprint, fingerprint(plan), again)
        except OutputError as error:
            changes = "; ".join(error.problems[:-1])
            return f"{folder} holds an unfinished output that cannot go on ({changes}): {again} discards it"
        needs = "" if _may_replace(folder, journal, overwrite=False, goes_on=True) else " with --overwrite"
        count = sum(len(f.tensors) for f in plan.files)
        return (
            f"{folder} holds an unfinished output of this pipeline: the run goes on{needs} behind "
            f"{len(journal.written):,} of {counted(count, 'tensor')}; --restart begins anew"
        )
    if not _may_replace(folder, journal, overwrite=False, goes_on=False):
        if is_finished(plan):
            return f"{folder} holds this output already: nothing is to do"
        return f"{folder} is not empty: the run needs --overwrite, which replaces its weights at the end"
    return None


def _may_replace(folder: Path, journal: Journal, *, overwrite: bool, goes_on: bool) -> bool:
    """Whether a run may put its files beside what ``folder`` holds, or in its place."""
    if overwrite or (goes_on and (journal.overwrite or journal.staged)) or (folder / UNFINISHED).exists():
        return True
    return not (folder.exists() and any(p.name != PARTIAL for p in folder.iterdir()))


def _again(folder: Path, journal: Journal) -> str:
    """The options with which a run discards the unfinished output in ``folder`` and begins anew."""
    alone = _may_replace(folder, journal, overwrite=False, goes_on=False)
    return "--restart" if alone else "--restart --overwrite"


@contextmanager
def open_folder(
    folder: Path,
    plan: Plan,
    documents: Mapping[str, bytes],
    *,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = False,
) -> Iterator[FolderSink]:
    """A sink for the files of ``plan``; on a clean exit the folder is complete, after an exception it can go on.

    ``documents`` are further files by name, such as an index. A folder that holds an unfinished output of the same
    plan keeps the tensors that it has; ``restart`` begins anew, ``verify`` reads them and compares their hashes.
    ``overwrite`` replaces what a folder holds, which stays until the new files are complete. A plan whose loader names
    no source files leaves nothing behind after an exception, since the next run could not tell what it was made from.

    Raises AlreadyDone if the folder holds this output already, OutputError if it cannot be written or its unfinished
    output was made from something else, PluginError if a planned tensor was never written.
    """
    problems = check_output(folder, plan.pipeline.loader.folder())
    if problems:
        raise OutputError(*problems)
    paths = published(plan, documents)
    check_paths(paths)
    if problems := collisions(plan, documents):
        raise OutputError(*problems)
    if not overwrite and is_finished(plan, documents):
        raise AlreadyDone(f"{folder} holds this output already, finished: nothing is to do; --overwrite makes it again")
    existed, staging = folder.exists(), folder / PARTIAL
    try:
        with locked(staging) as lock:
            journal = _open_journal(folder, plan, lock, overwrite=overwrite, restart=restart)
            logger.info("%s is open, %s are written", folder, counted(len(journal.written), "tensor"))
            sink = FolderSink(staging, plan.files, journal, lock)
            try:
                _check_kept(folder, plan.files, journal, lock.folders, verify=verify)
                yield sink
                sink.finish()
                _stage(folder, plan, texts_of(plan, documents), journal, lock)
                if plan.rereads:
                    _read_back(folder, plan, journal, lock)
                logger.info("publishing %s", folder)
                publish(folder, staging, paths, plan, lock, overwrite=overwrite or journal.overwrite)
            except OSError:
                lock.check()  # which has a better sentence for a folder that is gone
                raise
            finally:
                sink.close()
                journal.close()
                if not (journal.fingerprint or lock.folders.exists(folder / UNFINISHED) or lock.lost()):
                    discard(folder, staging, plan, lock)
    except OSError as error:
        raise OutputError(_failure(folder, error)) from error
    finally:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            writing.remove_folder(folder)


def _read_back(folder: Path, plan: Plan, journal: Journal, lock: Lock) -> None:
    """Raises OutputError if the disk does not give back what was written; then no run goes on with it."""
    logger.info("reading %s back from the disk", folder)
    try:
        check_staged(folder, plan.files, journal, available_cores(), lock.folders)
    except OutputError:
        discard(folder, folder / PARTIAL, plan, lock)
        raise


def _open_journal(folder: Path, plan: Plan, lock: Lock, *, overwrite: bool, restart: bool) -> Journal:
    """The journal of the unfinished output in ``folder`` if there is one to go on with, else a new one."""
    staging, now = folder / PARTIAL, fingerprint(plan)
    journal = Journal(staging / JOURNAL, lock.folders)
    goes_on = bool(journal.fingerprint) and not restart
    if goes_on:
        check_unchanged(folder, journal.fingerprint, now, _again(folder, journal))
    if not _may_replace(folder, journal, overwrite=overwrite, goes_on=goes_on):
        if not journal.fingerprint:
            discard(folder, staging, plan, lock)
        needed = _again(folder, journal) if restart and journal.fingerprint else "--overwrite"
        raise OutputError(f"{folder} is not empty: choose another folder, or say {needed}")
    if not goes_on:
        discard(folder, staging, plan, lock)
        journal = Journal(staging / JOURNAL, lock.folders)
        journal.begin(now, overwrite=overwrite or (folder / UNFINISHED).exists())
    return journal


def _stage(folder: Path, plan: Plan, texts: Mapping[str, bytes], journal: Journal, lock: Lock) -> None:
    """Has all but the weights ready to be published, as the source has it now."""
    staging = folder / PARTIAL
    lock.check()
    if not journal.staged or journal.documents != hashes(plan, texts, journal.written):
        take_back(folder, staging, journal.documents, lock)
        if journal.documents:
            journal.add_staged({})
        journal.add_staged(stage_documents(staging, plan, texts, journal.written, lock))


def _check_kept(folder: Path, specs: tuple[FileSpec, ...], journal: Journal, folders: Folders, *, verify: bool) -> None:
    """Raises OutputError if a file with tensors of an earlier run is missing or not what it left."""
    damaged = f"the disk may be failing: start over with {_again(folder, journal)}"
    for file in specs:
        kept = [t for t in file.tensors if t.name in journal.written]
        if not kept:
            continue
        path = staged(folder / PARTIAL, file.path)
        if journal.staged and not folders.exists(path):
            path = folder / file.path
        found = folders.stat(path)
        size = found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None
        if size != file.nbytes:
            has = "is gone" if size is None else f"has {size:,} bytes; {file.nbytes:,} were written"
            raise OutputError(f"{path} of the unfinished output {has}: start over with {_again(folder, journal)}")
        if verify:
            check_file(path, file, journal.written, damaged, folders)
    if verify:
        check_documents(folder, journal.documents, damaged, folders)


def _failure(folder: Path, error: OSError) -> str:
    sentence = f"{error.filename or folder} cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{sentence}: make room, then run the same command again"
    if error.errno == errno.EFBIG:  # such as 4 GB on FAT
        return f"{sentence}: write smaller shards (max_shard_size), or to a file system that holds larger files"
    return sentence
