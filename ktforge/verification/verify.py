"""``ktforge.verify``: an output by itself, without what it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktforge.contract.plan import Plan
from ktforge.contract.registry import Registry
from ktforge.contract.stages import Loader
from ktforge.contract.tensors import TensorSpec, UnitSpec
from ktforge.disk import system
from ktforge.disk.marks import MANIFEST
from ktforge.disk.reading import open_regular
from ktforge.errors import CheckpointError, OutputError, Problems, UnknownExperts, Unsupported
from ktforge.model.config import quantization_config
from ktforge.model.number_format import remarks_of
from ktforge.model.source import Source, read_source
from ktforge.model.units import units_of
from ktforge.native.cores import worker_count
from ktforge.output.manifest import MANIFEST_FORMAT
from ktforge.readback.loader import packed_loader
from ktforge.readback.packed import Packed, find_packed, read_manifest, stated_formats
from ktforge.text import counted
from ktforge.verification.files import AGAIN, Listed, check_files, found_files, hash_problem, listed_files
from ktforge.verification.result import Check, Verification
from ktforge.verification.weights import CONVERT, Weights


def verify(
    folder: Path | str,
    *,
    workers: int | None = None,
    registry: Registry | None = None,
    follow_links: bool = False,
    cold: bool = False,
    contents: bool = True,
) -> Verification:
    """Looks at an output of a conversion by itself: files, hashes, structure, scales and codes.

    Reads everything once, with all ``workers`` (default: one a core). ``registry``: the plugins (default: those that
    are installed). ``cold``: from the disk itself, as far as the system lets go of what it keeps in memory. Without
    ``contents``, neither weights nor hashes are looked at. What is wrong is in the checks of what is returned; an
    ordinary checkpoint can be looked at, too, as far as there is anything to hold it against. Raises CheckpointError
    for what is no folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: give the one that holds the output")
    found = _Look(folder, registry or Registry.installed(), worker_count(workers), follow_links, cold, contents)
    return found.verify()


def check_output(plan: Plan, *, workers: int | None = None, registry: Registry | None = None) -> None:
    """Looks at what a run of ``plan`` has published. Its hashes are passed over where the writer has compared them
    already (:attr:`~ktforge.contract.plan.Plan.rereads`), else there are none, and it is read from the disk.

    Raises OutputError with all that is wrong.
    """
    folder = plan.pipeline.writer.folder()
    assert folder is not None
    look = _Look(folder, registry or Registry.installed(), worker_count(workers), made_by=plan)
    found = look.verify()
    if not found.ok:
        raise OutputError(*found.problems, f"so the output in {folder} is not to be used, though it was published")


