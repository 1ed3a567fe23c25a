"""``ktforge.compare``: two checkpoints, each in any form that can be read, against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ktforge.checkpoint.folder import QUANTIZATION_FILES
from ktforge.checkpoint.loader import same_bytes
from ktforge.comparison.judge import Judge
from ktforge.comparison.meter import Meter
from ktforge.comparison.result import Compared, Comparison
from ktforge.comparison.side import Key, Side
from ktforge.contract.registry import Registry
from ktforge.disk.marks import MANIFEST
from ktforge.disk.reading import content_hash
from ktforge.errors import CheckpointError, ConfigError, Problems
from ktforge.readback.loader import PackedLoader
from ktforge.running.execute import execute
from ktforge.text import counted
from ktforge.verification.result import Verification
from ktforge.verification.verify import verify


def compare(
    original: Path | str,
    converted: Path | str,
    *,
    sample: float = 1.0,
    max_error: float | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    registry: Registry | None = None,
    follow_links: bool = False,
) -> Comparison:
    """Compares the weights of two checkpoint folders, both as BF16: sources of any form, and what a layout packed.

    First what :func:`ktforge.verify` looks for in each that is an output (of a ``sample``, not in every byte), and
    whether both have the same tensors, shapes and side files. Then, streaming and with all
    ``workers`` (default: one a core), how far the weights of ``converted`` are from ``original``. ``sample``: the
    fraction of tensors that are read, evenly spread over layers and experts, always the same ones. ``max_error``: the
    largest relative error that is well (:attr:`~ktforge.measure.weights.Measures.relative_error`). ``memory_limit``:
    bytes of the original that are worked on at once; the converted takes as many again. ``registry``: the plugins
    (default: those that are installed).

    What is wrong is in ``problems`` of what is returned. Raises CheckpointError for a folder that cannot be read at
    all, ConfigError for a ``sample`` that is no fraction.
    """
    if not 0 < sample <= 1:
        raise ConfigError(f"a sample is a fraction of all tensors, above 0 and at most 1, not {sample:g}")
    plugins = registry or Registry.installed()
    meter, problems, notes = Meter(), Problems(), list[str]()
    look = partial(verify, workers=workers, registry=plugins, follow_links=follow_links, contents=sample == 1)
    opened = []
    for folder, writer in ((Path(original), meter), (Path(converted), Meter())):
        open_side = partial(Side.open, folder, plugins, writer, follow_links=follow_links)
        opened.append(_opened(folder, open_side, look, problems))
    one, other = (side for side, _ in opened)
    notes += (f"{found.folder}: {note}" for _, found in opened if found is not None for note in found.notes)
    if one is None or other is None:
        return Comparison(str(original), str(converted), problems.lines(), tuple(notes), (), (), sample)
    for side in (one, other):
        problems.extend(f"{side.folder}: {problem}" for problem in side.plan.problems)
    empty = Comparison(str(original), str(converted), problems.lines(), (*notes, *_notes(one, other)), (), (), sample)
    if one.plan.problems or other.plan.problems:
        return empty
    common = _structure(one, other, problems)
    _side_files(one, other, problems)
    if (
        not problems.lines()
        and one.packed is not None
        and other.packed is not None
        and _equal(one.packed, other.packed)
    ):
        return replace(empty, identical=True)
    chosen = _spread(common, sample)
    meter.against(other, {one.places[key].tensor.name: key for key in chosen})
    try:
        execute(one.plan, Registry().hook, workers=workers, memory_limit=memory_limit)
    except CheckpointError as refusal:  # such as NaN, which ends reading
        problems.extend(refusal.problems)
        return replace(empty, problems=problems.lines())
    compared = [_compared(key, one, meter) for key in chosen if one.places[key].tensor.name in meter.found]
    experts = tuple(t for t in compared if t.role is not None)
    others = tuple(t for t in compared if t.role is None)
    judge = Judge(one, other, max_error, problems)
    judge.experts(experts)
    judge.others(others, meter.unequal)
    if sample < 1:
        judge.scales(experts)
    return replace(empty, problems=problems.lines(), experts=experts, others=others)


def _opened(
    folder: Path, open_side: Callable[[], Side], look: Callable[[Path], Verification], problems: Problems
) -> tuple[Side | None, Verification | None]:
    """A side, and what is found in it alone if it is an output; None for a side that is too broken, which that says."""
    try:
        side: Side | None = open_side()
    except CheckpointError:
        side = None
        if not (folder / MANIFEST).exists() or (found := look(folder)).ok:
            raise
    else:
        if side is not None and not side.manifest and side.packed is None:
            return side, None
        found = look(folder)
    problems.extend(f"{folder}: {problem}" for problem in found.problems)
    return side, found


def _notes(one: Side, other: Side) -> tuple[str, ...]:
    notes = [f"{side.folder}: {note}" for side in (one, other) for note in side.plan.notes]
    left_out = _left_out(other)
    if left_out:
        notes.append(
            f"{other.folder} leaves out {counted(len(left_out), 'tensor')} of its source, as its manifest says"
        )
    return tuple(notes)


def _left_out(side: Side) -> set[str]:
    names = side.manifest.get("left_out")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _structure(one: Side, other: Side, problems: Problems) -> Sequence[Key]:
    """What both sides have in the same shapes, in the order of the one; what they do not is a problem."""
    if (mine := one.plan.model) != (theirs := other.plan.model):
        fields = [f for f in ("layers", "experts", "hidden", "expert_size") if getattr(mine, f) != getattr(theirs, f)]
        said = ", ".join(f"{f.replace('_', ' ')} {getattr(mine, f)} and {getattr(theirs, f)}" for f in fields)
        if said:
            problems.add(f"the two are different models: {said}")
    left_out, common = _left_out(other), []
    for key, place in one.places.items():
        there = other.places.get(key)
        if there is None:
            if place.tensor.name not in left_out:
                problems.add(
                    f"missing from {other.folder}, but it is in {one.folder}: convert it again", place.tensor.name
                )
        elif there.tensor.shape != place.tensor.shape:
            problems.add(f"{place.tensor} in {one.folder}, but {list(there.tensor.shape)} in {other.folder}")
        else:
            common.append(key)
    for key in other.places.keys() - one.places.keys():
        problems.add(f"missing from {one.folder}, but it is in {other.folder}", other.places[key].tensor.name)
    return common


def _equal(one: PackedLoader, other: PackedLoader) -> bool:
    """Whether two packed folders store the same tensors with the same bytes."""
    mine, theirs = ({t.name: t for t in side.inner.scan()} for side in (one, other))
    if {(t.name, t.dtype, t.shape) for t in mine.values()} != {(t.name, t.dtype, t.shape) for t in theirs.values()}:
        return False

    def same(name: str) -> bool:
        equal = same_bytes(one.inner.read(mine[name]), other.inner.read(theirs[name]))
        one.inner.release(mine[name])
        other.inner.release(theirs[name])
        return equal

    return all(map(same, mine))


def _side_files(one: Side, other: Side, problems: Problems) -> None:
    theirs = set(other.plan.side_files)
    for path in one.plan.side_files:
        if str(path) in QUANTIZATION_FILES:
            continue
        if path not in theirs:
            problems.add(f"{path} is missing from {other.folder}: copy it from {one.folder}")
        elif _hash(one, path) != _hash(other, path):
            problems.add(f"{path} differs between {one.folder} and {other.folder}: copy it from the one that is right")


def _hash(side: Side, path: Path) -> str:
    with side.plan.pipeline.loader.open_side_file(path) as opened:
        return content_hash(opened)


def _spread(keys: Sequence[Key], fraction: float) -> Sequence[Key]:
    """So many of ``keys``, at least one of each layer: evenly spread over its experts, with all projections of those
    chosen; the other tensors likewise."""
    groups: dict[object, dict[object, list[Key]]] = {}
    for key in keys:
        group, member = key[:2] if isinstance(key, tuple) else (None, key)
        groups.setdefault(group, {}).setdefault(member, []).append(key)
    chosen: list[Key] = []
    for members in groups.values():
        every, count = list(members.values()), math.ceil(fraction * len(members))
        for number in range(count):
            chosen += every[number * len(every) // count]
    return chosen


def _compared(key: Key, one: Side, meter: Meter) -> Compared:
    name = one.places[key].tensor.name
    measures, codes = meter.found[name]
    layer, expert, role = key if isinstance(key, tuple) else (None, None, None)
    return Compared(name, layer, expert, role, measures, codes)
