"""Small checkpoints for tests, made on the spot."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
KEYS = Path(__file__).parent / "data" / "architecture-keys.txt"
#: Expert size and hidden size differ, so that a transposition shows.
LAYERS, EXPERTS, SIZE, HIDDEN, VOCAB = 2, 4, 512, 256, 64
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def config(**changes) -> dict:
    """config.json of a Qwen3-MoE that transformers can load."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": SIZE,
        "intermediate_size": 2 * SIZE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **changes,
    }


def expert_name(layer: int, expert: int, projection: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[projection]}.weight"


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """All tensors of that Qwen3-MoE, bf16."""
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape, np.float32) * 0.05).astype(BF16)

    made = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "lm_head.weight": weight(VOCAB, HIDDEN)}
    made["model.norm.weight"] = np.ones(HIDDEN, BF16)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name, shape in {"q": (256, HIDDEN), "k": (128, HIDDEN), "v": (128, HIDDEN), "o": (HIDDEN, 256)}.items():
            made[f"{stem}.self_attn.{name}_proj.weight"] = weight(*shape)
        for name, size in {
            "self_attn.q_norm": 64, "self_attn.k_norm": 64, "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
        }.items():  # fmt: skip
            made[f"{stem}.{name}.weight"] = np.ones(size, BF16)
        made[f"{stem}.mlp.gate.weight"] = weight(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for projection in PROJECTIONS:
                shape = (HIDDEN, SIZE) if projection == "down" else (SIZE, HIDDEN)
                made[expert_name(layer, expert, projection)] = weight(*shape)
    return made


#: dtypes that numpy does not have → the integer of the same size, torch's name.
_EXTENDED = {BF16: (np.int16, torch.bfloat16), F8: (np.uint8, torch.float8_e4m3fn)}


def as_torch(array: np.ndarray) -> torch.Tensor:
    integer, dtype = _EXTENDED.get(array.dtype, (array.dtype, None))
    tensor = torch.from_numpy(array.view(integer))
    return tensor.view(dtype) if dtype else tensor


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    for array_dtype, (integer, dtype) in _EXTENDED.items():
        if tensor.dtype == dtype:
            return tensor.view(getattr(torch, np.dtype(integer).name)).numpy().view(array_dtype)
    return tensor.numpy()


def save_file(data: dict[str, np.ndarray], path: Path) -> None:
    """One safetensors file, as torch writes it."""
    save_torch_file({name: as_torch(array) for name, array in data.items()}, path, metadata={"format": "pt"})


def write(folder: Path, data: dict[str, np.ndarray], model: dict, shards: int = 1, index: bool = True) -> Path:
    """Writes a safetensors checkpoint with a tokenizer and a few other files beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(data)
    files = ["model.safetensors"]
    if shards > 1:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {}
    for i, file in enumerate(files):
        part = {n: data[n] for n in names[i::shards]}
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    if shards > 1 and index:
        total = sum(a.nbytes for a in data.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(model, indent=2))
    for name, text in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


#: Files that must be carried over as they are.
SIDE_FILES = {
    "generation_config.json": '{"do_sample": true}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "modeling_custom.py": "x = 1\n",
    "vocab.txt": "a\nb\n",
    "extra/notes.md": "# notes\n",
}


def to_fp8(weight: np.ndarray, block: tuple[int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An FP8 weight and its block scales; the last blocks may be cut short."""
    random = np.random.default_rng(seed)
    shape = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    scale = (random.random(shape, np.float32) + 0.5) * np.float32(2e-3)
    return np.clip(weight.astype(np.float32) / spread(scale, block, weight.shape), -448, 448).astype(F8), scale


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One scale an element: block scales repeated over their blocks and cut to ``shape``."""
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


def fp8_checkpoint(folder: Path, block: tuple[int, int], attention: bool = False, **changes) -> Path:
    """The Qwen3-MoE with FP8 experts (and attention weights, if asked for)."""
    data = {}
    for i, (name, array) in enumerate(tensors().items()):
        if ".experts." in name or (attention and "_proj.weight" in name):
            data[name], data[name + "_scale_inv"] = to_fp8(array, block, i)
        else:
            data[name] = array
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    return write(folder, data, config(quantization_config=quantization, **changes))


def fuse(data: dict, *, stem="mlp.experts", transposed=False, interleaved=False, biases=False) -> dict:
    """The same model with the experts of each layer in two tensors."""

    def stacked(layer, projection):
        return np.stack([data[expert_name(layer, e, projection)] for e in range(EXPERTS)])

    fused = {n: a for n, a in data.items() if ".experts." not in n}
    for layer in range(LAYERS):
        gate, up, down = (stacked(layer, p) for p in PROJECTIONS)
        if interleaved:
            gate_up = np.stack([gate, up], axis=2).reshape(EXPERTS, 2 * SIZE, HIDDEN)
        else:
            gate_up = np.concatenate([gate, up], axis=1)
        name = f"model.layers.{layer}.{stem}"
        for projection, weight in {"gate_up_proj": gate_up, "down_proj": down}.items():
            weight = weight.swapaxes(1, 2) if transposed else weight
            fused[f"{name}.{projection}"] = np.ascontiguousarray(weight)
            if biases:
                fused[f"{name}.{projection}_bias"] = np.zeros(
                    (EXPERTS, 2 * SIZE if projection == "gate_up_proj" else HIDDEN), BF16
                )
    return fused


def architectures() -> dict[str, tuple[dict, dict[str, tuple[str, tuple[int, ...]]]]]:
    """Family → its config and tensor name → (safetensors dtype, shape), from data/architecture-keys.txt."""
    found: dict = {}
    for line in KEYS.read_text().splitlines():
        if line.startswith("## "):
            family = line.split()[1]
            found[family] = ({}, {})
        elif line.startswith("config: "):
            found[family][0].update({"num_experts": 0, "hidden_size": 256, **json.loads(line[8:])})
        elif match := re.fullmatch(r"(\S+)  (\w+) \[([\d, ]*)\](?:  L=\[([\d, ]+)\])?(?:  E=0\.\.(\d+))?", line):
            name, dtype, shape, layers, last = match.groups()
            for layer in (layers or "0").split(", "):
                for expert in range(int(last or 0) + 1):
                    key = name.replace("{L}", layer).replace("{E}", str(expert))
                    found[family][1][key] = (dtype, tuple(int(n) for n in shape.split(", ")))
    for model, _ in found.values():
        if "num_local_experts" in model or "n_routed_experts" in model:
            del model["num_experts"]
    return found


def load_output(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of an output's safetensors files."""
    merged: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged.update({name: as_numpy(tensor) for name, tensor in load_file(path).items()})
    return merged
