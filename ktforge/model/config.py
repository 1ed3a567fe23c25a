"""What config.json says about a model's experts and about how its weights are quantised, wherever and under whichever
of the names in use it says it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ktforge.contract.plan import ModelConfig
from ktforge.errors import CheckpointError

#: Names in use, from the config classes of transformers 5 and the model repositories themselves.
EXPERT_COUNT = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "moe_num_primary_experts")
#: The last is the experts' where all layers are of experts.
EXPERT_SIZE = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
HIDDEN_SIZE = ("hidden_size", "d_model")
LAYER_COUNT = ("num_hidden_layers", "num_layers")
#: Where multimodal wrappers keep the language model's part, one inside the other too (Qwen3-Omni).
NESTED = ("thinker_config", "text_config", "language_config", "llm_config")
#: Fields that say which layers have experts; see :func:`_is_moe_layer`.
LAYER_RULES = (
    "mlp_layer_types", "layers_block_type", "hybrid_override_pattern", "moe_layers", "moe_layers_enum",
    "moe_layer_freq", "moe_layer_frequency",
    "first_k_dense_replace", "moe_layer_start_index", "moe_layer_end_index", "num_dense_layers", "mlp_only_layers",
    "expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval",
)  # fmt: skip
#: Fields with an entry for each layer, which count them where no number does.
BY_LAYER = ("layers_block_type", "layer_types", "mlp_layer_types")
#: No model has a million of anything counted here; a larger number is a broken file.
LIMIT = 1_000_000
#: The same for experts of a layer and for layers: 100 times what the largest models have.
COUNT_LIMIT = 50_000
#: Fields that list layers.
LISTS = ("mlp_only_layers", "moe_layers")


def levels(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """config.json and what wrappers keep inside it, the language model's own part last."""
    yield config
    for key in NESTED:
        if isinstance(inner := config.get(key), Mapping):
            yield from levels(inner)


def edit_levels(config: Mapping[str, Any], edit: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """``config`` with each of its :func:`levels` as ``edit`` makes it."""
    edited = edit(config)
    return {k: edit_levels(v, edit) if k in NESTED and isinstance(v, Mapping) else v for k, v in edited.items()}


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What all levels say, the inner ones first; fields that are null say nothing.

    A list of equal numbers is that number, as Hunyuan writes one a layer; a list with an entry for each layer counts
    them where nothing else does, as in Nemotron-H.
    """
    fields: dict[str, Any] = {}
    for level in levels(config):
        fields.update({k: v for k, v in level.items() if v is not None})
    for key in (*EXPERT_COUNT, *EXPERT_SIZE):
        value = fields.get(key)
        if isinstance(value, list) and value and all(type(n) is int and n == value[0] for n in value):
            fields[key] = value[0]
    lists = [fields[key] for key in BY_LAYER if isinstance(fields.get(key), list)]
    if lists and not any(name in fields for name in LAYER_COUNT):
        fields[LAYER_COUNT[0]] = len(lists[0])
    return fields


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a parsed config.json. Raises CheckpointError with every field that is missing or makes no sense."""
    fields = fields_of(config)
    for key in LISTS:
        if isinstance(fields.get(key), list):  # looked up once a layer, so a long list must not be searched each time
            fields[key] = frozenset(n for n in fields[key] if isinstance(n, int))
    problems: list[str] = []

    def number(names: tuple[str, ...], required: bool, agree: bool = False, limit: int = LIMIT) -> int:
        found = {n: fields[n] for n in names if fields.get(n) is not None}
        for name, value in found.items():
            sizes = isinstance(value, list) and len(set(map(str, value))) > 1
            if names == EXPERT_SIZE and sizes:  # ERNIE 4.5 VL: those for text, those for pictures
                problems.append(
                    f"config.json: {name} is {_short(value)}: a model with experts of more than one size cannot be "
                    "converted"
                )
                return 0
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
                problems.append(f"config.json: {name} is {_short(value)}; it must be a whole number up to {limit:,}")
                return 0
        if agree and len(set(found.values())) > 1:
            problems.append(
                "config.json: " + " but ".join(f"{n} is {v}" for n, v in found.items()) + ": remove the wrong one"
            )
        if not found and required:
            problems.append(
                f"config.json has no {names[0]}, nor one of its other names ({', '.join(names[1:])}), and the tensors "
                f'do not tell: add "{names[0]}" to config.json'
            )
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

    ``mlp_layer_types`` (GLM-5, DeepSeek-V4), ``moe_layers`` (Llama 4) and ``moe_layers_enum`` (Step 3.5, "4,5,6") list
    them; ``moe_layer_freq`` as a list (MiMo) too, and ``layers_block_type`` or the letters E of
    ``hybrid_override_pattern`` (Nemotron-H).
    Otherwise ``first_k_dense_replace`` and ``moe_layer_freq`` (DeepSeek, GLM-4.5), ``mlp_only_layers`` and
    ``decoder_sparse_step`` (Qwen), ``interleave_moe_layer_step`` (Llama 4), ``moe_layer_start_index``,
    ``moe_layer_end_index`` and ``moe_layer_interval`` (ERNIE 4.5), ``num_dense_layers`` (LFM2),
    ``expert_layer_period`` and ``expert_layer_offset`` (Jamba).
    """

    def count(name: str, default: int) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    types, listed = fields.get("mlp_layer_types"), fields.get("moe_layers")
    freq = fields.get("moe_layer_freq", fields.get("moe_layer_frequency"))
    if isinstance(types, list):
        return layer < len(types) and types[layer] != "dense"  # "sparse", "hash_moe" (DeepSeek-V4)
    blocks = fields.get("layers_block_type")
    if isinstance(blocks, list) and "moe" in blocks:
        return layer < len(blocks) and blocks[layer] == "moe"
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "E" in pattern:
        return pattern[layer : layer + 1] == "E"
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
    if layer % max(1, freq if type(freq) is int else 1):
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
    """quantization_config (or compression_config), at the top or inside; empty if there is none."""
    for level in levels(config):
        for key in KEYS:
            if isinstance(level.get(key), Mapping):
                return level[key]
    return {}


def without_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json for a checkpoint whose weights are all plain."""
    gone = (*KEYS, "expert_dtype", "amx_quantization")
    return edit_levels(config, lambda level: {k: v for k, v in level.items() if k not in gone})
