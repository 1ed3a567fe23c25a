"""Units of one kind are planned once: a model has tens of thousands of experts that differ in their numbers alone.

Where all stages agree (:meth:`ktforge.stages.Stage.plan_key`), a unit is planned with numbers that stand for any, and
its plan becomes that of every unit of its kind by putting the layer's and the expert's own numbers in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from ktforge.errors import PluginError, Unsupported
from ktforge.modelconfig import ModelConfig
from ktforge.pipeline import Pipeline
from ktforge.registry import blame
from ktforge.rules import Targets
from ktforge.stages import Loader, PlanKey, Stage, alike
from ktforge.tensors import PackedSpec, QuantSpec, TensorSpec, UnitSpec, named_tuple, tensor_spec
from ktforge.unitplan import PlannedUnit, Result, plan_unit

#: Layer and expert of a plan that serves many: larger than names have (architectures.py reads six digits).
LAYER, EXPERT = 900_000_001, 900_000_002
_LAYER, _EXPERT = str(LAYER), str(EXPERT)


class UnitPlanner:
    """Plans the units of a bound pipeline, to what :func:`~ktforge.unitplan.plan_unit` makes of each."""

    def __init__(self, pipeline: Pipeline, model: ModelConfig, targets: Targets) -> None:
        self._pipeline, self._model, self._targets = pipeline, model, targets
        quantizers = (pipeline.quantize, *(r.quantizer for r in pipeline.rules))
        stages = (pipeline.loader, *pipeline.preprocess, *quantizers, pipeline.layout)
        self._keys = plan_keys(s for s in stages if s is not None)
        self._stencils: dict[Hashable, tuple[Stencil | None, Hashable]] = {}

    def plan(self, unit: UnitSpec) -> PlannedUnit:
        """Raises Unsupported with every reason why the unit cannot be planned."""
        key = None if self._keys is None else self._key(unit, self._keys)
        if key is None:
            return self._alone(unit)
        found = self._stencils.get(key)
        if found is None:
            found = self._stencils[key] = self._stencil(unit)
        stencil, chosen = found
        if stencil is None:
            return self._alone(unit)
        planned = stencil.planned(unit)
        return planned if self._chosen(planned) == chosen else self._alone(unit)

    def _alone(self, unit: UnitSpec) -> PlannedUnit:
        return plan_unit(self._pipeline, unit, self._model, self._targets)

    def _chosen(self, planned: PlannedUnit) -> Hashable:
        """What the rules say of that which is quantised: the names are known behind the preprocessors only."""
        if not self._pipeline.rules:
            return ()
        return tuple(self._targets.key(u) for u in (planned.steps[-1] if planned.steps else (planned.source,)))

    def _key(self, unit: UnitSpec, plan_keys: Sequence[tuple[Stage, PlanKey]]) -> Hashable:
        """Equal for units that one plan serves; None for a unit that is planned alone."""
        if unit.layer is None:
            return None
        prefix, tensors = f"{unit.name}.", unit.tensors.values()
        around = _around(prefix, unit)
        rest = [t.name.removeprefix(prefix) if t.name.startswith(prefix) else _around(t.name, unit) for t in tensors]
        if around is None or None in rest:
            return None
        try:
            keys = [_called(stage, key, unit) for stage, key in plan_keys]
        except Unsupported:
            return None
        return around, unit.fused, *unit.tensors, *rest, *[t[1:3] for t in tensors], *keys

    def _stencil(self, unit: UnitSpec) -> tuple[Stencil | None, Hashable]:
        """With what the rules say of ``unit``. None where its own plan turns out to be another, such as by a rule for
        its layer, or where a stage fails: then it fails on a unit that there is."""
        try:
            plan = plan_unit(self._pipeline, _numberless(unit), self._model, self._targets.fresh())
            stencil = Stencil(plan)
        except (Unsupported, PluginError, _Unclear):
            return None, ()
        alone = self._alone(unit)
        return (stencil, self._chosen(alone)) if stencil.planned(unit) == alone else (None, ())


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


class Stencil:
    """The plan for :data:`LAYER` and :data:`EXPERT`, from which that of every unit of its kind is made.

    Raises _Unclear if a stage planned anything that cannot be told apart into these numbers and the rest.
    """

    def __init__(self, plan: PlannedUnit) -> None:
        self._plan = plan
        results = [r for rs in plan.results for r in rs]
        units = {id(u): u for u in [*(u for step in plan.steps for u in step), *(r.unit for r in results)]}
        self._same = {key for key, unit in units.items() if type(unit) is UnitSpec and unit == plan.source}
        self._steps = [list(map(id, step)) for step in plan.steps]
        self._units = [(key, self._unit_maker(unit)) for key, unit in units.items() if key not in self._same]
        self._results = [[self._result_maker(r) for r in rs] for rs in plan.results]

    def planned(self, source: UnitSpec) -> PlannedUnit:
        """The plan of ``source``, which is of the same kind."""
        layer, expert = str(source.layer), str(source.expert)
        units = dict.fromkeys(self._same, source)
        for key, make in self._units:
            units[key] = make(source, layer, expert)
        steps = tuple([tuple(map(units.__getitem__, step)) for step in self._steps])
        results = tuple([tuple([make(units, source, layer, expert) for make in row]) for row in self._results])
        return named_tuple(PlannedUnit, (source, steps, results, self._plan.share_rows, self._plan.working_bytes))

    def _unit_maker(self, unit: UnitSpec) -> Callable[[UnitSpec, str, str], UnitSpec]:
        if unit.layer != LAYER or type(unit) is not UnitSpec:
            raise _Unclear
        name, number, fused = unit.name, unit.expert, unit.fused
        tensors = [(role, self._tensor_maker(t)) for role, t in unit.tensors.items()]

        def make(source: UnitSpec, layer: str, expert: str) -> UnitSpec:
            made = {role: make_tensor(source, layer, expert) for role, make_tensor in tensors}
            mine = source.expert if number == EXPERT else number
            return UnitSpec(_numbered(name, layer, expert), made, source.layer, mine, fused)

        return make

    def _tensor_maker(self, tensor: TensorSpec) -> Callable[[UnitSpec, str, str], TensorSpec]:
        """A tensor that is in a file is one of the source's, or made of one and lies where that does."""
        name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
        if tensor.file is None:
            return lambda source, layer, expert: TensorSpec(_numbered(name, layer, expert), dtype, shape)
        for role, stored in self._plan.source.tensors.items():
            if tensor == stored:
                return partial(_stored, role)
        for role, stored in self._plan.source.tensors.items():
            within = tensor.offset - stored.offset
            if tensor.file == stored.file and 0 <= within < max(1, stored.nbytes):
                return partial(_made_of, role, within, tensor)
        raise _Unclear

    def _result_maker(self, result: Result) -> Callable[[Mapping[int, UnitSpec], UnitSpec, str, str], Result]:
        key, quantizer, quant, packed = id(result.unit), result.quantizer, result.quant, result.packed
        if quantizer is None or quant is None or packed is None:
            renamed = [(role, self._tensor_maker(t)) for role, t in (result.renamed or {}).items()]

            def rename(units: Mapping[int, UnitSpec], source: UnitSpec, layer: str, expert: str) -> Result:
                return Result(units[key], renamed={role: make(source, layer, expert) for role, make in renamed})

            return rename
        if (type(quant), type(packed)) != (QuantSpec, PackedSpec) or quant.unit != result.unit:
            raise _Unclear
        if any(t.file is not None for t in packed.tensors):
            raise _Unclear
        names = _Names([t.name for t in packed.tensors])
        stored = list(zip(*(t[1:] for t in packed.tensors), strict=True))
        rest, form, fused = quant[1:], packed.format, result.fused

        def pack(units: Mapping[int, UnitSpec], source: UnitSpec, layer: str, expert: str) -> Result:
            unit = units[key]
            tensors = tuple(map(tensor_spec, zip(names.of(layer, expert), *stored, strict=True)))
            mine, stored_as = named_tuple(QuantSpec, (unit, *rest)), named_tuple(PackedSpec, (tensors, form))
            return named_tuple(Result, (unit, quantizer, mine, stored_as, fused, None))

        return pack


