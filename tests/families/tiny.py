"""A tiny random model of every MoE family that the installed transformers has."""

import re
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

HIDDEN, SIZE, EXPERTS, LAYERS = 128, 256, 4, 2
#: Above so many weights a family has sizes of its own that are missing below.
MOST = 50_000_000
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: What makes a config small, whatever a family calls it.
SMALL = {
    **dict.fromkeys(["hidden_size", "d_model"], HIDDEN),
    **dict.fromkeys(
        ["intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size",
         "intermediate_size_mlp", "shared_expert_intermediate_size", "shared_intermediate_size",
         "moe_shared_expert_intermediate_size"], SIZE,
    ),
    **dict.fromkeys(COUNTS, EXPERTS),
    **dict.fromkeys(["num_hidden_layers", "num_layers"], LAYERS),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"], 2),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"], 1),
    "moe_layer_start_index": 0, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "qk_head_dim": 32, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_d_state": 8,
    "mamba_n_heads": 8, "mamba_d_head": 32, "sliding_window": 16, "vocab_size": 64,
    "unpadded_vocab_size": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: The same for a part of a multimodal model that has no experts.
BESIDE = {
    **dict.fromkeys(
        ["out_hidden_size", "embed_dim", "projection_dim", "output_dim", "text_hidden_size", "projector_input_dim",
         "projector_output_dim", "vision_output_dim"], HIDDEN,
    ),
    **dict.fromkeys(["depth", "layers", "num_layers"], LAYERS),
    **dict.fromkeys(["num_heads", "encoder_attention_heads"], 4), "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
#: A list with an entry for each layer is cut to its last ones.
BY_LAYER = ["layer_types", "mlp_layer_types"]
#: What a family, or a part of one, wants beside that.
OWN = {
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "doge": {"is_moe": True},
    "dots3_note_text": {"num_key_value_heads": 4},
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN, "num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [SIZE, 128],
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default", "mrope_section": [5, 5, 6]},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True, "vocab_size_per_layer_input": 64, "num_experts": EXPERTS},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5,
        },
    },
    "glm5_next_text": {
        "num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "qk_head_dim": 16, "index_kpool": 4,
    },
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 1, "zero_expert_num": 0},
    "mistral4": {"head_dim": 32, "num_key_value_heads": 2},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "muse_spark_text": {"moe_hidden_size": HIDDEN},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
#: Of dbrx transformers makes no model from sizes alone; Inkling's vision tower wants scipy; of Qwen3-Omni there is the
#: part that thinks. Parts of a family that is there as a whole are not families.
LEFT_OUT = {"dbrx", "inkling_mm_model", "qwen3_omni_moe", "dots3_note_text", "qwen4_exp_text"}
#: Config class → model class, the whole model where there is a text model of it, too.
CLASSES = {**dict(MODEL_FOR_CAUSAL_LM_MAPPING.items()), **dict(MODEL_FOR_MULTIMODAL_LM_MAPPING.items())}


@cache
def families():
    """model_type → config class of all that have experts and generate text, multimodal ones too."""
    root = Path(transformers.__file__).parent / "models"
    found = {}
    for cls in CLASSES:
        code = "".join(f.read_text() for f in (root / cls.__module__.split(".")[2]).glob("modeling_*.py"))
        if re.search(r"^class \w*(?:Experts|Mo[eE])\w*\(", code, re.M) and cls.model_type not in LEFT_OUT:
            found[cls.model_type] = cls
    return found


def tiny_config(cls):
    """``cls`` with small sizes, and so the parts of a multimodal one."""
    usual = cls()
    known = {*vars(usual), *getattr(usual, "attribute_map", {})}
    sizes = SMALL if known & {*COUNTS} else {**SMALL, **BESIDE}
    by_layer = {n: v[-LAYERS:] for n in BY_LAYER if n in vars(usual) and isinstance(v := getattr(usual, n), list)}
    parts = {n: p for n in cls.sub_configs if (p := getattr(usual, n, None)) is not None}
    made = {
        **{n: v for n, v in sizes.items() if n in known}, **by_layer,
        **{n: tiny_config(type(part)).to_dict() for n, part in parts.items()}, **OWN.get(cls.model_type, {}),
    }  # fmt: skip
    if (
        "qk_rope_head_dim" in known and "kv_lora_rank" in known
    ):  # latent attention: as many keys as heads, half of it turned
        made |= {"num_key_value_heads": made["num_attention_heads"], "head_dim": made["qk_rope_head_dim"]}
    return cls(**(made | OWN.get(cls.model_type, {})))


def tiny_model(model_type):
    """In BF16, every matrix of normal weights."""
    cls = families()[model_type]
    config = tiny_config(cls)
    with torch.device("meta"):
        weights = sum(p.numel() for p in CLASSES[cls](config).parameters())
    assert weights < MOST, f"{model_type} has {weights:,} weights: make it smaller"
    torch.manual_seed(0)
    model = CLASSES[cls](config).to(torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.05)
    return model
