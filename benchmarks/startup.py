"""How long ``ktforge --help`` takes, and ``plan`` and ``inspect`` of 200 shards with 200 tensors each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rounds import Row, best

SHARDS, TENSORS = 200, 200
LAYERS, EXPERTS, SIZE, HIDDEN = 40, 333, 256, 128


def run(tmp: Path, rounds: int) -> list[Row]:
    source, pipeline = _headers(tmp / "headers"), tmp / "pipeline.yaml"
    stages = {
        "loader": {"use": "safetensors", "path": str(source)}, "preprocess": [{"use": "moe-to-bf16"}],
        "quantize": {"use": "int4"}, "layout": {"use": "kt-amx"},
        "writer": {"use": "safetensors", "path": str(tmp / "target")},
    }  # fmt: skip
    pipeline.write_text(json.dumps(stages))
    goals = {"--help": 0.3, "plan": 2.0, "inspect": 1.2}
    commands = {"--help": ["--help"], "plan": ["plan", str(pipeline)], "inspect": ["inspect", str(source)]}
    cases = {
        name: lambda arguments=arguments: subprocess.run(
            [sys.executable, "-m", "ktforge", *arguments], check=True, capture_output=True
        )
        for name, arguments in commands.items()
    }
    seconds, cpu = best(cases, rounds), best(cases, rounds, _cpu_of_children)
    shutil.rmtree(source)
    labels = {n: f"ktforge {n}{'' if n == '--help' else f', {SHARDS} shards × {TENSORS} tensors'}" for n in goals}
    return [
        Row(labels[n], f"{s:.2f} s ({cpu[n]:.2f} s of CPU time)", f"≤ {goals[n]} s", s <= goals[n])
        for n, s in seconds.items()
    ]


def _cpu_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _headers(folder: Path) -> Path:
    """A checkpoint whose files have holes instead of weights."""
    folder.mkdir()
    names = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", shape)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name, shape in {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}.items()
    ]
    names += [(f"model.other.{i}.weight", (HIDDEN,)) for i in range(SHARDS * TENSORS - len(names))]
    weight_map = {}
    for shard in range(SHARDS):
        header, offset = {}, 0
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        for name, shape in names[shard * TENSORS : (shard + 1) * TENSORS]:
            end = offset + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, end)}
            offset, weight_map[name] = end, file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + offset)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3_moe", "hidden_size": HIDDEN, "moe_intermediate_size": SIZE, "num_experts": EXPERTS,
        "num_hidden_layers": LAYERS,
    }))  # fmt: skip
    return folder
