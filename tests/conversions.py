"""Small conversions that are made over and over, and what a loader makes of their outputs."""

import hashlib
import os
from unittest import mock

import checkpoints
import numpy as np
from ktforge_plugins import Int4, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter
from safetensors import SafetensorError, safe_open

from ktforge import Pipeline
from ktforge.disk import writing
from ktforge.output import sink


def tree(folder):
    """Relative path → hash of every file."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def loader_accepts(folder):
    """Whether a loader that walks a folder for *.safetensors, as kt-kernel's does, finds weights and no fault."""
    found = [os.path.join(root, f) for root, _, names in os.walk(folder) for f in names if f.endswith(".safetensors")]
    try:
        for path in found:
            with safe_open(path, "numpy") as opened:
                opened.keys()
    except SafetensorError:
        return False
    return bool(found)


def pipeline(source, writer):
    return Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=Int4(),
        layout=KtAmx(threadpool_count=1), writer=writer,
    )  # fmt: skip


def convert(source, out, disk, *, workers=1, save_every=0.0, shard="200KB", writer=SafetensorsWriter, **options):
    """Converts to INT4 on ``disk``, noting every tensor at once, and returns the calls that were made to it."""
    with mock.patch.object(writing, "os", disk), mock.patch.object(sink, "SAVE_EVERY", save_every):
        pipeline(source, writer(path=out, max_shard_size=shard)).run(workers=workers, **options)
    return disk.calls


def model(folder, layers, experts, size, hidden, shards=2):
    """A checkpoint of experts and a norm, with two side files, one of them in a folder."""
    random = np.random.default_rng(0)
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    data = {
        checkpoints.expert_name(layer, expert, p): random.standard_normal(shape, np.float32).astype(checkpoints.BF16)
        for layer in range(layers) for expert in range(experts) for p, shape in shapes.items()
    }  # fmt: skip
    data["model.norm.weight"] = np.ones(hidden, checkpoints.BF16)
    sizes = {"hidden_size": hidden, "moe_intermediate_size": size}
    config = checkpoints.config(num_experts=experts, num_hidden_layers=layers, **sizes)
    checkpoints.write(folder, data, config, shards)
    for name in checkpoints.SIDE_FILES.keys() - {"tokenizer.json", "extra/notes.md"}:
        (folder / name).unlink()
    return folder
