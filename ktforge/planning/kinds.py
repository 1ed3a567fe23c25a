"""Units of one kind are planned once: a model has tens of thousands of experts that differ in their numbers alone.

Where all stages agree (``Stage.plan_key``), the first unit of a kind is planned a second time, with a layer's and an
expert's number that stand for any. That plan becomes the one of every further unit by putting the unit's own numbers in
their place, wherever they stand. A plan of 13,000 experts takes a fifth of the time that way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from ktforge.contract.checks import blame
from ktforge.contract.plan import ModelConfig, PlannedUnit, Recipe
from ktforge.contract.stages import PlanKey, Result, Stage, alike, own_plan_key
from ktforge.contract.tensors import PackedSpec, QuantSpec, TensorSpec, UnitSpec
from ktforge.errors import PluginError, Unsupported
from ktforge.planning.targets import Targets
from ktforge.planning.unit import plan_unit

#: Layer and expert of a plan that serves many: larger than names have (model/architectures.py reads six digits).
LAYER, EXPERT = 900_000_001, 900_000_002
_LAYER, _EXPERT = str(LAYER), str(EXPERT)


def plan_units(
    recipe: Recipe, units: Iterable[UnitSpec], model: ModelConfig, targets: Targets
) -> Iterator[PlannedUnit | Unsupported]:
    """What :func:`~ktforge.planning.unit.plan_unit` makes of each unit with a bound recipe, or every reason why not."""
    planner = _Planner(recipe, model, targets)
    kinds: dict[Hashable, _Kind] = {}
    for unit in units:
        key = planner.key(unit)
        if key is None:
            yield planner.alone(unit)
        elif key not in kinds:
            kinds[key] = _Kind(planner, unit)
            yield kinds[key].first
        else:
            yield kinds[key].plan(unit)


class _Planner:
    """Plans units one by one, and tells their kinds apart."""

    def __init__(self, recipe: Recipe, model: ModelConfig, targets: Targets) -> None:
        self.recipe, self.model, self.targets = recipe, model, targets
        quantizers = (recipe.quantize, *(r.quantizer for r in recipe.rules))
        stages = (recipe.loader, *recipe.preprocess, *quantizers, recipe.layout)
        self._keys = plan_keys(s for s in stages if s is not None)

    def alone(self, unit: UnitSpec) -> PlannedUnit | Unsupported:
        try:
            return plan_unit(self.recipe, unit, self.model, self.targets)
        except Unsupported as refusal:
            return Unsupported(*refusal.problems)  # a new one: a traceback holds all that its frames do

    def key(self, unit: UnitSpec) -> Hashable:
        """Equal for units that one plan may serve; None for one that is planned alone."""
        if unit.layer is None or self._keys is None:
            return None
        names = _numberless_names(unit)
        if names is None:
            return None
        try:
            apart = [_called(stage, key, unit) for stage, key in self._keys]
        except Unsupported:
            return None
        # Where a tensor lies that is in no file, a plan does not tell from a number.
        stored = [(t.dtype, t.shape, t.offset if t.file is None else None) for t in unit.tensors.values()]
        return unit.fused, unit.is_expert, *unit.tensors, *names, *stored, *apart

    def chosen(self, planned: PlannedUnit) -> Hashable:
        """What the rules say of that which is quantised: the names are known behind the preprocessors only."""
        units = planned.steps[-1] if planned.steps else (planned.source,)
        return tuple(map(self.targets.key, units)) if self.recipe.rules else ()


class _Kind:
    """Units that one plan serves. ``first`` is the plan, or the refusal, of the first of them by itself."""

    def __init__(self, planner: _Planner, unit: UnitSpec) -> None:
        self.first = planner.alone(unit)
        self._planner, self._unit = planner, unit
        self._asked = False
        self._template: PlannedUnit | None = None

    def plan(self, unit: UnitSpec) -> PlannedUnit | Unsupported:
        """The plan of a further unit. Where the kind's own differs from the first unit's, such as by a rule for its
        layer, or where a stage fails, each is planned by itself: then it fails on a unit that there is."""
        if not self._asked:
            self._asked, self._template = True, self._made()
        if self._template is None or isinstance(self.first, Unsupported):
            return self._planner.alone(unit)
        made = _Stamp(self._template, unit).plan()
        same = self._planner.chosen(made) == self._planner.chosen(self.first)
        return made if same else self._planner.alone(unit)

    def _made(self) -> PlannedUnit | None:
        """The plan with the numbers that stand for any; None if it is not what the first unit's was made from."""
        if isinstance(self.first, Unsupported):
            return None
        planner = self._planner
        try:
            plan = plan_unit(planner.recipe, _numberless(self._unit), planner.model, planner.targets.fresh())
            return plan if _Stamp(plan, self._unit).plan() == self.first else None
        except (Unsupported, PluginError, _Unclear):
            return None


def plan_keys(stages: Iterable[Stage]) -> list[tuple[Stage, PlanKey]] | None:
    """Those of the stages that look at more than roles, dtypes and shapes; None if one wants to see every unit."""
    keys = [(stage, _plan_key(stage)) for stage in stages]
    if any(key is None for _, key in keys):
        return None
    return [(stage, key) for stage, key in keys if key is not None and key is not alike]


