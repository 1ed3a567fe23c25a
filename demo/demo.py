"""A conversion from beginning to end: makes a small FP8 checkpoint, plans, converts, checks and shows what came out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from ktforge_plugins import SafetensorsWriter
from safetensors import safe_open

from ktforge import Pipeline
from ktforge.testing import MemoryLoader

HERE = Path(__file__).parent / "out"
SOURCE, OUTPUT = HERE / "tiny-moe-fp8", HERE / "tiny-moe-int4"
LAYERS, EXPERTS, SIZE, HIDDEN, BLOCK, PARTS = 2, 8, 768, 1024, 128, 2


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    print(
        f"A Qwen3-MoE with {EXPERTS} experts in each of {LAYERS} layers, FP8 in blocks of {BLOCK} x {BLOCK}:",
        flush=True,
    )
    weights = make_checkpoint()
    show(SOURCE)

    pipeline = HERE / "pipeline.yaml"
    pipeline.write_text(
        f"loader:     {{use: auto, path: {SOURCE}}}\n"
        "preprocess: [{use: moe-to-bf16}]\n"
        "quantize:   {use: int4}\n"
        f"layout:     {{use: kt-amx, threadpool_count: {PARTS}}}\n"
        f"writer:     {{use: safetensors, path: {OUTPUT}, max_shard_size: 5MB}}\n"
        "runtime:    {cpuinfer_threads: 60}\n"
    )
    print(f"\n{pipeline.relative_to(HERE.parent)}:")
    print(pipeline.read_text())
    for command in ("plan", "run"):
        print(f"$ ktforge {command} pipeline.yaml", flush=True)
        subprocess.run([sys.executable, "-m", "ktforge", command, str(pipeline)], check=True)
        print()
    show(OUTPUT)
    check(weights)
    print("\n$ ktforge verify tiny-moe-int4", flush=True)
    subprocess.run([sys.executable, "-m", "ktforge", "verify", str(OUTPUT)], check=True)
    print("\n$ ktforge compare tiny-moe-fp8 tiny-moe-int4", flush=True)
    subprocess.run([sys.executable, "-m", "ktforge", "compare", str(SOURCE), str(OUTPUT)], check=True)


def make_checkpoint() -> dict[tuple[int, int, str], np.ndarray]:
    """Writes the checkpoint; returns the experts' weights in float32 by layer, expert and projection."""
    random = np.random.default_rng(0)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "moe_intermediate_size": SIZE, "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    }  # fmt: skip
    weights, tensors = {}, {"model.embed_tokens.weight": np.zeros((256, HIDDEN), ml_dtypes.bfloat16)}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection in ("gate", "up", "down"):
                shape = (HIDDEN, SIZE) if projection == "down" else (SIZE, HIDDEN)
                scale = (random.random((shape[0] // BLOCK, shape[1] // BLOCK), np.float32) + 0.5) * np.float32(4e-4)
                fp8 = (random.standard_normal(shape, np.float32) * 60).astype(ml_dtypes.float8_e4m3fn)
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                tensors[name], tensors[f"{name}_scale_inv"] = fp8, scale
                weights[layer, expert, projection] = fp8.astype(np.float32) * scale.repeat(BLOCK, 0).repeat(BLOCK, 1)
    Pipeline(loader=MemoryLoader(tensors=tensors, model=config), writer=SafetensorsWriter(path=SOURCE)).run()
    return weights


def check(weights: dict[tuple[int, int, str], np.ndarray]) -> None:
    """Undoes the packing with NumPy and compares every expert with what went in."""
    index = json.loads((OUTPUT / "model.safetensors.index.json").read_text())
    shards = {f: safe_open(OUTPUT / f, framework="numpy") for f in set(index["weight_map"].values())}
    errors: dict[str, list[float]] = {}
    for (layer, expert, projection), weight in weights.items():
        shares = np.split(weight, PARTS, axis=1 if projection == "down" else 0)
        for part, share in enumerate(shares):
            stem = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{part}"
            packed, scale = (
                shards[index["weight_map"][f"{stem}.{kind}"]].get_tensor(f"{stem}.{kind}")
                for kind in ("weight", "scale")
            )
            restored = unpack(packed, *share.shape) * 16 * scale[:, None]
            errors.setdefault(projection, []).append(float(np.linalg.norm(restored - share) / np.linalg.norm(share)))
    print("\nUnpacked again and compared with the FP8 weights, relative error (RMS):")
    for projection, found in errors.items():
        print(f"  {projection:<5} mean {np.mean(found):.4f}  worst {max(found):.4f}")
        assert max(found) < 0.25, "more than rounding to 4 bits explains; weights in the wrong place would give 1.4"
    print(f"All {LAYERS * EXPERTS} experts are there, whole and in place. Written to {OUTPUT}.")


def unpack(packed: np.ndarray, n: int, k: int) -> np.ndarray:
    """Codes -7 … 7 as float32 [n, k] from the AMX INT4 layout."""
    codes = np.empty((n, k), np.float32)
    tiles = iter(packed.view(np.uint32).reshape(-1, 16, 16))
    for row0 in range(0, n, 128):
        for col0 in range(0, k, 3584):
            for row in range(row0, min(n, row0 + 128), 32):
                for col in range(col0, min(k, col0 + 3584), 128):
                    for half in (row, row + 16):
                        tile = np.ascontiguousarray(next(tiles).T).view(np.int8)
                        codes[half : half + 16, col : col + 64] = (tile << 4).astype(np.int8) >> 4
                        codes[half : half + 16, col + 64 : col + 128] = tile >> 4
    return codes


def show(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        print(f"  {path.relative_to(HERE.parent)}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
