"""What config.json says about a model's experts and about how its weights are quantised, wherever and under whichever
of the names in use it says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktforge.contract.plan import ModelConfig
from ktforge.errors import CheckpointError

#: Names in use, from the config classes of transformers 5 and the model repositories themselves.
EXPERT_COUNT = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERT_SIZE = ("moe_intermediate_size", "intermediate_size")  # the second where all layers are of experts
HIDDEN_SIZE = ("hidden_size",)
LAYER_COUNT = ("num_hidden_layers",)
#: Where multimodal wrappers keep the language model's part.
NESTED = ("text_config", "language_config", "llm_config")
#: No model has a million of anything counted here; a larger number is a broken file.
LIMIT = 1_000_000
#: The same for experts of a layer and for layers: 100 times what the largest models have.
COUNT_LIMIT = 50_000
#: Fields that list layers.
LISTS = ("mlp_only_layers", "moe_layers")


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a parsed config.json. Raises CheckpointError with every field that is missing or makes no sense."""
    fields = dict(config)
    for key in NESTED:
        if isinstance(config.get(key), Mapping):
            fields.update({k: v for k, v in config[key].items() if v is not None})
    for key in LISTS:
        if isinstance(fields.get(key), list):  # looked up once a layer, so a long list must not be searched each time
            fields[key] = frozenset(n for n in fields[key] if isinstance(n, int))
    problems: list[str] = []

    def number(names: tuple[str, ...], required: bool, agree: bool = False, limit: int = LIMIT) -> int:
        found = {n: fields[n] for n in names if fields.get(n) is not None}
        for name, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
                problems.append(f"config.json: {name} is {_short(value)}; it must be a whole number up to {limit:,}")
                return 0
        if agree and len(set(found.values())) > 1:
            problems.append(
                "config.json: " + " but ".join(f"{n} is {v}" for n, v in found.items()) + ": remove the wrong one"
            )
        if not found and required:
            problems.append(f"config.json has no {' or '.join(names)}")
        return next(iter(found.values()), 0)

    experts = number(EXPERT_COUNT, required=False, agree=True, limit=COUNT_LIMIT)
    layers = number(LAYER_COUNT, required=True, limit=COUNT_LIMIT)
    hidden = number(HIDDEN_SIZE, required=True)
    expert_size = number(EXPERT_SIZE, required=experts > 0) if experts else 0
    moe_layers = frozenset(i for i in range(layers) if _is_moe_layer(i, fields)) if experts and not problems else ()
    if problems:
        raise CheckpointError(*problems)
    model_type = fields.get("model_type")
    return ModelConfig(
        model_type if isinstance(model_type, str) else "", layers, hidden, experts, expert_size, frozenset(moe_layers)
    )


def _is_moe_layer(layer: int, fields: Mapping[str, Any]) -> bool:
    """Whether a layer has experts, by the rules of the model classes in transformers.

    ``mlp_layer_types`` (GLM-5), ``moe_layers`` (Llama 4) and ``moe_layers_enum`` (Step 3.5, "4,5,6") list them;
    ``moe_layer_freq`` as a list (MiMo) too.
    Otherwise ``first_k_dense_replace`` and ``moe_layer_freq`` (DeepSeek, GLM-4.5), ``mlp_only_layers`` and
    ``decoder_sparse_step`` (Qwen), ``interleave_moe_layer_step`` (Llama 4), ``moe_layer_start_index``,
    ``moe_layer_end_index`` and ``moe_layer_interval`` (ERNIE 4.5), ``num_dense_layers`` (LFM2),
    ``expert_layer_period`` and ``expert_layer_offset`` (Jamba).
    """

    def count(name: str, default: int) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    types, listed, freq = (fields.get(n) for n in ("mlp_layer_types", "moe_layers", "moe_layer_freq"))
    if isinstance(types, list):
        return layer < len(types) and types[layer] == "sparse"
    if isinstance(listed, frozenset):
        return layer in listed
    numbers = fields.get("moe_layers_enum")
    if isinstance(numbers, str):
        return str(layer) in [n.strip() for n in numbers.split(",")]
    if isinstance(freq, list):
        return layer < len(freq) and bool(freq[layer])
    starts = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    if layer < max(count(name, 0) for name in starts):
        return False
    end = count("moe_layer_end_index", -1)
    if end >= 0 and layer > end:
        return False
    dense = fields.get("mlp_only_layers")
    if isinstance(dense, frozenset) and layer in dense:
        return False
    if layer % max(1, count("moe_layer_freq", 1)):
        return False
    if "expert_layer_period" in fields:
        return layer % max(1, count("expert_layer_period", 1)) == count("expert_layer_offset", 0)
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    return all((layer + 1) % max(1, count(name, 1)) == 0 for name in steps)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


#: Names in use: the second is what compressed-tensors used to write.
KEYS = ("quantization_config", "compression_config")


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config (or compression_config), at the top or in text_config; empty if there is none."""
    for level in (config, *(config.get(key) for key in NESTED)):
        if isinstance(level, Mapping):
            for key in KEYS:
                if isinstance(level.get(key), Mapping):
                    return level[key]
    return {}


def without_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json for a checkpoint whose weights are all plain."""
    gone = (*KEYS, "expert_dtype", "amx_quantization")
    edited = {k: v for k, v in config.items() if k not in gone}
    for key in NESTED:
        if isinstance(edited.get(key), Mapping):
            edited[key] = {k: v for k, v in edited[key].items() if k not in gone}
    return edited
