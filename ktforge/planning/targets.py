"""Which quantizer each weight gets, by the rules of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Hashable

from ktforge.contract.rules import Rule
from ktforge.contract.stages import Quantizer
from ktforge.contract.tensors import TensorSpec, UnitSpec
from ktforge.model.settle import ROUTER

#: Modules of a dense model that stay as they are unless a rule says otherwise.
_KEPT = re.compile(r"(^|\.)(lm_head|score|classifier|relative_attention_bias|[^.]*embed[^.]*|wte|wpe)\.weight$")


class Targets:
    """Chooses each weight's quantizer and remembers which rules matched anything."""

    def __init__(self, default: Quantizer | None, rules: tuple[Rule, ...], dense: bool) -> None:
        self._default, self._rules, self._dense = default, rules, dense
        self._unused = set(range(len(rules)))

    def split(self, unit: UnitSpec) -> list[tuple[Quantizer | None, UnitSpec]]:
        """The unit in as few pieces as have one quantizer each; None: the piece is kept."""
        chosen = self._chosen(unit)
        pieces: list[tuple[Quantizer | None, UnitSpec]] = []
        for quantizer in {id(q): q for q in chosen.values()}.values():  # an option may be a list, which has no hash
            roles = {r: t for r, t in unit.tensors.items() if chosen[r.rpartition(".")[0]] is quantizer}
            pieces.append((quantizer, unit if len(roles) == len(unit.tensors) else unit.with_tensors(roles)))
        return pieces

    def fresh(self) -> Targets:
        """The same rules, none of which has matched anything yet."""
        return Targets(self._default, self._rules, self._dense)

    def key(self, unit: UnitSpec) -> Hashable:
        """Equal for units of the same roles and shapes that :meth:`split` treats alike."""
        return tuple(map(id, self._chosen(unit).values())) if self._rules else ()

    def unused(self) -> list[str]:
        """The patterns of the rules that decided nothing, in their order."""
        return [rule.match for i, rule in enumerate(self._rules) if i in self._unused]

    def _chosen(self, unit: UnitSpec) -> dict[str, Quantizer | None]:
        """The quantizer of each projection."""
        chosen: dict[str, Quantizer | None] = {}
        for projection, parameters in unit.projections().items():
            weight = parameters.get("weight")
            chosen[projection] = self._choose(unit, weight) if weight is not None else self._unnamed(unit)
        return chosen

    def _choose(self, unit: UnitSpec, weight: TensorSpec) -> Quantizer | None:
        if len(weight.shape) != 2:
            return None
        if not unit.is_expert and ROUTER.search(weight.name):  # which expert it chooses must not hang on rounding
            return None
        for i, rule in enumerate(self._rules):
            if rule.matches(weight.name):
                self._unused.discard(i)
                return rule.quantizer
        if unit.is_expert:
            return self._default
        return self._default if self._dense and not _KEPT.search(weight.name) else None

    def _unnamed(self, unit: UnitSpec) -> Quantizer | None:
        """An expert in a form without a weight: the quantizer says why it cannot take it."""
        return self._default if unit.is_expert else None
