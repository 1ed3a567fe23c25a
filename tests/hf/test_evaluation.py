"""What an evaluation says is what transformers' own logits of either checkpoint say."""

import json
import math
import subprocess
import sys

import checkpoints
import numpy as np
import pytest
import torch
from hf.conftest import dequantised, plain, save_tokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from ktforge import CheckpointError, ConfigError, hf
from ktforge.cli import app
from ktforge.hf import damage
from ktforge.hf import heads as heads_module
from ktforge.hf.scores import Tally
from ktforge.hf.text import TOKENIZERS, sample_text, sequences

TEXT = "".join(chr(ord("!") + n) for n in np.random.default_rng(5).integers(0, 62, 200))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def logprobs(model, ids):
    with torch.inference_mode():
        return torch.log_softmax(model(ids).logits.double(), -1)[:, :-1].flatten(0, 1)


def test_figures_are_those_of_plain_models(original, converted, tmp_path, text):
    names = ["kt-amx int4", "rawint4"]
    found = hf.evaluate(original, [converted[n] for n in names], texts=[text], tokens=160, context=32)
    ids = sequences(AutoTokenizer.from_pretrained(original), TEXT, 160, 32)
    assert found.tokens == 160 and ids.shape == (5, 32)
    right, targets = logprobs(plain(original), ids), ids[:, 1:].flatten()
    losses = -right.gather(1, targets[:, None])
    assert found.perplexity.value == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    for name, score in zip(names, found.scores, strict=True):
        other = logprobs(plain(dequantised(converted[name], tmp_path / name)), ids)
        losses = -other.gather(1, targets[:, None])[:, 0]
        assert score.perplexity.value == pytest.approx(math.exp(losses.mean()), rel=1e-4)
        error = math.exp(losses.mean()) * losses.std() / math.sqrt(len(losses))
        assert score.perplexity.error == pytest.approx(float(error), rel=0.01)
        divergence = (right.exp() * (right - other)).sum(1)
        assert score.divergence.value == pytest.approx(float(divergence.mean()), rel=1e-3)
        assert score.divergence.error == pytest.approx(float(divergence.std()) / math.sqrt(len(divergence)), rel=0.01)
        assert score.divergence_99.value == pytest.approx(np.quantile(divergence, 0.99, method="higher"), rel=0.2)
        agreed = (right.argmax(1) == other.argmax(1)).double()
        assert score.agreement.value == pytest.approx(float(agreed.mean()))


def test_passes_and_blocks_change_nothing(original, converted, text, monkeypatch):
    options = dict(texts=[text], tokens=160, context=32)
    whole = hf.evaluate(original, [converted["rawint4"]], **options)
    monkeypatch.setattr(heads_module, "BLOCK", 1)
    steps = []
    parts = hf.evaluate(
        original, [converted["rawint4"]], memory_limit=1, progress=lambda *done: steps.append(done), **options
    )
    assert steps == [(n + 1, 15) for n in range(15)]  # two layers and the head, five times
    for one, other in zip(vars(whole.scores[0]).values(), vars(parts.scores[0]).values(), strict=True):
        if not isinstance(one, str):
            assert other == pytest.approx(one, rel=1e-3)
    assert parts.layers[1].figures[0] == pytest.approx(whole.layers[1].figures[0], rel=1e-4)


def test_an_original_beside_itself(original, converted, text):
    (score,) = hf.evaluate(original, [converted["bf16"]], texts=[text], tokens=64, context=32).scores
    assert score.divergence == (0, 0) and score.agreement == (1, 0)


def test_the_error_of_a_layer_is_that_of_hooks(original, converted, tmp_path, text, monkeypatch):
    monkeypatch.setattr(damage, "MOST", 40)  # of 64: every token that counts is one that the hooks see, too
    found = hf.evaluate(original, [converted["kt-amx int4"]], texts=[text], tokens=64, context=32)
    right, other = plain(original), plain(dequantised(converted["kt-amx int4"], tmp_path / "back"))
    ids = sequences(AutoTokenizer.from_pretrained(original), TEXT, 64, 32)
    these = torch.linspace(0, 63, 40).long()
    for number, layer in enumerate(right.model.layers):
        seen = {}
        layer.mlp.experts.register_forward_hook(lambda m, given, out, seen=seen: seen.update(given=given, out=out))
        layer.register_forward_hook(lambda m, given, out, seen=seen: seen.update(stream=out))
        with torch.inference_mode():
            right(ids)
            made = other.model.layers[number].mlp.experts(*seen["given"])
        stream = seen["stream"].flatten(0, 1).square().sum(1)[these]
        ratio = ((made - seen["out"]).square().sum(1)[these] / stream).double()
        assert found.layers[number].layer == number
        assert found.layers[number].figures[0].value == pytest.approx(float(ratio.mean()), rel=1e-4)


def test_layers_that_are_not_taken_stay_the_originals(original, converted, text):
    folder = converted["kt-amx int4"]
    options = dict(texts=[text], tokens=64, context=32)
    both, first, second = (
        hf.evaluate(original, [folder], layers=layers, **options).scores[0].divergence.value
        for layers in (None, [0], [1])
    )
    assert 0 < first < both and 0 < second < both
    found = hf.evaluate(original, [folder], keep=1, **options)
    ((kept, score),) = [(g.kept, g.score) for g in found.gains]
    assert kept == (found.worst(0, 1)[0].layer,)
    assert score.divergence.value == pytest.approx(second if kept == (0,) else first)


def test_a_quantile_and_its_ranks():
    tally = Tally()
    tally._columns["divergence"] = [torch.arange(1000.0).double()]
    value, error = tally.divergence_99
    assert value == pytest.approx(990, abs=1) and error == pytest.approx(math.sqrt(1000 * 0.99 * 0.01), abs=1)