@dataclass
class _Look:
    """A folder that is looked at, and what was found so far."""

    folder: Path
    registry: Registry
    workers: int
    follow_links: bool = False
    cold: bool = False
    contents: bool = True
    made_by: Plan | None = None
    weights: Weights = field(default_factory=Weights)
    notes: list[str] = field(default_factory=list)

    def verify(self) -> Verification:
        agreement, files, structure = Problems(), Problems(), Problems()
        manifest, listed = self._manifest(agreement)
        self.notes += check_files(self.folder, listed, files)
        if self.cold or (self.made_by is not None and not (self.made_by.rereads and listed is not None)):
            self._forget()
        experts = self._structure(manifest, agreement, structure)
        checks = [
            Check("files", counted(len(listed), "file") if listed is not None else "none are listed", files.lines()),
            Check("manifest", "what it says against config.json and the tensors", agreement.lines()),
            Check("structure", experts, structure.lines()),
        ]
        weights = self.weights
        if weights.parts:
            checks.append(Check("scales", counted(weights.parts, "packed part"), weights.scales.lines()))
            checks.append(Check("codes", counted(weights.all_codes, "code"), weights.codes.lines()))
        if weights.tensors:
            problems = weights.values.lines() if weights.parts else (*weights.values.lines(), *weights.scales.lines())
            checks.append(Check("values", f"{counted(weights.tensors, 'tensor')} as they are", problems))
        if listed is not None and self.contents and not (self.made_by is not None and self.made_by.rereads):
            checks.insert(1, Check("hashes", counted(len(listed), "file"), self._hashes(listed)))
        self.notes += weights.remarks()
        return Verification(str(self.folder), tuple(checks), tuple(self.notes))

    def _manifest(self, agreement: Problems) -> tuple[Mapping[str, Any], list[Listed] | None]:
        try:
            manifest = read_manifest(self.folder)
            listed = listed_files(manifest)
        except CheckpointError as refusal:
            agreement.extend(refusal.problems)
            return {}, None
        if not manifest:
            self.notes.append(f"there is no {MANIFEST}, so nothing says which files and bytes were written")
        elif listed is None:
            version = manifest.get("ktforge", "an earlier version")
            self.notes.append(
                f"its manifest, of ktforge {version}, has no hashes: whether the bytes are those that were written "
                "cannot be told"
            )
        return manifest, listed

    def _forget(self) -> None:
        for name in found_files(self.folder):
            if (self.folder / name).is_file():
                with open_regular(self.folder / name) as opened:
                    system.forget(opened.fileno())

    def _structure(self, manifest: Mapping[str, Any], agreement: Problems, structure: Problems) -> str:
        """Looks at tensors and then at weights, as far as they can be read; says what was looked at."""
        try:
            options = {"path": self.folder, "follow_links": self.follow_links or None}
            inner = self.registry.build("loader", "auto", options)
            assert isinstance(inner, Loader)
            packed = self._packed(inner, manifest)
            loader = packed_loader(inner, packed, one_by_one=True) if packed else inner
            source = read_source(loader)
            units = units_of(source.tensors, source.model)
        except Unsupported as refusal:
            self.notes.append(f"{refusal}: its weights are not looked at")
            return "what cannot be read back"
        except (CheckpointError, UnknownExperts) as refusal:
            structure.extend(refusal.problems)
            return "as far as it can be read"
        structure.extend(units.problems.lines())
        _agreement(source, packed, inner, manifest, agreement)
        if not self.contents:
            return _said(units.experts, source.tensors)
        try:
            names = {t.name for unit in units.experts for t in unit.tensors.values()}
            self.weights.look(loader, source.tensors, names, self.workers)
            if packed is None:
                self.notes += remarks_of(self.registry, loader, source.model, units.experts)
        except Unsupported as refusal:
            self.notes.append(f"{refusal}: its codes are not looked at")
        except CheckpointError as refusal:
            structure.extend(refusal.problems)
        return _said(units.experts, source.tensors)

    def _packed(self, inner: Loader, manifest: Mapping[str, Any]) -> Packed | None:
        """What is packed in the folder: by the very layout of the run that made it, where there was one."""
        if self.made_by is None:
            return find_packed(inner, self.registry)
        layout = self.made_by.pipeline.layout
        return None if layout is None else Packed(layout, manifest)

    def _hashes(self, listed: Sequence[Listed]) -> tuple[str, ...]:
        """What is wrong with files of the right size; the others have been told of."""
        there = [f for f in listed if _has_size(self.folder / f.name, f.nbytes)]
        known = {path.resolve(): parts for path, parts in self.weights.known.items()}
        with ThreadPoolExecutor(self.workers) as threads:
            found = threads.map(
                lambda file: hash_problem(self.folder, file, known.get((self.folder / file.name).resolve(), {})), there
            )
            return tuple(problem for problem in found if problem is not None)


def _has_size(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes


def _said(experts: Sequence[UnitSpec], tensors: Sequence[TensorSpec]) -> str:
    count = sum(unit.experts for unit in experts)
    layers = len({unit.layer for unit in experts})
    model = f"{counted(count, 'expert')} in {counted(layers, 'layer')}, " if experts else ""
    return model + counted(len(tensors), "tensor")


def _agreement(
    source: Source, packed: Packed | None, inner: Loader, manifest: Mapping[str, Any], problems: Problems
) -> None:
    """Whether manifest, config.json and tensors speak of one output."""
    if not manifest:
        return
    stale = f"the {MANIFEST} is another output's, or damaged: {AGAIN}"
    if manifest.get("format") != MANIFEST_FORMAT:
        problems.add(f"its form is {manifest.get('format')!r}, and {MANIFEST_FORMAT} is known: {stale}")
    formats = stated_formats(manifest)
    stored = {tensor.name for tensor in inner.scan()}
    if packed is not None:
        form, nodes = packed.form(inner, tuple(inner.scan()))
        if form not in formats:
            problems.add(f"the tensors are {form}, but it says {', '.join(formats) or 'no format'}: {stale}")
        if nodes != manifest.get("numa_nodes"):
            problems.add(f"the tensors are for {nodes} NUMA nodes, but it says {manifest.get('numa_nodes')}: {stale}")
    elif formats:
        problems.add(f"it says {', '.join(formats)}, but no such weights are here: {stale}")
    said = quantization_config(inner.config()).get("format")
    if isinstance(said, str) and "/" in said and said not in formats:
        problems.add(f"config.json says {said}, but the manifest {', '.join(formats) or 'no format'}: {CONVERT}")
    layers, renamed = manifest.get("experts"), manifest.get("renamed")
    if isinstance(layers, dict) and layers.keys() != {str(number) for number in source.model.moe_layers}:
        known = {key for key in layers if not key.isdecimal() or int(key) < source.model.layers}  # the rest is for MTP
        if known != {str(number) for number in source.model.moe_layers}:
            problems.add(f"config.json has experts in other layers than the manifest: {stale}")
    for name in renamed if isinstance(renamed, dict) else ():
        if name not in stored:
            problems.add(f"the manifest knows of it, and it is not here: {stale}", name)
