"""Checkpoints of a chosen size for the benchmarks: a Qwen3-MoE in name, random weights in content."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {BF16: "BF16", F8: "F8_E4M3", np.dtype(np.float32): "F32"}
#: Expert size and hidden size of the large DeepSeek models: 88 MB of bf16 an expert.
SIZE, HIDDEN = 2048, 7168
PROJECTIONS = {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}
EXPERT_WEIGHTS = 3 * SIZE * HIDDEN
SHARD_BYTES = 10**9


def weights(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """bf16, normally distributed, of the size that trained weights have."""
    return (np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)).astype(BF16)


def to_fp8(weight: np.ndarray, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Block-scaled e4m3 of a weight whose sides are multiples of ``block``: its largest becomes 448, as is usual."""
    n, k = weight.shape
    blocks = weight.astype(np.float32).reshape(n // block, block, k // block, block)
    scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(448)
    return (blocks / scale[:, None, :, None]).reshape(n, k).astype(F8), scale


def checkpoint(folder: Path, nbytes: int) -> Path:
    """A bf16 checkpoint of about so many bytes, in shards of 1 GB; every expert has other weights."""
    experts = max(1, round(nbytes / (2 * EXPERT_WEIGHTS)))
    folder.mkdir(parents=True)
    pool = weights((1, EXPERT_WEIGHTS + 4096 * experts)).reshape(-1)
    tensors = []
    for expert in range(experts):
        at = 4096 * expert
        for name, shape in PROJECTIONS.items():
            tensors.append(
                (f"model.layers.0.mlp.experts.{expert}.{name}.weight", shape, pool[at : at + shape[0] * shape[1]])
            )
            at += shape[0] * shape[1]
    tensors.append(("model.embed_tokens.weight", (1024, HIDDEN), pool[: 1024 * HIDDEN]))
    per_shard = max(1, SHARD_BYTES // (2 * SIZE * HIDDEN))
    groups = [tensors[i : i + per_shard] for i in range(0, len(tensors), per_shard)]
    weight_map = {}
    for i, group in enumerate(groups, 1):
        path = folder / f"model-{i:05}-of-{len(groups):05}.safetensors"
        _write(path, group)
        weight_map.update({name: path.name for name, _, _ in group})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _write_config(folder, experts)
    return folder


def fp8_checkpoint(folder: Path, experts: int) -> Path:
    """A block-scaled FP8 checkpoint in one file; all experts have the same weights."""
    folder.mkdir(parents=True)
    made = {name: to_fp8(weights(shape)) for name, shape in PROJECTIONS.items()}
    tensors = []
    for expert in range(experts):
        for name, (codes, scale) in made.items():
            stem = f"model.layers.0.mlp.experts.{expert}.{name}.weight"
            tensors += [(stem, codes.shape, codes), (f"{stem}_scale_inv", scale.shape, scale)]
    _write(folder / "model.safetensors", tensors)
    _write_config(folder, experts, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return folder


def _write_config(folder: Path, experts: int, **more: object) -> None:
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "moe_intermediate_size": SIZE, "num_experts": experts, "num_hidden_layers": 1, **more,
    }))  # fmt: skip


def _write(path: Path, tensors: list[tuple[str, tuple[int, int], np.ndarray]]) -> None:
    header, offset = {}, 0
    for name, shape, data in tensors:
        header[name] = {"dtype": DTYPES[data.dtype], "shape": shape, "data_offsets": (offset, offset + data.nbytes)}
        offset += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors:
            out.write(data.reshape(-1).view(np.uint8).data)
