"""Whatever its sizes, a right output never complains: neither alone, nor beside its original."""

import tempfile
from pathlib import Path

import checkpoints
import forms
import judged
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import LAYOUTS

PROJECTIONS = ("gate", "up", "down")


@pytest.mark.parametrize("name", forms.OUTPUTS)
def test_the_outputs_of_every_form(tmp_path, name):
    assert judged.verify(forms.OUTPUTS[name](tmp_path)).problems == ()


def model(layers, experts, size, hidden, scale, seed):
    """Experts of random weights, some rows of zeros among them, and a norm."""
    random = np.random.default_rng(seed)
    data = {"model.norm.weight": np.ones(hidden, checkpoints.BF16)}
    for layer in range(layers):
        for expert in range(experts):
            for p in PROJECTIONS:
                weight = random.standard_normal((hidden, size) if p == "down" else (size, hidden), np.float32) * scale
                weight[random.random(len(weight)) < 0.1] = 0
                data[checkpoints.expert_name(layer, expert, p)] = weight.astype(checkpoints.BF16)
    sizes = {"hidden_size": hidden, "moe_intermediate_size": size}
    return data, checkpoints.config(num_experts=experts, num_hidden_layers=layers, **sizes)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    layers=st.integers(1, 3),
    experts=st.integers(1, 5),
    size=st.sampled_from([256, 512]),
    hidden=st.sampled_from([128, 256, 384]),
    scale=st.sampled_from([1e-6, 0.02, 1.0, 1e6]),
    shards=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_a_right_one_never_complains(name, layers, experts, size, hidden, scale, shards, seed):
    with tempfile.TemporaryDirectory() as folder:
        source = checkpoints.write(Path(folder) / "source", *model(layers, experts, size, hidden, scale, seed), shards)
        out = judged.convert(source, Path(folder) / "out", name)
        assert judged.verify(out).problems == ()
        assert judged.compare(source, out).problems == ()
