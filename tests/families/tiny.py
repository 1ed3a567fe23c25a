"""A tiny random model of every MoE family that the installed transformers has."""

import re
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

HIDDEN, SIZE, EXPERTS, LAYERS = 128, 256, 4, 2
#: Above so many weights a family has sizes of its own that are missing below.
MOST = 40_000_000
#: What makes a config small, whatever a family calls it.
SMALL = {
    **dict.fromkeys(["hidden_size", "d_model"], HIDDEN),
    **dict.fromkeys(
        ["intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size",
         "intermediate_size_mlp", "shared_expert_intermediate_size", "shared_intermediate_size",
         "moe_shared_expert_intermediate_size"], SIZE,
    ),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], EXPERTS),
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
#: A list with an entry for each layer is cut to its last ones.
BY_LAYER = ["layer_types", "mlp_layer_types"]
#: What a family wants beside that.
OWN = {
    "doge": {"is_moe": True},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True, "vocab_size_per_layer_input": 64, "num_experts": EXPERTS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"num_layers": 1, "zero_expert_num": 0},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
    "zaya": {"num_experts_per_tok": 1},
}
#: Multimodal wrappers of families that are there under the name of their text model, and three whose smallest model
#: transformers does not make from sizes alone.
LEFT_OUT = {
    "dots3_note", "gemma4", "llama4", "qwen3_5_moe", "qwen4_exp", "dbrx", "dots3_note_text", "qwen4_exp_text",
}  # fmt: skip


def families():
    """model_type → config class of all that have experts and generate text."""
    root = Path(transformers.__file__).parent / "models"
    found = {}
    for cls in MODEL_FOR_CAUSAL_LM_MAPPING:
        code = "".join(f.read_text() for f in (root / cls.__module__.split(".")[2]).glob("modeling_*.py"))
        if re.search(r"^class \w*(?:Experts|Mo[eE])\w*\(", code, re.M) and cls.model_type not in LEFT_OUT:
            found[cls.model_type] = cls
    return found


def tiny_model(model_type):
    """In BF16, every matrix of normal weights."""
    cls = families()[model_type]
    usual = cls()
    known = {*vars(usual), *getattr(usual, "attribute_map", {})}
    by_layer = {n: v[-LAYERS:] for n in BY_LAYER if n in vars(usual) and isinstance(v := getattr(usual, n), list)}
    config = cls(**{**{n: v for n, v in SMALL.items() if n in known}, **by_layer, **OWN.get(model_type, {})})
    with torch.device("meta"):
        weights = sum(p.numel() for p in MODEL_FOR_CAUSAL_LM_MAPPING[cls](config).parameters())
    assert weights < MOST, f"{model_type} has {weights:,} weights: make it smaller"
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[cls](config).to(torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.05)
    return model
