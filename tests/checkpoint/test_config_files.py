"""config.json as it is in the wild, and what stands in its place."""

import json

import checkpoints
import pytest
from ktforge_plugins import AutoLoader, Int8, KtAmx, MoeToBf16, SafetensorsWriter

from ktforge import CheckpointError, Pipeline, Registry
from ktforge.checkpoint.folder import CheckpointFolder
from ktforge.checkpoint.params import from_params
from ktforge.model.config import read_model_config
from ktforge.pipeline.presets import dequantize_pipeline


@pytest.fixture
def folder(tmp_path):
    return checkpoints.write(tmp_path / "model", checkpoints.tensors(), checkpoints.config())


def test_infinity_and_nan_are_read_and_written_as_they_are(folder, out):
    text = json.dumps({**checkpoints.config(), "time_step_limit": [0.0, float("inf")], "odd": float("nan")}, indent=1)
    assert "Infinity" in text and "NaN" in text
    (folder / "config.json").write_text(text)
    Pipeline(loader=AutoLoader(path=folder), preprocess=[MoeToBf16()], writer=SafetensorsWriter(path=out)).run()
    assert (out / "config.json").read_text() == text


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_size_that_is_no_number_is_refused(folder, number):
    text = json.dumps(checkpoints.config()).replace('"hidden_size": 256', f'"hidden_size": {number}')
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_size is -?(nan|inf); it must be a whole number"):
        Pipeline(loader=AutoLoader(path=folder), preprocess=[MoeToBf16()], writer=SafetensorsWriter(path=folder)).plan()


def test_an_index_with_such_numbers_is_none(folder):
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": NaN}, "weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"index\.json is not JSON: NaN is no JSON number"):
        list(AutoLoader(path=folder).scan())


def test_the_names_of_params_json():
    params = {
        "dim": 4096, "n_layers": 4, "hidden_dim": 14336, "vocab_size": 32000,
        "moe": {"num_experts": 8, "num_experts_per_tok": 2, "expert_hidden_dim": 2048, "first_k_dense_replace": 1,
                "route_every_n": 1},
    }  # fmt: skip
    model = read_model_config(from_params(params))
    assert (model.layers, model.hidden, model.experts, model.expert_size) == (4, 4096, 8, 2048)
    assert model.moe_layers == {1, 2, 3}
    mixtral = read_model_config(
        from_params({"dim": 4096, "n_layers": 2, "hidden_dim": 14336, "moe": {"num_experts": 8}})
    )
    assert (mixtral.experts, mixtral.expert_size, mixtral.moe_layers) == (8, 14336, {0, 1})
    dense = read_model_config(from_params({"dim": 4096, "n_layers": 2, "hidden_dim": 14336}))
    assert dense.experts == 0


def test_mistrals_own_format_goes_there_and_back(tmp_path):
    words = {"gate": "w1", "up": "w3", "down": "w2"}
    data = {
        f"layers.{layer}.experts.{e}.{words[p]}.weight": checkpoints.tensors()[checkpoints.expert_name(layer, e, p)]
        for layer in range(checkpoints.LAYERS) for e in range(checkpoints.EXPERTS) for p in words
    }  # fmt: skip
    source = tmp_path / "source"
    source.mkdir()
    checkpoints.save_file(data, source / "consolidated.safetensors")
    moe = {"num_experts": checkpoints.EXPERTS, "expert_hidden_dim": checkpoints.SIZE, "num_experts_per_tok": 2}
    params = {"dim": checkpoints.HIDDEN, "n_layers": checkpoints.LAYERS, "hidden_dim": 1024, "moe": moe}
    (source / "params.json").write_text(json.dumps(params))
    Pipeline(
        loader=AutoLoader(path=source), preprocess=[MoeToBf16()], quantize=Int8(), layout=KtAmx(),
        writer=SafetensorsWriter(path=tmp_path / "packed"),
    ).run()  # fmt: skip
    assert (tmp_path / "packed/params.json").read_text() == (source / "params.json").read_text()
    dequantize_pipeline(tmp_path / "packed", tmp_path / "back", Registry.installed()).run()
    assert checkpoints.load_output(tmp_path / "back").keys() == data.keys()


def test_config_json_goes_before_params_json(folder):
    (folder / "params.json").write_text('{"dim": 1}')
    assert CheckpointFolder(folder).config() == checkpoints.config()
    (folder / "config.json").unlink()
    assert CheckpointFolder(folder).config() == {"hidden_size": 1}
    (folder / "params.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        CheckpointFolder(folder).config()


def test_what_config_json_says_of_quantisation_counts(folder):
    own, beside = {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "gptq", "bits": 4}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    assert CheckpointFolder(folder).config()["quantization_config"] == beside
    (folder / "config.json").write_text(json.dumps({**checkpoints.config(), "quantization_config": own}))
    assert CheckpointFolder(folder).config()["quantization_config"] == own
