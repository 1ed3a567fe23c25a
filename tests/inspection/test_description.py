import json
import re

import checkpoints
import forms
import numpy as np
import pytest
from typer.testing import CliRunner

from ktforge import CheckpointError, KtforgeError, Registry
from ktforge.cli import app
from ktforge.disk.marks import PARTIAL
from ktforge.inspection.description import describe
from ktforge.inspection.look import DEQUANTIZE, TO_BF16, Look
from ktforge.inspection.suggest import starter
from ktforge.pipeline.file import build_pipeline
from ktforge.pipeline.presets import convert, dequantize_pipeline, to_bf16


def refused(seen):
    """The targets that cannot be made, but for dequantize."""
    return {target: reasons for target, reasons in seen.targets.items() if reasons and target != DEQUANTIZE}


@pytest.fixture(scope="module")
def registry():
    return Registry.installed()


def commands(registry):
    return [preset.command for preset in registry.presets()]


def test_a_bf16_checkpoint(source, registry):
    seen = describe(Look.at(source, registry))
    assert (seen.model_type, seen.layers, seen.moe_layers, seen.experts) == ("qwen3_moe", 2, (0, 1), 4)
    assert (seen.hidden_size, seen.expert_size, seen.fused) == (256, 512, False)
    assert seen.expert_storage == {"weight BF16": 24} and seen.other_storage == {"weight BF16": 21}
    data = checkpoints.tensors()
    assert seen.expert_bytes == sum(a.nbytes for n, a in data.items() if ".experts." in n)
    assert seen.expert_bytes + seen.other_bytes == sum(a.nbytes for a in data.values())
    assert seen.tensors == len(data) and len(seen.files) == 2 and seen.mtp_bytes == 0
    assert refused(seen) == {} and seen.problems == () and seen.usable
    assert seen.targets.keys() == {TO_BF16, *commands(registry), DEQUANTIZE}
    assert "holds no packed weights" in seen.targets[DEQUANTIZE][0]


