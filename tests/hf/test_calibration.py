"""Statistics of a pass are those of forward hooks on the plain model."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import EXPERTS, LAYERS
from hf.conftest import plain
from hf.test_evaluation import TEXT
from transformers import AutoTokenizer
from typer.testing import CliRunner

from ktforge import ConfigError, hf
from ktforge.calibration import open_calibration
from ktforge.cli import app
from ktforge.hf.text import sequences


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def stated(folder, ids):
    """layer → (inputs [n, hidden], routed [n, top_k], tokens [experts], mean squares of gate and up, of down)."""
    model, found = plain(folder), {}
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts

        def look(module, given, out, number=number, experts=experts):
            hidden, index, _ = given
            tokens, first, second = np.zeros(EXPERTS, np.int64), [], []
            for expert in range(EXPERTS):
                x = hidden[(index == expert).any(1)]
                gate, up = (x @ experts.gate_up_proj[expert].T).chunk(2, -1)
                tokens[expert] = len(x)
                first.append(x.double().square().mean(0).numpy())
                second.append((torch.nn.functional.silu(gate) * up).double().square().mean(0).numpy())
            found[number] = hidden, index, tokens, np.stack(first), np.stack(second)

        experts.register_forward_hook(look)
    with torch.inference_mode():
        model(ids)
    return found


@pytest.mark.parametrize("memory", [1 << 30, 1])
def test_statistics_are_those_of_hooks(original, text, tmp_path, memory):
    out = tmp_path / "c.safetensors"
    made = hf.calibrate(original, [text], out, tokens=160, context=32, samples=40, memory_limit=memory)
    ids = sequences(AutoTokenizer.from_pretrained(original), TEXT, 160, 32)
    found, wanted = open_calibration(out), stated(original, ids)
    assert made.tokens == 160 and found.activation == "silu" and list(found.layers) == list(range(LAYERS))
    these = torch.linspace(0, 159, 40).long()
    for number, (hidden, index, tokens, gate_up, down) in wanted.items():
        layer = found.layers[number]
        assert np.array_equal(layer.tokens, tokens) and np.array_equal(made.routed[number], tokens)
        np.testing.assert_allclose(layer.gate_up, gate_up, rtol=1e-4)
        np.testing.assert_allclose(layer.down, down, rtol=1e-4)
        kept = hidden[these].numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_allclose(layer.inputs.astype(np.float32), kept, rtol=0.02, atol=1e-3)
        assert np.array_equal(np.sort(layer.routed), np.sort(index[these].numpy()))


def test_experts_that_are_seldom_asked_are_said(original, text, tmp_path):
    arguments = [
        "calibrate", "--original", str(original), "--text", str(text), "--output", str(tmp_path / "c.safetensors"),
        "--tokens", "16", "--context", "16",
    ]  # fmt: skip
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.output
    assert "few tokens" in said.stdout and "16 tokens" in said.stdout
    data = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert data["experts"] == EXPERTS * LAYERS and sum(data["routed"]["0"]) == 2 * 16
    assert data["never_routed"] + data["seldom_routed"] == EXPERTS * LAYERS


def test_what_makes_no_sense(original, text, tmp_path):
    with pytest.raises(ConfigError, match="name at least one text"):
        hf.calibrate(original, [], tmp_path / "c")
    with pytest.raises(ConfigError, match="between 0 and as many can be kept, not 99"):
        hf.calibrate(original, [text], tmp_path / "c", tokens=64, context=32, samples=99)
