"""What becomes of one unit: the units that the preprocessors make of it, and the tensors that the output gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ktforge import shares
from ktforge.errors import Problems, Unsupported
from ktforge.grouping import check_shapes, expert_shapes
from ktforge.modelconfig import ModelConfig
from ktforge.registry import blame, planned, planned_tensors
from ktforge.rules import Targets
from ktforge.stages import Preprocessor, Quantizer
from ktforge.tensors import BF16, Demand, PackedSpec, QuantSpec, TensorSpec, UnitSpec

if TYPE_CHECKING:
    from ktforge.pipeline import Pipeline


class Result(NamedTuple):
    """What becomes of one unit behind the preprocessors: it is packed, or its tensors are renamed.

    ``fused``: whether the layout quantises and packs it in one step (:meth:`ktforge.Layout.fused`).

    ``renamed`` maps roles to output tensors; a role that is missing there is left out.
    """

    unit: UnitSpec
    quantizer: Quantizer | None = None
    quant: QuantSpec | None = None
    packed: PackedSpec | None = None
    fused: bool = False
    renamed: Mapping[str, TensorSpec] | None = None

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        if self.packed is not None:
            return self.packed.tensors
        return tuple((self.renamed or {}).values())


class PlannedUnit(NamedTuple):
    """A unit as the loader finds it, the units that each preprocessor makes of it, and the last ones' results.

    A unit has several results where rules treat its projections differently.

    ``share_rows``: :func:`ktforge.shares.share_rows`. ``working_bytes``: bytes of all arrays that may live while one of
    its shares is worked on, at most.
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
        return -(-shares.first_axis(self.source) // self.share_rows) if self.share_rows else 1


def plan_unit(pipeline: Pipeline, source: UnitSpec, model: ModelConfig, targets: Targets) -> PlannedUnit:
    """What a bound pipeline will make of one unit. Raises Unsupported with every reason why it cannot."""
    steps: list[tuple[UnitSpec, ...]] = []
    units: tuple[UnitSpec, ...] = (source,)
    for stage in pipeline.preprocess:
        units = tuple(made for unit in units for made in _preprocessed(stage, unit))
        steps.append(units)
    results = []
    for unit in units:
        if unit.fused and pipeline.layout is not None:
            raise Unsupported("all experts of the layer are in one tensor: put split-experts first under preprocess")
        if unit.is_expert:
            wrong = list(check_shapes(unit, model))
            if wrong:
                raise Unsupported(*wrong)
        results.append(tuple(_plan_result(pipeline, quantizer, piece) for quantizer, piece in targets.split(unit)))
    rows = shares.share_rows(pipeline, source, steps, results)
    made = PlannedUnit(source, tuple(steps), tuple(results), rows, 0)
    return made._replace(working_bytes=shares.working_bytes(pipeline, made))


def results_of(units: Iterable[PlannedUnit]) -> Iterator[Result]:
    """What becomes of all units, in their order."""
    return (result for unit in units for results in unit.results for result in results)


def edited_config(
    pipeline: Pipeline, config: Mapping[str, Any], results: Sequence[Result], problems: Problems
) -> Mapping[str, Any]:
    """config.json as the stages of a bound pipeline leave it, once nothing speaks against the whole output. What the
    layout or a stage has against it is added to ``problems``."""
    if pipeline.layout is not None:
        with blame(pipeline.layout, "the output"):
            problems.extend(pipeline.layout.check(results))
    for stage in pipeline.stages() if not problems.lines() else ():
        try:
            with blame(stage, "config.json"):
                config = stage.edit_config(config, results)
        except Unsupported as refusal:
            problems.extend(refusal.problems)
    return config


def later_refusals(pipeline: Pipeline, unit: UnitSpec, model: ModelConfig, targets: Targets) -> Sequence[str]:
    """What speaks against an expert behind the preprocessors, of which one refuses it: it would come out next time.

    That depends on the sizes of config.json alone, so an expert in BF16 stands for what they would have made.
    """
    if pipeline.layout is None or not (unit.is_expert or unit.fused):
        return ()
    units: tuple[UnitSpec, ...] = (unit,)
    try:
        for stage in pipeline.preprocess:
            units = tuple(made for one in units for made in _preprocessed(stage, one))
        return ()
    except Unsupported as refusal:
        said = refusal.problems
    tensors = {f"{p}.weight": TensorSpec(f"{unit.name}.{p}.weight", BF16, s) for p, s in expert_shapes(model).items()}
    ideal = UnitSpec(unit.name, tensors, unit.layer, unit.expert or 0)
    try:
        plan_unit(pipeline.model_copy(update={"preprocess": ()}), ideal, model, targets)
    except Unsupported as later:
        return [p for p in later.problems if p not in said]
    return ()


def _preprocessed(stage: Preprocessor, unit: UnitSpec) -> Sequence[UnitSpec]:
    with blame(stage, unit.name):
        units = tuple([planned(stage, made, UnitSpec, unit.name) for made in stage.plan(unit)])
        for made in units:
            if made is not unit:
                planned_tensors(stage, made.tensors.values(), unit.name)
        return units


def _plan_result(pipeline: Pipeline, quantizer: Quantizer | None, unit: UnitSpec) -> Result:
    layout = pipeline.layout
    if quantizer is not None and layout is not None:
        with blame(layout, unit.name):
            demand = planned(layout, layout.demand(unit), Demand, unit.name)
        with blame(quantizer, unit.name):
            quant = planned(quantizer, quantizer.plan(unit, demand), QuantSpec, unit.name)
        with blame(layout, unit.name):
            packed = planned(layout, layout.plan(quant), PackedSpec, unit.name)
            planned_tensors(layout, packed.tensors, unit.name)
            return Result(unit, quantizer, quant, packed, layout.fused(quantizer, quant) is not None)
    renamed = {}
    for role, tensor in unit.tensors.items():
        name: str | None = tensor.name
        if layout is not None:
            with blame(layout, tensor.name):
                name = layout.passthrough(tensor)
        if name is not None:
            renamed[role] = tensor._replace(name=name)
            if name is not tensor.name and layout is not None:
                planned_tensors(layout, [renamed[role]], tensor.name)
    return Result(unit, renamed=renamed)
