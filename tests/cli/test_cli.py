"""The command as a user meets it: output, exit codes, and never a traceback."""

import json
import os
import re
import subprocess
import sys

import checkpoints
import numpy as np
import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from ktforge import Registry
from ktforge.cli import app
from ktforge.text import size_text


def ktforge(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ktforge", *map(str, arguments)], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip


def refused(done, message):
    assert done.returncode == 1, done.stderr
    assert message in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr


@pytest.fixture
def pipeline(source, tmp_path):
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"loader: {{use: auto, path: {source}}}\npreprocess: [{{use: moe-to-bf16}}]\nquantize: {{use: int4}}\n"
        f"layout: {{use: kt-amx}}\nwriter: {{use: safetensors, path: {tmp_path}/out}}\n"
    )
    return path


def test_run(pipeline, out):
    done = ktforge("run", pipeline, "--set", "layout.threadpool_count=4")
    assert done.returncode == 0, done.stderr
    assert "8 experts" in done.stdout and "converting" in done.stderr
    assert "blk.0.ffn_up_exps.0.numa.3.weight" in checkpoints.load_output(out)
    refused(ktforge("run", pipeline), "is not empty: choose another folder, or say --overwrite")
    again = ktforge("run", pipeline, "--set", "layout.threadpool_count=4")
    assert again.returncode == 0 and "holds this output already, finished: nothing is to do" in again.stdout
    assert ktforge("run", pipeline, "--overwrite").returncode == 0


def test_dry_run_is_one_of_the_run_that_was_asked_for(pipeline, out):
    one, three = (ktforge("run", pipeline, "--dry-run", "--workers", n).stdout for n in (1, 3))
    assert "for 1 unit at once" in one and "for 3 units at once" in three
    refused(ktforge("run", pipeline, "--dry-run", "--memory-limit", "100KB"), "more than the memory limit of 100.00 kB")
    refused(ktforge("run", pipeline, "--dry-run", "--memory-limit", "much"), "--memory-limit: 'much' is not a size")
    assert not out.exists()


def test_a_new_plugin_takes_no_name_that_is_taken(tmp_path):
    refused(ktforge("new-plugin", "int4", "--output", tmp_path / "new"), "there is a quantize called 'int4' already")
    assert not (tmp_path / "new").exists()


def test_dry_run_writes_nothing(pipeline, out):
    done = ktforge("run", pipeline, "--dry-run")
    assert done.returncode == 0 and "compression" in done.stdout
    assert not out.exists()


def test_plan(pipeline, source, out):
    done = ktforge("plan", pipeline)
    assert done.returncode == 0
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert rows["model"].startswith("qwen3_moe, 4 experts in 2 layers")
    assert rows["units"].startswith("29, 8 of them experts")
    assert rows.keys() == {
        "model", "units", "source", "output", "compression", "peak memory", "writes to", "free disk", "loader",
        "preprocess", "quantize", "layout", "serve with",
    }  # fmt: skip
    assert rows["writes to"] == str(out) and " GB at " in rows["free disk"]
    assert rows["layout"] == "{use: kt-amx, threadpool_count: 2, non_experts: rename}"
    command = "python -m sglang.launch_server --model {} --kt-weight-path {} --kt-method AMXINT4 --kt-cpuinfer CORES"
    assert rows["serve with"] == f"{command.format(source, out)} --kt-threadpool-count 2"
    plan = json.loads(ktforge("plan", pipeline, "--json").stdout)
    assert plan["problems"] == [] and plan["output_bytes"] == sum(f["bytes"] for f in plan["files"])


def test_plan_shows_every_refusal(pipeline, source, out):
    done = ktforge("plan", pipeline, "--set", "layout.threadpool_count=3")
    refused(done, "counts that fit: 1, 2, 4")
    sizes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert f"source      {size_text(sizes)}\n" in done.stdout and f"writes to   {out}\n" in done.stdout
    done = ktforge("plan", pipeline, "--json", "--set", "layout.threadpool_count=3")
    assert done.returncode == 1 and len(json.loads(done.stdout)["problems"]) == 1
    assert done.stderr == "".join(f"error: {problem}\n" for problem in json.loads(done.stdout)["problems"])


def convert(source, out, *more):
    return ktforge("convert", "--input-path", source, "--output", out, "--quant-method", "int8", *more)


def test_convert(source, out):
    done = convert(source, out, "--input-type", "bf16", "--threadpool-count", "1", "--cpuinfer-threads", "60")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "ktforge_manifest.json").read_text())
    assert manifest["numa_nodes"] == 1 and manifest["cpuinfer_threads"] == 60
    assert manifest["formats"] == ["kt-amx-int8/1"]


def test_convert_without_merging(source, out):
    assert convert(source, out, "--no-merge-safetensor").returncode == 0
    assert len(list(out.glob("_layer_1/_numa_1/INT8_down_3_*Byte_quant_.kt"))) == 1


def test_print_pipeline_prints_what_would_run(source, out, tmp_path):
    done = convert(source, out, "--print-pipeline", "--threadpool-count", "4")
    assert done.returncode == 0 and not out.exists()
    printed = YAML(typ="safe").load(done.stdout)
    assert printed["layout"] == {"use": "kt-amx", "threadpool_count": 4, "non_experts": "rename"}
    assert convert(source, out, "--threadpool-count", "4").returncode == 0
    direct = checkpoints.load_output(out)
    (tmp_path / "p.yaml").write_text(done.stdout)
    assert ktforge("run", tmp_path / "p.yaml", "--overwrite").returncode == 0
    again = checkpoints.load_output(out)
    assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in direct.items()}