def test_a_quantised_one_with_prediction_heads_and_copies(tmp_path, registry):
    folder = checkpoints.fp8_checkpoint(tmp_path, (128, 128))
    checkpoints.save_file({"mtp.norm.weight": np.ones(4, np.float32)}, folder / "mtp.safetensors")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x")
    seen = describe(Look.at(folder, registry))
    assert seen.expert_storage == {"weight F8_E4M3": 24, "weight_scale_inv F32": 24}
    assert seen.quantization == {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert seen.mtp_bytes == 16 and seen.not_read == ("original/consolidated.00.pth",)
    assert refused(seen) == {} and seen.problems == ()


def test_what_is_wrong_is_said_once(tmp_path, registry):
    data = checkpoints.tensors()
    for expert in (1, 2):
        name = checkpoints.expert_name(1, expert, "gate")
        data[name] = data[name].astype(np.float64)
    folder = checkpoints.write(tmp_path, data, checkpoints.config(num_experts=5))
    seen = describe(Look.at(folder, registry))
    assert refused(seen) == {} and not seen.usable
    stem = "model.layers.1.mlp.experts.1"
    assert seen.problems == (
        "layer 0: expert 4 missing; config.json announces 5",
        "layer 1: expert 4 missing; config.json announces 5",
        f"{stem} (and 1 more): gate is stored as F64, which moe-to-bf16 does not read; it knows BF16, FP16, FP32, fp8, "
        "fp4, compressed-tensors, gptq, awq: get a copy in one of them",
    )


def test_what_cannot_be_made_says_why(tmp_path, registry):
    data = checkpoints.fuse(checkpoints.tensors(), transposed=True, interleaved=True, biases=True)
    folder = checkpoints.write(tmp_path / "model", data, checkpoints.config(model_type="gpt_oss"))
    seen = describe(Look.at(folder, registry))
    assert seen.fused and seen.problems == () and seen.usable
    assert seen.targets["moe-to-bf16"] == ()
    (reason,) = seen.targets["convert --quant-method int8"]
    assert reason == (
        "model.layers.0.mlp.experts (and 1 more): kt-amx has no place for the biases of gate, up, down: "
        "`ktforge moe-to-bf16` keeps them"
    )


def answer(pipeline):
    """What a command would say about its pipeline."""
    try:
        return pipeline().plan(Registry.installed()).problems
    except KtforgeError as error:
        return error.problems


@pytest.mark.parametrize("name", forms.FORMS)
def test_the_answers_are_those_of_the_commands(tmp_path, registry, name):
    folder, out = forms.write(tmp_path / "model", name), tmp_path / "out"
    seen = describe(Look.at(folder, registry))
    answers = {
        TO_BF16: lambda: build_pipeline(to_bf16(folder, out), registry),
        DEQUANTIZE: lambda: dequantize_pipeline(folder, out, registry),
        **{p.command: lambda p=p: build_pipeline(convert(folder, out, p), registry) for p in registry.presets()},
        **{t: lambda t=t: build_pipeline(to_bf16(folder, out, t.split("use: ")[1].rstrip("}]")), registry)
           for t in seen.targets if t.startswith("preprocess: ")},
    }  # fmt: skip
    assert seen.targets.keys() == answers.keys()
    for target, reasons in seen.targets.items():
        said = answer(answers[target])
        assert set(said) == ({*reasons, *seen.problems} if target != DEQUANTIZE else set(reasons)), target
    assert seen.usable == (name not in forms.WRONG)


def test_a_dense_model_says_what_can_be_made_of_it(tmp_path, registry):
    seen = describe(Look.at(forms.write(tmp_path, "dense fp8"), registry))
    assert [t for t, reasons in seen.targets.items() if not reasons] == [
        "preprocess: [{use: fp8}]",
        "convert --quant-method rawint4",
        "convert --quant-method int8 --layout compressed-tensors",
        "convert --quant-method int4 --layout compressed-tensors",
    ]
    for target in (TO_BF16, "convert --quant-method int4"):
        assert seen.targets[target][0].startswith(
            "this is a dense model (model_type qwen2; config.json names no experts)"
        )
    assert seen.expert_storage == {} and seen.other_storage.keys() >= {"weight F8_E4M3", "weight_scale_inv F32"}


@pytest.mark.parametrize(
    ("name", "packed", "nodes", "known"),
    [
        ("kt-amx", "kt-amx-int4/1", 2, True),
        ("kt-amx of others", "kt-amx-int8/1", 4, False),
        ("kt files", "kt-amx-int8/1", 1, True),
        ("kt files of others", "kt-amx-int4/1", 2, False),
        ("rawint4", "compressed-tensors-pack-quantized-int4/1", None, True),
        ("rawint4 of others", None, None, False),
        ("int-quantized", "compressed-tensors-int-quantized-int8/1", None, True),
        ("dense", "compressed-tensors-pack-quantized-int4/1", None, True),
    ],
)
def test_outputs_are_called_by_their_names(tmp_path, registry, name, packed, nodes, known):
    folder = forms.OUTPUTS[name](tmp_path)
    seen = describe(Look.at(folder, registry))
    assert (seen.packed, seen.numa_nodes, seen.problems) == (packed, nodes, ())
    assert seen.made_from == (str(tmp_path / "source") if known else None)
    assert (seen.targets[DEQUANTIZE] == ()) == (packed is not None)
    stored = sum(p.stat().st_size for p in folder.rglob("*.kt")) + sum(
        a.nbytes for a in checkpoints.load_output(folder).values()
    )
    assert seen.expert_bytes + seen.other_bytes == stored
    if "kt" not in name:
        assert refused(seen).keys() <= {TO_BF16, "convert --quant-method int4", "convert --quant-method int8"}
        return
    assert seen.experts == 4 and seen.moe_layers == (0, 1) and seen.expert_storage == {packed: 8}
    made = f", made from {tmp_path / 'source'}" if known else ""
    plural = "" if nodes == 1 else "s"
    sentence = (
        f"{folder} is packed already ({packed} for {nodes} NUMA node{plural}{made}): convert the original, or make "
        "BF16 of this with `ktforge dequantize` first"
    )
    assert refused(seen) == dict.fromkeys([TO_BF16, *commands(registry)], (sentence,))
    assert answer(lambda: build_pipeline(to_bf16(folder, tmp_path / "out"), registry)) == (sentence,)


def test_an_output_with_a_hole_says_so(tmp_path, registry):
    folder = forms.OUTPUTS["kt files"](tmp_path)
    for part in folder.glob("_layer_1/_numa_0/*_3_*.kt"):
        part.unlink()
    seen = describe(Look.at(folder, registry))
    assert seen.packed == "kt-amx-int8/1" and not seen.usable
    assert seen.problems == ("layer 1: expert 3 missing; config.json announces 4",)


def test_an_unfinished_output_is_called_one(tmp_path, registry):
    folder = forms.OUTPUTS["kt-amx"](tmp_path)
    journal = {"journal": "ktforge-journal/1", "overwrite": True, "fingerprint": {"formats": ["kt-amx-int8/1"]}}
    (folder / PARTIAL).mkdir(exist_ok=True)
    (folder / PARTIAL / "journal.jsonl").write_text(json.dumps(journal) + "\n" + '{"written": {"a": "0"}}\n')
    assert describe(Look.at(folder, registry)).replacement == "kt-amx-int8/1; 1 tensor written"
    for path in (*folder.glob("*.safetensors"), folder / "config.json"):
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        describe(Look.at(folder, registry))
    assert caught.value.problems == (
        f"{folder} is an unfinished output of ktforge (kt-amx-int8/1; 1 tensor written): run the same command again, "
        "which goes on where it stopped, or with --restart, which begins anew",
    )


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_commands(source, tmp_path):
    shown = invoke("inspect", source)
    assert shown.exit_code == 0
    rows = dict(re.split("  +", line, maxsplit=1) for line in shown.stdout.splitlines())
    assert rows["model"] == "qwen3_moe, 2 layers, 2 with experts" and rows["experts"] == "4 of 512 x 256"
    assert rows["convert --quant-method rawint4"] == "yes" and rows[DEQUANTIZE].startswith("no: ")
    assert json.loads(invoke("inspect", source, "--json").stdout)["experts"] == 4
    made = invoke("init", source)
    assert made.exit_code == 0 and made.stdout == starter(source, Registry.installed())
    assert isinstance(invoke("inspect", tmp_path / "none").exception, CheckpointError)
    assert invoke("init", forms.OUTPUTS["kt-amx"](tmp_path)).exit_code == 1


def test_a_dense_model_has_no_rows_about_experts(tmp_path):
    shown = invoke("inspect", forms.write(tmp_path, "dense bf16"))
    rows = dict(re.split("  +", line, maxsplit=1) for line in shown.stdout.splitlines())
    assert shown.exit_code == 0 and rows["model"] == "qwen2, 2 layers, dense"
    assert rows["stored as"].startswith("weight BF16, bias BF16; ") and not {"experts", "the rest"} & rows.keys()
    assert "of it" not in rows and all(value.strip(" ;,") for value in rows.values())


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_wrong_is_the_exit_code_too(tmp_path, as_json):
    shown = invoke("inspect", forms.write(tmp_path, "broken"), *["--json"] * as_json)
    assert shown.exit_code == 1 and "F64, which moe-to-bf16 does not read" in shown.stdout
    if not as_json:
        assert "moe-to-bf16" in shown.stdout and "no: see wrong" in shown.stdout
