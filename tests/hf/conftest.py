"""A small Qwen3-MoE, converted in every way, and transformers' own view of what each stands for."""

import json
import shutil

import checkpoints
import pytest
import torch
import transformers
from ktforge_plugins import (
    CompressedTensors,
    Int4,
    Int8,
    KtAmx,
    KtFolderWriter,
    MoeToBf16,
    SafetensorsLoader,
    SafetensorsWriter,
)
from tokenizers import Tokenizer, models, pre_tokenizers

from ktforge import Pipeline, Registry
from ktforge.pipeline.presets import dequantize_pipeline

LAYOUTS = {
    "kt-amx int4": (Int4(), KtAmx(threadpool_count=1)),
    "kt-amx int8, two nodes": (Int8(), KtAmx(threadpool_count=2)),
    "kt folder": (Int4(), KtAmx(threadpool_count=2)),
    "rawint4": (Int4(group_size=32, narrow_range=True), CompressedTensors()),
    "zero points": (Int4(group_size=32, symmetric=False), CompressedTensors()),
    "bf16": (None, None),
}
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def save_tokenizer(folder, vocabulary=checkpoints.VOCAB):
    """One token a letter, so that texts for tests are easily made."""
    letters = [chr(ord("!") + n) for n in range(vocabulary - 1)]
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate([*letters, "[UNK]"])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def convert(source, out, name):
    quantizer, layout = LAYOUTS[name]
    writer = KtFolderWriter if name == "kt folder" else SafetensorsWriter
    Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=quantizer, layout=layout,
        writer=writer(path=out),
    ).run()  # fmt: skip
    return out


def dequantised(folder, out):
    """An ordinary checkpoint of the same numbers; the folder itself if it is one."""
    if json.loads((folder / "ktforge_manifest.json").read_text())["pipeline"].get("layout") is None:
        return folder
    dequantize_pipeline(folder, out, Registry.installed()).run()
    return out


def plain(folder, **options):
    """What transformers alone makes of a folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", **options
    )


@pytest.fixture(scope="session")
def original(source, tmp_path_factory):
    """The checkpoint of the other tests with a tokenizer."""
    folder = tmp_path_factory.mktemp("hf") / "original"
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").unlink()
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def converted(original, tmp_path_factory):
    """name of LAYOUTS → folder."""
    folder = tmp_path_factory.mktemp("converted")
    return {name: convert(original, folder / name.replace(" ", "-").replace(",", ""), name) for name in LAYOUTS}


@pytest.fixture(scope="session")
def ids():
    return torch.randint(0, checkpoints.VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
