"""Units of one kind are planned once: a model has tens of thousands of experts that differ in their numbers alone.

Where all stages agree (``Stage.plan_key``), a unit is planned with numbers that stand for any, and
its plan becomes that of every unit of its kind by putting the layer's and the expert's own numbers in their place.
That is done column by column, a column being what lies in one place of all these plans: one by one takes twice as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import and_, eq, itemgetter, not_
from typing import TypeVar

from ktforge.contract.checks import blame
from ktforge.contract.plan import ModelConfig, PlannedUnit, Recipe
from ktforge.contract.stages import Loader, PlanKey, Result, Stage, alike
from ktforge.contract.tensors import PackedSpec, QuantSpec, TensorSpec, UnitSpec, named_tuples
from ktforge.errors import PluginError, Unsupported
from ktforge.planning.targets import Targets
from ktforge.planning.unit import plan_unit

#: Layer and expert of a plan that serves many: larger than names have (architectures.py reads six digits).
LAYER, EXPERT = 900_000_001, 900_000_002
_LAYER, _EXPERT = str(LAYER), str(EXPERT)
#: Where fewer than one of so many units is like the first, their names are looked at one by one.
FEW = 8

T = TypeVar("T")


def plan_units(
    recipe: Recipe, units: Sequence[UnitSpec], model: ModelConfig, targets: Targets
) -> list[PlannedUnit | Unsupported]:
    """What :func:`~ktforge.planning.unit.plan_unit` makes of each unit with a bound recipe, or every reason why not."""
    planner = _Planner(recipe, model, targets)
    planned: dict[int, PlannedUnit | Unsupported] = {}
    for places in _kinds(units, planner.key):
        planned.update(zip(places, planner.plan([units[place] for place in places]), strict=True))
    return [planned[place] for place in range(len(units))]


def _kinds(units: Sequence[UnitSpec], key: Callable[[UnitSpec], Hashable]) -> Iterator[Sequence[int]]:
    """The places of units of equal keys that differ in the numbers of layer and expert alone, kind by kind; those of
    the key None one by one."""
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, unit in enumerate(units):
        found[key(unit)].append(place)
    yield from ([place] for place in found.pop(None, ()))
    for rest in found.values():
        worth = True  # looking at all that are left, for those that are like the first
        while rest and worth:
            like = _like_first([units[place] for place in rest])
            kind = list(compress(rest, like))
            yield kind
            worth = len(kind) * FEW >= len(rest)
            rest = list(compress(rest, map(not_, like)))
        kinds: defaultdict[Hashable, list[int]] = defaultdict(list)
        for place in rest:
            numberless = _numberless(units[place])
            stored = numberless and [(*t[:3], _memory_offset(t)) for t in numberless.tensors.values()]
            kinds[place if numberless is None else (numberless.name, *(stored or ()))].append(place)
        yield from kinds.values()


def _like_first(units: Sequence[UnitSpec]) -> Sequence[bool]:
    """Whether each of ``units``, which have the same roles, is the first one with other numbers."""
    first = _numberless(units[0])
    if first is None:
        return [True, *[False] * (len(units) - 1)]
    numbers = _Numbers(units)
    like = map(eq, numbers.into(first.name), [unit.name for unit in units])
    for role, tensor in first.tensors.items():
        wanted = zip(numbers.into(tensor.name), repeat(tensor.dtype), repeat(tensor.shape), strict=False)
        tensors = [unit.tensors[role] for unit in units]
        like = map(and_, like, map(eq, wanted, map(itemgetter(0, 1, 2), tensors)))
        like = map(and_, like, map(eq, repeat(_memory_offset(tensor)), map(_memory_offset, tensors)))
    return [True, *list(like)[1:]]


def _memory_offset(tensor: TensorSpec) -> int | None:
    """Where a tensor lies that is in no file, which a plan does not tell from a number; None for one that is."""
    return tensor.offset if tensor.file is None else None


class _Planner:
    def __init__(self, recipe: Recipe, model: ModelConfig, targets: Targets) -> None:
        self._recipe, self._model, self._targets = recipe, model, targets
        quantizers = (recipe.quantize, *(r.quantizer for r in recipe.rules))
        stages = (recipe.loader, *recipe.preprocess, *quantizers, recipe.layout)
        self._keys = plan_keys(s for s in stages if s is not None)

    def key(self, unit: UnitSpec) -> Hashable:
        """Equal for units that one plan may serve, by all but names and shapes; None for one that is planned alone."""
        if unit.layer is None or self._keys is None:
            return None
        try:
            keys = [_called(stage, key, unit) for stage, key in self._keys]
        except Unsupported:
            return None
        return unit.fused, unit.is_expert, *unit.tensors, *keys

    def alone(self, unit: UnitSpec) -> PlannedUnit | Unsupported:
        try:
            return plan_unit(self._recipe, unit, self._model, self._targets)
        except Unsupported as refusal:
            return Unsupported(*refusal.problems)  # a new one: a traceback holds all that its frames do

    def plan(self, units: Sequence[UnitSpec]) -> Iterable[PlannedUnit | Unsupported]:
        """The plans of units of one kind, that of the first one twice: as its kind's, and by itself.

        Where these differ, such as by a rule for its layer, or where a stage fails, each is planned by itself: then it
        fails on a unit that there is.
        """
        first, *rest = units
        alone = self.alone(first)
        made = self._by_kind(first, alone, rest) if rest and isinstance(alone, PlannedUnit) else None
        return [alone, *(map(self.alone, rest) if made is None else made)]

    def _by_kind(
        self, first: UnitSpec, alone: PlannedUnit, rest: Sequence[UnitSpec]
    ) -> Iterable[PlannedUnit | Unsupported] | None:
        """The plans of ``rest``, made of what is planned for the kind of ``first``; None if that is not ``alone``."""
        try:
            kind = _numberless(first)
            assert kind is not None, "only a unit with its numbers in its names has others of its kind"
            plan = plan_unit(self._recipe, kind, self._model, self._targets.fresh())
            if _Columns(plan, [first]).plans() != [alone]:
                return None
        except (Unsupported, PluginError, _Unclear):
            return None
        made = _Columns(plan, rest).plans()
        if not self._recipe.rules:
            return made
        chosen = self._chosen(alone)
        return [one if self._chosen(one) == chosen else self.alone(one.source) for one in made]

    def _chosen(self, planned: PlannedUnit) -> Hashable:
        """What the rules say of that which is quantised: the names are known behind the preprocessors only."""
        return tuple(self._targets.key(u) for u in (planned.steps[-1] if planned.steps else (planned.source,)))


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
    """Not the inherited one: a subclass may plan otherwise than the class that answers for it."""
    if isinstance(stage, Loader):
        asked = type(stage).rows, type(stage).scratch_bytes
        if asked == (Loader.rows, Loader.scratch_bytes):
            return alike
    if "plan_key" not in vars(type(stage)):
        return None
    with blame(stage, "the checkpoint"):
        return stage.plan_key()


def _called(stage: Stage, key: PlanKey, unit: UnitSpec) -> Hashable:
    with blame(stage, unit.name):
        value = key(unit)
        hash(value)
        return value


class _Unclear(Exception):
    """A plan that does not follow from its unit by exchanging numbers."""


class _Columns:
    """What ``plan``, for :data:`LAYER` and :data:`EXPERT`, is for each of ``sources``, units of its kind.

    Raises _Unclear if a stage planned anything that cannot be told apart into these numbers and the rest.
    """

    def __init__(self, plan: PlannedUnit, sources: Sequence[UnitSpec]) -> None:
        self._plan, self._sources = plan, sources
        self._numbers = _Numbers(sources)
        self._made: dict[int, Sequence[UnitSpec]] = {}

    def plans(self) -> Sequence[PlannedUnit]:
        plan = self._plan
        steps = self._rows([self._rows([self._units(unit) for unit in step]) for step in plan.steps])
        results = self._rows([self._rows([self._results(result) for result in row]) for row in plan.results])
        return named_tuples(PlannedUnit, self._sources, steps, results, *map(repeat, plan[3:]))

    def _rows(self, columns: Sequence[Iterable[T]]) -> Iterable[tuple[T, ...]]:
        return zip(*columns, strict=True) if columns else repeat((), len(self._sources))

    def _units(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        """Those that stand where ``unit`` does; the same ones where it stands again."""
        if id(unit) not in self._made:
            if type(unit) is not UnitSpec or unit.layer != LAYER:
                raise _Unclear
            self._made[id(unit)] = self._sources if unit == self._plan.source else self._new_units(unit)
        return self._made[id(unit)]

    def _new_units(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        layers = [source.layer for source in self._sources]
        experts = [source.expert for source in self._sources] if unit.expert == EXPERT else repeat(unit.expert)
        return named_tuples(
            UnitSpec, self._numbers.into(unit.name), self._by_role(unit.tensors), layers, experts, repeat(unit.fused)
        )

    def _by_role(self, tensors: Mapping[str, TensorSpec]) -> Iterable[dict[str, TensorSpec]]:
        rows = self._rows([self._tensors(tensor) for tensor in tensors.values()])
        return (dict(zip(tensors, row, strict=True)) for row in rows)

    def _tensors(self, tensor: TensorSpec) -> Sequence[TensorSpec]:
        """A tensor that is in a file is one of the source's, or made of one and lies where that does."""
        stored = self._plan.source.tensors
        for role, there in stored.items():
            if tensor == there:
                return [source.tensors[role] for source in self._sources]
        if tensor.file is None:
            return named_tuples(TensorSpec, self._numbers.into(tensor.name), *map(repeat, tensor[1:]))
        for role, there in stored.items():
            within = tensor.offset - there.offset
            if tensor.file == there.file and 0 <= within < max(1, there.nbytes):
                places = [source.tensors[role] for source in self._sources]
                offsets = [place.offset + within for place in places]
                names, files = self._numbers.into(tensor.name), [place.file for place in places]
                return named_tuples(TensorSpec, names, repeat(tensor.dtype), repeat(tensor.shape), files, offsets)
        raise _Unclear

    def _results(self, result: Result) -> Sequence[Result]:
        unit, quantizer, quant, packed, fused, renamed = result
        units = self._units(unit)
        if quantizer is None or quant is None or packed is None:
            made = self._by_role(renamed or {})
            return named_tuples(Result, units, *map(repeat, (None, None, None, False)), made)
        if (type(quant), type(packed)) != (QuantSpec, PackedSpec) or quant.unit != unit:
            raise _Unclear
        if any(t.file is not None for t in packed.tensors):
            raise _Unclear
        quants = named_tuples(QuantSpec, units, *map(repeat, quant[1:]))
        tensors = self._rows([self._tensors(tensor) for tensor in packed.tensors])
        stored = named_tuples(PackedSpec, tensors, repeat(packed.format))
        return named_tuples(Result, units, repeat(quantizer), quants, stored, repeat(fused), repeat(None))