def test_rawint4_is_one_word_for_narrow_int4_in_groups_of_32(source, out):
    done = ktforge("convert", "--input-path", source, "--output", out, "--quant-method", "rawint4", "--print-pipeline")
    spelled = ["--quant-method", "int4", "--layout", "compressed-tensors", "--group-size", "32", "--print-pipeline"]
    full = ktforge("convert", "--input-path", source, "--output", out, *spelled)
    printed, others = YAML(typ="safe").load(done.stdout), YAML(typ="safe").load(full.stdout)
    assert printed["quantize"] == {
        "use": "int4", "group_size": 32, "symmetric": True, "narrow_range": True, "scales": "auto",
    }  # fmt: skip
    assert printed["layout"] == {"use": "compressed-tensors", "format": "pack-quantized"}
    assert others == {**printed, "quantize": {**printed["quantize"], "narrow_range": False}}


@pytest.mark.parametrize(
    "options",
    [["rawint4", "--group-size", "64"], ["rawint4", "--layout", "kt-amx"],
     ["int4", "--layout", "compressed-tensors", "--threadpool-count", "2"], ["int8", "--group-size", "32"],
     ["rawint4", "--no-merge-safetensor"]],
)  # fmt: skip
def test_options_that_contradict_each_other(source, out, options):
    done = ktforge("convert", "--input-path", source, "--output", out, "--quant-method", *options)
    assert done.returncode == 2 and "Invalid value" in done.stderr


def test_dequantize(source, tmp_path):
    packed, back = tmp_path / "packed", tmp_path / "back"
    assert convert(source, packed).returncode == 0
    done = ktforge("dequantize", "--input-path", packed, "--output", back)
    assert done.returncode == 0
    files = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    assert f", {size_text(files)} → " in done.stdout, "what is read, not what it is unpacked to"
    made, data = checkpoints.load_output(back), checkpoints.tensors()
    assert {n: a.shape for n, a in made.items()} == {n: a.shape for n, a in data.items()}
    refused(ktforge("dequantize", "--input-path", source, "--output", tmp_path / "x"), "holds no packed weights")


@pytest.mark.parametrize(("declared", "found"), [("fp8", "BF16"), ("fp16", "BF16")])
def test_a_wrong_input_type_is_refused(source, out, declared, found):
    refused(
        convert(source, out, "--input-type", declared), f"given as {declared}, but gate, up, down are {found}: say bf16"
    )
    assert not out.exists()


def test_moe_to_bf16(tmp_path, out):
    data = {n: a.astype(np.float16) if ".experts." in n else a for n, a in checkpoints.tensors().items()}
    source = checkpoints.write(tmp_path / "fp16", data, checkpoints.config())
    assert ktforge("moe-to-bf16", "--input-path", source, "--output", out).returncode == 0
    made = checkpoints.load_output(out)
    assert made.keys() == data.keys() and {a.dtype for a in made.values()} == {checkpoints.BF16}


def test_plugins_schema_isa():
    listed = [line.split()[:3] for line in ktforge("plugins").stdout.splitlines()[1:]]
    assert listed == [[e.cls.name, e.cls.stage, e.distribution] for e in Registry.installed().entries()]
    assert json.loads(ktforge("schema").stdout)["title"] == "ktforge pipeline"
    assert ktforge("isa", KTFORGE_ISA="scalar").stdout.splitlines()[0].split() == ["scalar", "in", "use"]


def test_a_forced_isa_that_is_not_there(source, out):
    refused(ktforge("isa", KTFORGE_ISA="sse9"), "no instruction set 'sse9'; usable: scalar")


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["nonsense"], ["convert", "--quant-method", "int5"], ["plan", "x.yaml", "--threads", "3"],
     ["convert", "--input-path", "x", "--output", "y", "--quant-method", "int4", "--threadpool-count", "0"]],
)  # fmt: skip
def test_usage_errors_exit_with_2(arguments):
    done = ktforge(*arguments)
    assert done.returncode == 2 and "Usage: " in done.stderr


def test_a_dense_model_is_called_one(tmp_path, out):
    model, keys = checkpoints.architectures()["qwen2"]
    data = {n: np.zeros(shape, checkpoints.BF16) for n, (_, shape) in keys.items()}
    refused(convert(checkpoints.write(tmp_path / "qwen2", data, model), out), "this is a dense model (model_type qwen2")


def test_an_absent_checkpoint(tmp_path, out):
    refused(convert(tmp_path / "absent", out), "absent does not exist")


def test_every_command_and_option_explains_itself():
    root = get_command(app)
    assert root.commands.keys() == {
        "run", "convert", "moe-to-bf16", "dequantize", "inspect", "compare", "generate", "eval", "calibrate", "init",
        "plan", "plugins", "new-plugin", "schema", "isa", "verify",
    }  # fmt: skip
    for name, command in root.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, (name, parameter.name)
    assert all(name in ktforge("--help").stdout for name in root.commands)


def test_commands_that_need_plugins_can_turn_them_off():
    for name, command in get_command(app).commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert ({"--block", "--plugin"} <= options) == (name not in ("new-plugin", "isa")), name
