"""A pipeline: one stage of each kind, put together in Python or from a pipeline file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from ktforge.errors import UnknownExperts
from ktforge.rules import Rule
from ktforge.stages import Layout, Loader, Preprocessor, Quantizer, Stage, Writer

if TYPE_CHECKING:
    from ktforge.plan import Plan
    from ktforge.registry import Registry


#: What a rule uses instead of a quantizer to leave a weight as it is.
KEEP = "keep"


class Runtime(BaseModel):
    """What the engine will be started with; recorded in the manifest for whoever starts it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cpuinfer_threads: int | None = Field(default=None, ge=1, description="Threads of the engine.")


class Pipeline(BaseModel):
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
    def _quantize_with_layout(self) -> Pipeline:
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

    def bound(self, config: Mapping[str, Any]) -> Pipeline:
        """This pipeline with every stage told what the source's config.json says."""
        return self.model_copy(
            update={
                "preprocess": tuple(s.bind(config) for s in self.preprocess),
                "quantize": self.quantize and self.quantize.bind(config),
                "rules": tuple(_bound(r, config) for r in self.rules),
                "layout": self.layout and self.layout.bind(config),
            }
        )

    def plan(self, registry: Registry | None = None) -> Plan:
        """What :meth:`run` will do, and all that speaks against it, from headers and config.json alone.

        ``registry`` brings the layouts that a checkpoint may have been packed in, so that it is called by its name.
        Raises CheckpointError if the checkpoint cannot be read.
        """
        from ktforge.packed import check_not_packed
        from ktforge.plan import make_plan

        try:
            return make_plan(self)
        except UnknownExperts:
            check_not_packed(self.loader, registry)
            raise

    def run(
        self,
        *,
        overwrite: bool = False,
        restart: bool = False,
        verify: bool = False,
        workers: int | None = None,
        memory_limit: int | None = None,
        registry: Registry | None = None,
    ) -> Plan:
        """Plans and converts; returns the plan that was carried out.

        An unfinished output of the same pipeline and source goes on where it stopped; ``restart`` discards it,
        ``verify`` compares the hashes of what it holds. ``overwrite`` replaces what is in the output folder,
        ``workers`` is the number of threads (default: one a core), ``memory_limit`` bounds the bytes they work on at
        once, ``registry`` brings observers, and what :meth:`plan` has it for. Raises KtforgeError; then what the output
        folder held is still there, and the next call goes on.
        """
        from ktforge.execute import execute
        from ktforge.registry import Registry

        plan = self.plan(registry)
        hook = (registry or Registry()).hook
        execute(
            plan, hook, overwrite=overwrite, restart=restart, verify=verify, workers=workers, memory_limit=memory_limit
        )
        return plan

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


def _bound(rule: Rule, config: Mapping[str, Any]) -> Rule:
    return rule.model_copy(update={"quantizer": rule.quantizer and rule.quantizer.bind(config)})


def _named(stage: Stage) -> dict[str, Any]:
    held = {k: v for k in type(stage).model_fields if isinstance(v := getattr(stage, k), Stage)}
    plain = stage.model_dump(mode="json", exclude_none=True, exclude=set(held))
    return {"use": stage.name, **plain, **{k: _named(v) for k, v in held.items()}}