class _Numbers:
    """Layer and expert of these units, to be put where :data:`LAYER` and :data:`EXPERT` stand."""

    def __init__(self, units: Sequence[UnitSpec]) -> None:
        self._layers = [str(unit.layer) for unit in units]
        self._experts = [str(unit.expert) for unit in units]

    def into(self, name: str) -> Iterable[str]:
        """``name`` with each unit's numbers: what is the same for all experts of a layer is made once."""
        pieces = {layer: name.replace(_LAYER, layer).split(_EXPERT) for layer in set(self._layers)}
        return map(str.join, self._experts, map(pieces.__getitem__, self._layers))


def _numberless(unit: UnitSpec) -> UnitSpec | None:
    """The unit as it stands for all of its kind; None if one of its names does not have its numbers."""
    own, tensors = _anonymous(f"{unit.name}.", unit), {}
    if own is None:
        return None
    for role, tensor in unit.tensors.items():
        name = _anonymous(tensor.name, unit)
        if name is None:
            return None
        tensors[role] = tensor._replace(name=name)
    return UnitSpec(own.removesuffix("."), tensors, LAYER, EXPERT if unit.is_expert else None, unit.fused)


def _anonymous(name: str, unit: UnitSpec) -> str | None:
    """The name with numbers that stand for any in the place of the unit's."""
    before, found, behind = name.partition(f".{unit.layer}.")
    if not found:
        return None
    if unit.expert is not None:
        between, found, behind = behind.partition(f".{unit.expert}.")
        behind = f"{between}.{EXPERT}.{behind}"
    return f"{before}.{LAYER}.{behind}" if found else None
