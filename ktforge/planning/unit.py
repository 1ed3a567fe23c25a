"""What becomes of one unit: the units that the preprocessors make of it, and the tensors that the output gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktforge.contract.checks import blame, expected, expected_quant, expected_tensors
from ktforge.contract.plan import ModelConfig, PlannedUnit, Recipe
from ktforge.contract.stages import Preprocessor, Quantizer, Result
from ktforge.contract.tensors import BF16, Demand, PackedSpec, TensorSpec, UnitSpec
from ktforge.errors import Problems, Unsupported
from ktforge.model.units import check_shapes, expert_shapes
from ktforge.planning import shares
from ktforge.planning.targets import Targets


def plan_unit(recipe: Recipe, source: UnitSpec, model: ModelConfig, targets: Targets) -> PlannedUnit:
    """What a bound pipeline will make of one unit. Raises Unsupported with every reason why it cannot."""
    steps: list[tuple[UnitSpec, ...]] = []
    units: tuple[UnitSpec, ...] = (source,)
    for stage in recipe.preprocess:
        units = tuple(made for unit in units for made in _preprocessed(stage, unit))
        steps.append(units)
    results = []
    for unit in units:
        if unit.fused and recipe.layout is not None:
            raise Unsupported("all experts of the layer are in one tensor: put split-experts first under preprocess")
        if unit.is_expert:
            wrong = list(check_shapes(unit, model))
            if wrong:
                raise Unsupported(*wrong)
        results.append(tuple(_plan_result(recipe, quantizer, piece) for quantizer, piece in targets.split(unit)))
    rows = shares.share_rows(recipe, source, steps, results)
    made = PlannedUnit(source, tuple(steps), tuple(results), rows, 0)
    return made._replace(working_bytes=shares.working_bytes(recipe, made))


def edited_config(
    recipe: Recipe, config: Mapping[str, Any], results: Sequence[Result], problems: Problems
) -> Mapping[str, Any]:
    """config.json as the stages of a bound pipeline leave it, once nothing speaks against the whole output. What the
    layout or a stage has against it is added to ``problems``."""
    if recipe.layout is not None:
        with blame(recipe.layout, "the output"):
            problems.extend(recipe.layout.check(results))
    for stage in recipe.stages() if not problems.lines() else ():
        try:
            with blame(stage, "config.json"):
                config = stage.edit_config(config, results)
        except Unsupported as refusal:
            problems.extend(refusal.problems)
    return config


def later_refusals(recipe: Recipe, unit: UnitSpec, model: ModelConfig, targets: Targets) -> Sequence[str]:
    """What speaks against an expert behind the preprocessors, of which one refuses it: it would come out next time.

    That depends on the sizes of config.json alone, so an expert in BF16 stands for what they would have made.
    """
    if recipe.layout is None or not (unit.is_expert or unit.fused):
        return ()
    units: tuple[UnitSpec, ...] = (unit,)
    try:
        for stage in recipe.preprocess:
            units = tuple(made for one in units for made in _preprocessed(stage, one))
        return ()
    except Unsupported as refusal:
        said = refusal.problems
    tensors = {f"{p}.weight": TensorSpec(f"{unit.name}.{p}.weight", BF16, s) for p, s in expert_shapes(model).items()}
    ideal = UnitSpec(unit.name, tensors, unit.layer, unit.expert or 0)
    try:
        plan_unit(recipe.model_copy(update={"preprocess": ()}), ideal, model, targets)
    except Unsupported as later:
        return [p for p in later.problems if p not in said]
    return ()


def _preprocessed(stage: Preprocessor, unit: UnitSpec) -> Sequence[UnitSpec]:
    with blame(stage, unit.name):
        units = tuple([expected(stage, made, UnitSpec, unit.name) for made in stage.plan(unit)])
        for made in units:
            if made is not unit:
                expected_tensors(stage, made.tensors.values(), unit.name)
        return units


def _plan_result(recipe: Recipe, quantizer: Quantizer | None, unit: UnitSpec) -> Result:
    layout = recipe.layout
    if quantizer is not None and layout is not None:
        with blame(layout, unit.name):
            demand = expected(layout, layout.demand(unit), Demand, unit.name)
        with blame(quantizer, unit.name):
            quant = expected_quant(quantizer, quantizer.plan(unit, demand), unit.name)
        with blame(layout, unit.name):
            packed = expected(layout, layout.plan(quant), PackedSpec, unit.name)
            expected_tensors(layout, packed.tensors, unit.name)
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
                expected_tensors(layout, [renamed[role]], tensor.name)
    return Result(unit, renamed=renamed)
