"""What a run will do, as plain data: the five stages with rules, what becomes of every unit, and the files."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from ktforge.contract.checks import blame, expected
from ktforge.contract.identity import Identity
from ktforge.contract.rules import Rule
from ktforge.contract.stages import Layout, Loader, Preprocessor, Quantizer, Result, Stage
from ktforge.contract.tensors import FileSpec, SourceFile, TensorSpec, UnitSpec, total_bytes
from ktforge.errors import PlanError
from ktforge.text import counted, size_text


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says about a model. A dense one has ``experts`` and ``expert_size`` 0, ``moe_layers`` empty."""

    model_type: str
    layers: int
    hidden: int
    experts: int
    expert_size: int
    moe_layers: frozenset[int]


class Sink(Protocol):
    """What an open writer offers to the workers; thread-safe."""

    def has(self, tensor: TensorSpec) -> bool:
        """Whether an earlier run, which was cut off, has put a planned tensor in its place."""

    def write(self, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
        """Puts a planned tensor in its place, or if ``row`` is given, those rows of its first axis that begin there.

        The memory of ``data`` is used again when this returns.
        """


class Writer(Stage):
    """Puts the output tensors into files."""

    stage: ClassVar[str] = "writer"
    #: Glob patterns, relative to the output folder, of what a reader of its outputs takes for weights, beside
    #: ``*.safetensors`` and ``*.bin``: what an earlier output left of them goes when another replaces it.
    weights: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        """The files for these output tensors. ``formats`` names the layouts' formats among them."""

    @abstractmethod
    def open(
        self, plan: Plan, *, overwrite: bool = False, restart: bool = False, verify: bool = False
    ) -> AbstractContextManager[Sink]:
        """Yields a sink. A clean exit publishes the files, with the plan's config.json and side files, the index last;
        after an exception none of them is.

        ``overwrite`` replaces a finished output, ``restart`` discards an unfinished one, ``verify`` compares the hashes
        of what that one holds. A writer that keeps nothing of an unfinished output ignores the last two.
        """

    def folder(self) -> Path | None:
        """The output folder, None if there is none."""
        return None


def wrong_pattern(writer: type[Writer]) -> str | None:
    """What of a writer's ``weights`` could reach files that are nobody's weights; None if nothing could."""
    if not isinstance(writer.weights, tuple):
        return f"{writer.weights!r}, which is no tuple of glob patterns"
    for pattern in writer.weights:
        path = PurePosixPath(pattern)
        if path.is_absolute() or ".." in path.parts or "**" in pattern or not path.suffix or path.name.startswith("."):
            return f"{pattern!r}, which is no relative glob pattern of files with a suffix of their own"
    return None


#: In the order in which data passes them.
STAGES: tuple[type[Stage], ...] = (Loader, Preprocessor, Quantizer, Layout, Writer)

#: What a rule uses instead of a quantizer to leave a weight as it is.
KEEP = "keep"


class Runtime(BaseModel):
    """What the engine will be started with; recorded in the manifest for whoever starts it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cpuinfer_threads: int | None = Field(default=None, ge=1, description="Threads of the engine.")


class Recipe(BaseModel):
    """loader → preprocess → quantize → layout → writer. Without quantize and layout it only converts.

    ``rules`` say which weights get another quantizer than ``quantize``, or none. Where none matches, a MoE model's
    routed experts are quantised, and a dense model's linear weights but lm_head and embeddings.

    ``mtp``: keep or omit multi-token-prediction layers, always whole; by default they are kept where there is no
    layout, since engines take them from the original checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1] = Field(default=1, description="Version of the pipeline file's form.")
    loader: InstanceOf[Loader]
    preprocess: tuple[InstanceOf[Preprocessor], ...] = ()
    quantize: InstanceOf[Quantizer] | None = None
    rules: tuple[Rule, ...] = Field(default=(), description="What gets another quantizer or none, under `quantize`.")
    layout: InstanceOf[Layout] | None = None
    writer: InstanceOf[Writer]
    mtp: Literal["omit", "keep"] | None = Field(
        default=None, description="Keep or omit multi-token-prediction layers, whole. Default: a layout omits them."
    )
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _quantize_with_layout(self) -> Self:
        if (self.quantize is None) != (self.layout is None):
            raise ValueError("quantize and layout go together: give both, or neither to convert without quantising")
        if self.rules and self.quantize is None:
            raise ValueError("rules say what is quantised, and there is no quantize")
        return self

    def stages(self) -> Iterator[Stage]:
        """The stages in the order in which data passes them."""
        yield self.loader
        yield from self.preprocess
        yield from (s for s in (self.quantize, self.layout) if s is not None)
        yield self.writer

    def all_stages(self) -> Iterator[Stage]:
        """The stages, those that only rules name among them."""
        yield from self.stages()
        yield from (rule.quantizer for rule in self.rules if rule.quantizer is not None)

    @property
    def keeps_mtp(self) -> bool:
        """Whether multi-token-prediction layers are in the output: a layout holds the model's own layers; a checkpoint
        that is only converted keeps all it has."""
        return self.mtp == "keep" or (self.mtp is None and self.layout is None)

    def bound(self, config: Mapping[str, Any]) -> Self:
        """This pipeline with every stage told what the source's config.json says."""
        return self._with_stages(lambda stage: stage.bind(config))

    def equipped(self, classes: Sequence[type[Stage]]) -> Self:
        """This pipeline with every stage told which stage classes are installed."""
        return self._with_stages(lambda stage: stage.equip(classes))

    def _with_stages(self, told: Callable[[Any], Any]) -> Self:
        def of(stage: Stage) -> Stage:
            base = next(base for base in STAGES if isinstance(stage, base))
            with blame(stage, "the pipeline"):
                return expected(stage, told(stage), base, "the pipeline")

        return self.model_copy(
            update={
                "loader": of(self.loader),
                "preprocess": tuple(map(of, self.preprocess)),
                "quantize": self.quantize and of(self.quantize),
                "rules": tuple(
                    rule.model_copy(update={"quantizer": rule.quantizer and of(rule.quantizer)}) for rule in self.rules
                ),
                "layout": self.layout and of(self.layout),
                "writer": of(self.writer),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of a pipeline file for this pipeline, defaults spelled out."""
        named: dict[str, Any] = {"version": self.version, "loader": _named(self.loader)}
        if self.preprocess:
            named["preprocess"] = [_named(s) for s in self.preprocess]
        if self.quantize and self.layout:
            named["quantize"], named["layout"] = _named(self.quantize), _named(self.layout)
            if self.rules:
                named["quantize"]["rules"] = [
                    {"match": r.match, **(_named(r.quantizer) if r.quantizer else {"use": KEEP})} for r in self.rules
                ]
        named["writer"] = _named(self.writer)
        if self.mtp:
            named["mtp"] = self.mtp
        runtime = self.runtime.model_dump(exclude_none=True)
        return {**named, "runtime": runtime} if runtime else named


def _named(stage: Stage) -> dict[str, Any]:
    held = {k: v for k in type(stage).model_fields if isinstance(v := getattr(stage, k), Stage)}
    plain = stage.model_dump(mode="json", exclude_none=True, exclude=set(held))
    return {"use": stage.name, **plain, **{k: _named(v) for k, v in held.items()}}


class PlannedUnit(NamedTuple):
    """A unit as the loader finds it, the units that each preprocessor makes of it, and the last ones' results.

    A unit has several results where rules treat its projections differently.

    ``share_rows``: rows of the first axis that one of its shares has, 0 if it is worked on as a whole.
    ``working_bytes``: bytes of all arrays that may live while one of its shares is worked on, at most.
    """

    source: UnitSpec
    steps: tuple[tuple[UnitSpec, ...], ...]
    results: tuple[tuple[Result, ...], ...]
    share_rows: int
    working_bytes: int

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        return [tensor for results in self.results for result in results for tensor in result.outputs]

    @property
    def shares(self) -> int:
        """How many pieces of it are worked on one by one."""
        return -(-self.source.first_axis // self.share_rows) if self.share_rows else 1


def results_of(units: Iterable[PlannedUnit]) -> Iterator[Result]:
    """What becomes of all units, in their order."""
    return (result for unit in units for results in unit.results for result in results)


@dataclass(frozen=True, repr=False)
class Plan:
    """What a run will do. ``problems`` holds one sentence per refusal; a plan with any cannot be run.

    ``config_json`` is the output's config.json, None if the source has none to give. ``left_out`` are the tensors of
    the source that are in no output, whole layers beyond the model's among them. ``inputs`` maps the files that decide
    what stages make to the xxh3-128 of their content, in hex; ``stale`` maps the names of writers to the glob patterns
    of weights that an earlier output of theirs may have left. ``settled`` are fields that config.json lacks, as the
    tensors have them. ``extra`` are those of ``left_out`` that are for multi-token prediction. ``documents`` are
    config.json and the files beside it that say what weights are, each with the xxh3-128 of its content;
    ``identities`` tell each of ``sources`` and ``inputs`` from what may take its place. ``rereads``: what was written
    is read back from the disk and compared with its hashes before it is published.
    """

    pipeline: Recipe
    model: ModelConfig
    units: tuple[PlannedUnit, ...]
    files: tuple[FileSpec, ...]
    config_json: bytes | None
    side_files: tuple[Path, ...]
    sources: tuple[SourceFile, ...]
    left_out: tuple[TensorSpec, ...]
    problems: tuple[str, ...]
    inputs: Mapping[Path, str]
    stale: Mapping[str, tuple[str, ...]]
    settled: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[TensorSpec, ...] = ()
    documents: Mapping[str, str] = field(default_factory=dict)
    identities: Mapping[Path, Identity] = field(default_factory=dict)
    rereads: bool = False

    @property
    def notes(self) -> Sequence[str]:
        """What the plan takes for granted, a sentence each."""
        return [f"config.json has no {name}: the tensors say {value}" for name, value in self.settled.items()]

    def __repr__(self) -> str:
        """In one line: what it holds has a million."""
        what = f"{counted(len(self.units), 'unit')}, {counted(len(self.files), 'file')}"
        return f"<Plan: {what}, {counted(len(self.problems), 'problem')}>"

    def check(self) -> None:
        """Raises PlanError with all problems, if there are any."""
        if self.problems:
            raise PlanError(*self.problems)

    def check_memory(self, limit: int | None) -> None:
        """Raises PlanError if a unit alone needs more than ``limit`` bytes (None: no limit)."""
        largest = max(self.units, key=lambda u: u.working_bytes, default=None)
        if limit is not None and largest is not None and largest.working_bytes > limit:
            megabytes = -(-largest.working_bytes // 10**6)
            raise PlanError(
                f"{largest.source.name} needs {size_text(largest.working_bytes)}, more than the memory limit of "
                f"{size_text(limit)}: allow {megabytes:,} MB or more"
            )

    @cached_property
    def source_bytes(self) -> int:
        return total_bytes(chain.from_iterable([u.source.tensors.values() for u in self.units]))

    @cached_property
    def stored_bytes(self) -> int:
        """``source_bytes`` as the source's files have them: fewer where the loader unpacks what it reads."""
        return min(self.source_bytes, sum(f.nbytes for f in self.sources) or self.source_bytes)

    @cached_property
    def output_bytes(self) -> int:
        return sum(f.nbytes for f in self.files)

    @cached_property
    def expert_units(self) -> int:
        return sum(u.source.experts for u in self.units)

    @property
    def serving(self) -> str | None:
        """The command line that serves the output, if the layout names one; None for a plan with refusals, and where
        the layout does not say that it is read as this writer leaves it."""
        layout, folder = self.pipeline.layout, self.pipeline.writer.folder()
        if layout is None or folder is None or self.problems or self.pipeline.writer.name not in layout.served_from:
            return None
        source, threads = self.pipeline.loader.folder(), self.pipeline.runtime.cpuinfer_threads
        with blame(layout, "how the output is served"):
            return layout.serving(self.results, source, folder, threads)

    @property
    def results(self) -> Iterator[Result]:
        """What becomes of every unit, in their order."""
        return results_of(self.units)

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The layouts' formats in the output, such as kt-amx-int4/1."""
        return tuple(sorted({r.packed.format for r in self.results if r.packed}))

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The quantizers' methods, such as absmax-int4/2."""
        return tuple(sorted({r.quant.method for r in self.results if r.quant}))

    def peak_memory(self, workers: int, limit: int | None = None) -> int:
        """Bytes of all that is in flight at the worst moment, with a memory limit of so many bytes if there is one; the
        interpreter and its libraries come on top."""
        largest = heapq.nlargest(workers, self.units, key=attrgetter("working_bytes"))
        peak = sum([u.working_bytes for u in largest for _ in range(min(workers, u.shares))][:workers])
        return peak if limit is None else min(peak, limit)


@dataclass(frozen=True)
class Summary:
    """What a run did. ``units`` were worked on and ``source_bytes`` of them read, which leaves out what an unfinished
    output held already; ``output_bytes`` are those of the whole output, in ``folder`` if it has one. ``seconds`` are
    of wall time, planning included.
    """

    plan: Plan
    seconds: float
    units: int
    source_bytes: int
    output_bytes: int
    folder: Path | None