class _Names:
    """The names of a plan's output tensors, which are most of what it takes to make one: what is the same for all
    experts of a layer is made once."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._pieces: dict[str, list[list[str]]] = {}

    def of(self, layer: str, expert: str) -> Iterator[str]:
        pieces = self._pieces.get(layer)
        if pieces is None:
            pieces = self._pieces[layer] = [n.replace(_LAYER, layer).split(_EXPERT) for n in self._names]
        return map(expert.join, pieces)


def _stored(role: str, source: UnitSpec, layer: str, expert: str) -> TensorSpec:
    return source.tensors[role]


def _made_of(role: str, within: int, tensor: TensorSpec, source: UnitSpec, layer: str, expert: str) -> TensorSpec:
    place = source.tensors[role]
    name = _numbered(tensor.name, layer, expert)
    return TensorSpec(name, tensor.dtype, tensor.shape, place.file, place.offset + within)


def _numbered(name: str, layer: str, expert: str) -> str:
    return name.replace(_LAYER, layer).replace(_EXPERT, expert)


def _around(name: str, unit: UnitSpec) -> tuple[str, ...] | None:
    """The name without the numbers: what comes before, between and behind them; None if they are not there."""
    before, found, behind = name.partition(f".{unit.layer}.")
    if not found:
        return None
    if unit.expert is None:
        return before, behind
    between, found, behind = behind.partition(f".{unit.expert}.")
    return (before, between, behind) if found else None


def _numberless(unit: UnitSpec) -> UnitSpec:
    """The unit as it stands for all of its kind."""

    def anonymous(name: str) -> str:
        before, *behind = _around(name, unit) or ()  # a unit without its numbers in every name has no key
        return f"{before}.{LAYER}." + f".{EXPERT}.".join(behind)

    tensors = {role: t._replace(name=anonymous(t.name)) for role, t in unit.tensors.items()}
    expert = None if unit.expert is None else EXPERT
    return UnitSpec(anonymous(f"{unit.name}.")[:-1], tensors, LAYER, expert, unit.fused)