def test_int8_activations(original, converted, text):
    options = dict(texts=[text], tokens=64, context=32)
    exact, integers = (
        hf.evaluate(original, [converted["kt-amx int8, two nodes"]], activations=a, **options).scores[0].divergence
        for a in ("exact", "int8")
    )
    assert 0 < exact.value < integers.value < 0.1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(converted=[]), "name at least one converted checkpoint"),
        (dict(layers=[7]), "layer 7 has no experts; those that have: 0-1"),
        (dict(layers=[]), "name at least one layer"),
        (dict(keep=2), "between 0 and 1 can be kept, not 2"),
        (dict(tokens=3), "is 16 at least"),
        (dict(texts=["/nowhere.txt"]), "the text /nowhere.txt cannot be read"),
    ],
)
def test_what_makes_no_sense(original, converted, text, options, why):
    with pytest.raises(ConfigError, match=why):
        hf.evaluate(original, **{"converted": [converted["bf16"]], "texts": [text], **options})


def test_texts_that_are_none(original, converted, tmp_path):
    (tmp_path / "short").write_text("ABC")
    (tmp_path / "binary").write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match="the text has 3 tokens"):
        hf.evaluate(original, [converted["bf16"]], texts=[tmp_path / "short"])
    with pytest.raises(ConfigError, match=r"binary is no text in UTF-8 \(byte 3\)"):
        hf.evaluate(original, [converted["bf16"]], texts=[tmp_path / "binary"])


def test_without_a_tokenizer(tmp_path, text):
    """transformers would make an empty one up."""
    folder = checkpoints.write(tmp_path / "bare", checkpoints.tensors(), checkpoints.config(), 1)
    for pattern in TOKENIZERS:
        for file in folder.glob(pattern):
            file.unlink()
    with pytest.raises(CheckpointError, match="bare has no tokenizer"):
        hf.evaluate(folder, [folder], texts=[text])


def test_a_tokenizer_that_is_broken(tmp_path, text):
    folder = checkpoints.write(tmp_path / "broken", checkpoints.tensors(), checkpoints.config(), 1)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"transformers cannot read the tokenizer in .*broken: "):
        hf.evaluate(folder, [folder], texts=[text])


def test_the_sample_is_a_text():
    assert len(sample_text()) > 100_000 and sample_text().isascii()


def test_sequences_begin_as_the_tokenizer_begins_texts(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert sequences(tokenizer, TEXT, None, 64).shape == (3, 64)

    class Beginning:
        bos_token_id = 60

        def __call__(self, text, add_special_tokens=True, verbose=True):
            ids = tokenizer(text).input_ids
            return type("Encoded", (), {"input_ids": [60, *ids] if add_special_tokens else ids})

    ids = sequences(Beginning(), TEXT, None, 64)
    assert ids.shape == (3, 64) and (ids[:, 0] == 60).all()
    assert ids[:, 1:].flatten().tolist() == tokenizer(TEXT).input_ids[: 3 * 63]


def test_the_command(original, converted, text):
    arguments = [
        "eval", "--original", str(original), "--converted", str(converted["kt-amx int4"]), "--text", str(text),
        "--tokens", "64", "--context", "32",
    ]  # fmt: skip
    said = CliRunner().invoke(app, [*arguments, "--keep", "1"])
    assert said.exit_code == 0, said.output
    assert "perplexity" in said.stdout and "layers that hurt most" in said.stdout and "kept" in said.stdout
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--layers", "0-1"]).stdout)
    assert data["tokens"] == 64 and data["scores"][0]["divergence"].keys() == {"value", "error"}
    for wrong in ("1-", "a", "3-1", "9999999"):
        assert CliRunner().invoke(app, [*arguments, "--layers", wrong]).exit_code == 2


def test_generate_says_what_the_model_says(original, converted):
    said = CliRunner().invoke(
        app, ["generate", "--model", str(converted["kt-amx int4"]), "--prompt", "ABC", "--tokens", "5"]
    )
    assert said.exit_code == 0, said.output
    tokenizer = AutoTokenizer.from_pretrained(original)
    model = hf.from_pretrained(converted["kt-amx int4"], dtype=torch.float32)
    wanted = model.generate(**tokenizer("ABC", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert said.stdout.strip() == tokenizer.decode(wanted[0, 3:], skip_special_tokens=True)


PROGRAM = """
import re, sys, torch, transformers
from pathlib import Path
from ktforge import hf
import ktforge.hf.evaluation
transformers.logging.set_verbosity_error()
# getrusage would begin with what the parent had at its fork.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
hf.evaluate(sys.argv[1], [sys.argv[1]], texts=[sys.argv[3]], tokens=32, context=16)  # what libraries take once
before = peak()
hf.evaluate(sys.argv[2], [sys.argv[2]], texts=[sys.argv[3]], tokens=32, context=16, workers=1)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_is_that_of_a_layer(tmp_path, original, text, monkeypatch):
    """500 MB of experts, of which three are in memory at a time, each 6 MB and twice that in float32."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 10, "num_hidden_layers": 8}
    for name, value in {"HIDDEN": 1024, "SIZE": 1024, "EXPERTS": 10, "LAYERS": 8}.items():
        monkeypatch.setattr(checkpoints, name, value)
    data = checkpoints.tensors()
    experts = sum(tensor.nbytes for name, tensor in data.items() if ".experts." in name)
    large = checkpoints.write(tmp_path / "large", data, checkpoints.config(**sizes), 4)
    save_tokenizer(large)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, original, large, text], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < experts / 2