def told_apart(unit: UnitSpec, keys: Iterable[tuple[Stage, PlanKey]]) -> Hashable:
    """What :func:`plan_keys` say of a unit, refusals among it."""
    try:
        return tuple(_called(stage, key, unit) for stage, key in keys)
    except Unsupported as refusal:
        return tuple(map(unit.shorten, refusal.problems))


def _plan_key(stage: Stage) -> PlanKey | None:
    with blame(stage, "the checkpoint"):
        return own_plan_key(stage)


def _called(stage: Stage, key: PlanKey, unit: UnitSpec) -> Hashable:
    with blame(stage, unit.name):
        value = key(unit)
        hash(value)
        return value


class _Unclear(Exception):
    """A plan that does not follow from its unit by exchanging numbers."""


class _Stamp:
    """Puts the numbers of ``source`` where a kind's plan has :data:`LAYER` and :data:`EXPERT`.

    Raises _Unclear if a stage planned anything that cannot be told apart into these numbers and the rest.
    """

    def __init__(self, template: PlannedUnit, source: UnitSpec) -> None:
        self._template, self._source = template, source
        self._layer, self._expert = str(source.layer), str(source.expert)
        self._units: dict[int, UnitSpec] = {}

    def plan(self) -> PlannedUnit:
        template = self._template
        steps = tuple([tuple(map(self._unit, step)) for step in template.steps])
        results = tuple([tuple(map(self._result, results)) for results in template.results])
        return PlannedUnit(self._source, steps, results, template.share_rows, template.working_bytes)

    def _name(self, name: str) -> str:
        return name.replace(_LAYER, self._layer).replace(_EXPERT, self._expert)

    def _unit(self, unit: UnitSpec) -> UnitSpec:
        """The one that stands where ``unit`` does; the same one where that stands again."""
        if id(unit) not in self._units:
            if type(unit) is not UnitSpec or unit.layer != LAYER:
                raise _Unclear
            expert = self._source.expert if unit.expert == EXPERT else unit.expert
            self._units[id(unit)] = (
                self._source
                if unit == self._template.source
                else UnitSpec(
                    self._name(unit.name), self._tensors(unit.tensors), self._source.layer, expert, unit.fused
                )
            )
        return self._units[id(unit)]

    def _tensors(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        return {role: self._tensor(tensor) for role, tensor in tensors.items()}

    def _tensor(self, tensor: TensorSpec) -> TensorSpec:
        """A tensor that is in a file is one of the source's, or made of one and lies where that does."""
        if tensor.file is None:
            return TensorSpec(self._name(tensor.name), tensor.dtype, tensor.shape, None, tensor.offset)
        for role, there in self._template.source.tensors.items():
            if tensor == there:
                return self._source.tensors[role]
        for role, there in self._template.source.tensors.items():
            within = tensor.offset - there.offset
            if tensor.file == there.file and 0 <= within < max(1, there.nbytes):
                own = self._source.tensors[role]
                return TensorSpec(self._name(tensor.name), tensor.dtype, tensor.shape, own.file, own.offset + within)
        raise _Unclear

    def _result(self, result: Result) -> Result:
        unit, quant, packed = self._unit(result.unit), result.quant, result.packed
        if quant is None or packed is None:
            return Result(unit, renamed=self._tensors(result.renamed or {}))
        if (type(quant), type(packed)) != (QuantSpec, PackedSpec) or quant.unit != result.unit:
            raise _Unclear
        stored = PackedSpec(self._stored(packed.tensors), packed.format)
        return Result(unit, result.quantizer, quant._replace(unit=unit), stored, result.fused)

    def _stored(self, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Tensors of the output, which are in no file yet; exchanging the numbers of all names at once takes a third of
        the time."""
        names = self._name("\n".join([t.name for t in tensors])).split("\n")
        if len(names) != len(tensors) or any([t.file is not None for t in tensors]):
            raise _Unclear
        return tuple([TensorSpec(name, t.dtype, t.shape) for name, t in zip(names, tensors, strict=True)])


def _numberless(unit: UnitSpec) -> UnitSpec:
    """A unit that has others of its kind, as it stands for all of them."""
    names = _numberless_names(unit)
    assert names is not None
    own, *others = names
    tensors = {role: t._replace(name=name) for (role, t), name in zip(unit.tensors.items(), others, strict=True)}
    return UnitSpec(own, tensors, LAYER, EXPERT if unit.is_expert else None, unit.fused)


def _numberless_names(unit: UnitSpec) -> Sequence[str] | None:
    """The unit's name and those of its tensors as they stand for all of its kind; None if one of them does not have the
    unit's numbers."""
    stem = f"{unit.name}."
    own = _anonymous(stem, unit)
    if own is None:
        return None
    names = [own.removesuffix(".")]
    for tensor in unit.tensors.values():
        # Nearly all lie below their unit, whose numbers come first in their names, too.
        below = tensor.name.startswith(stem)
        numberless = own + tensor.name[len(stem) :] if below else _anonymous(tensor.name, unit)
        if numberless is None:
            return None
        names.append(numberless)
    return names


def _anonymous(name: str, unit: UnitSpec) -> str | None:
    """The name with numbers that stand for any in the place of the unit's."""
    before, found, behind = name.partition(f".{unit.layer}.")
    if not found:
        return None
    if unit.expert is not None:
        between, found, behind = behind.partition(f".{unit.expert}.")
        behind = f"{between}.{EXPERT}.{behind}"
    return f"{before}.{LAYER}.{behind}" if found else None
