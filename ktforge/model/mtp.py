"""Multi-token-prediction layers: kept whole or left out whole, and config.json says which."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ktforge.contract.plan import ModelConfig
from ktforge.contract.tensors import CARRIERS, PROJECTIONS, UnitSpec
from ktforge.model.architectures import NUMBER
from ktforge.model.config import COUNT_LIMIT, edit_levels, levels
from ktforge.model.names import canonical, of_mtp
from ktforge.model.units import ModelUnits, expert_list, missing_projections

#: Fields that count these layers: DeepSeek's, GLM's, Step's and MiMo's; Qwen's; MiniMax's; and that of transformers 5.
#: Readers take a missing one for the default of its family, which may be 1, so 0 must be said.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "n_mtp_layers")
#: Lists with an entry for every layer: those of transformers; Step's; MiMo's; MiniMax's; DeepSeek's.
PER_LAYER = frozenset(
    [
        "layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "layers_block_type", "layer_rope_theta",
        "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared", "use_rope_layers",
        "hybrid_layer_pattern", "moe_layer_freq", "attn_type_list", "compress_ratios",
    ]
)  # fmt: skip
#: An expert of such a layer, whatever the layer is called: all before, number, projection.
_EXPERT = re.compile(rf"(.*\.)experts\.({NUMBER})\.([a-z]\w*)\.\w+")
_WEIGHT = re.compile(rf"(?:model\.)?layers\.{NUMBER}\.(.+)\.(?:{'|'.join(CARRIERS)})")


def check_extra(units: ModelUnits, model: ModelConfig, config: Mapping[str, Any]) -> None:
    """Adds what is missing of multi-token-prediction layers to the problems, for when they are to be kept.

    A layer must have all experts, each whole, and what all the model's own layers with experts have; as many layers
    must be there as config.json counts, or none.
    """
    for problem in (*_experts_missing(units.extra, model), *_parts_missing(units, model, config)):
        units.problems.add(f"{problem}: get the rest, or leave these layers out with mtp: omit in a pipeline file")


def without_extra(config: Mapping[str, Any], model: ModelConfig) -> Mapping[str, Any]:
    """config.json for a checkpoint whose multi-token-prediction layers were left out: it counts none.

    The lists of :data:`PER_LAYER` lose the entries of the layers that are gone (Step 3.5 has such).
    """

    def edited(level: Mapping[str, Any]) -> dict[str, Any]:
        count = _count(level)
        whole = model.layers + count if count else None
        cut = {k: v[: model.layers] for k in PER_LAYER if isinstance(v := level.get(k), list) and len(v) == whole}
        return {**level} | cut | {k: 0 for k in COUNTS if k in level}

    return edit_levels(config, edited)


def _count(level: Mapping[str, Any]) -> int:
    """How many of these layers config.json speaks of; a number that no model has is none."""
    return max((n for k in COUNTS if type(n := level.get(k)) is int and n <= COUNT_LIMIT), default=0)


def _experts_missing(units: Iterable[UnitSpec], model: ModelConfig) -> Iterable[str]:
    """By names alone: a prefix of their own (``mtp.layers.0``) is none that an architecture file knows."""
    found: dict[str, dict[int, set[str]]] = {}
    for unit in units:
        if unit.fused:
            if missing_projections(tuple(unit.tensors), fused=True):
                yield f"{unit.name}, for multi-token prediction: has {' and '.join(unit.projections())} only"
            if unit.experts != model.experts:
                yield f"{unit.name}, for multi-token prediction: has {unit.experts} of {model.experts} experts"
        for tensor in unit.tensors.values():
            if match := _EXPERT.fullmatch(tensor.name):
                layer, expert, projection = match.groups()
                if "shared" not in layer:
                    found.setdefault(layer, {}).setdefault(int(expert), set()).add(projection)
    for layer, experts in found.items():
        gaps = sorted(set(range(model.experts)) - experts.keys())
        if gaps:
            yield f"{layer}experts, for multi-token prediction: {expert_list(gaps)} missing"
        every = set().union(*experts.values())
        halves = [e for e, projections in experts.items() if projections != every]
        for expert in halves[:1]:
            missing = " and no ".join(sorted(every - experts[expert]))
            more = f" (and {len(halves) - 1:,} more)" if halves[1:] else ""
            yield f"{layer}experts.{expert}{more}, for multi-token prediction: has no {missing}"
        if len(every) < len(PROJECTIONS):
            yield f"{layer}experts, for multi-token prediction: have {' and '.join(sorted(every))} only"


def _parts_missing(units: ModelUnits, model: ModelConfig, config: Mapping[str, Any]) -> Iterable[str]:
    """What layers from ``num_hidden_layers`` on lack of a whole layer, and which of them there should be."""
    beyond: dict[int, set[str]] = {}
    for unit in units.extra:
        if unit.layer is not None and unit.layer >= model.layers:
            beyond.setdefault(unit.layer, set()).update(_parts([unit]))
    if not beyond:
        return
    counted = max(map(_count, levels(config)))
    absent = sorted(set(range(model.layers, model.layers + counted)) - beyond.keys())
    if absent:
        yield (
            f"layer {', '.join(map(str, absent))}, for multi-token prediction: is missing, while layer "
            f"{', '.join(map(str, sorted(beyond)))} is there and config.json counts {counted}"
        )
    sparse = [u.layer for u in units.experts]
    of_layer: dict[int, set[str]] = {layer: set() for layer in sparse if layer is not None}
    for unit in units.others:
        if unit.layer in of_layer:
            of_layer[unit.layer].update(_parts([unit]))
    common = set.intersection(*of_layer.values()) if of_layer else set()
    with_experts = {u.layer for u in units.extra if u.is_expert or u.fused}
    for layer, parts in sorted(beyond.items()):
        routed = layer in with_experts
        missing = sorted(common - parts)
        if routed and missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
            yield f"layer {layer}, for multi-token prediction: has experts but no {shown}, as the model's own layers do"
        if not routed and any(re.search(r"(?:gate|router)\.weight$", p) and p in common for p in parts):
            yield f"layer {layer}, for multi-token prediction: has a router but no experts"


def _parts(units: Iterable[UnitSpec]) -> Iterable[str]:
    """Names within the layer, of weights whatever they are stored as; other tensors may come with a number format."""
    for unit in units:
        name = canonical(unit.name)
        if match := _WEIGHT.fullmatch(of_mtp(name) or name):
            yield f"{match[1]}.weight"
