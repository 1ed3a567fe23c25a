"""What a user reads when something is wrong: plain words, no library's, and the word that was probably meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import AutoLoader
from typer.main import get_command

from ktforge import CheckpointError
from ktforge.cli import app
from ktforge.model.source import read_source


def ktforge(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ktforge", *map(str, arguments)], capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip


def last(*arguments, **environment):
    done = ktforge(*arguments, **environment)
    assert done.returncode in (1, 2), done.stdout
    return done.stderr.splitlines()[-1]


CONVERT = ["convert", "--input-path", "x", "--output", "y", "--quant-method", "int4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*CONVERT, "--workers", "abc"], "'--workers': it must be a whole number"),
        ([*CONVERT, "--workers", "0"], "'--workers': it must be at least 1"),
        ([*CONVERT, "--group-size", "1.5"], "'--group-size': it must be a whole number"),
        ([*CONVERT, "--input-type", "fp7"], "there is no 'fp7' (did you mean fp8?); there are bf16, fp16, fp8, auto"),
        ([*CONVERT, "--input-type", "FP7"], "there is no 'FP7' (did you mean fp8?); there are bf16, fp16, fp8, auto"),
        (["convert"], "Error: --input-path and --output are missing"),
        (["convert", "--output=x", "--quant-method", "int4"], "Error: --input-path is missing"),
        (["inspect"], "Error: DIR is missing"),
        (["moe-to-bf16", "--imput-path", "x"], "there is no option --imput-path (did you mean --input-path?)"),
        (["--verison"], "Error: there is no option --verison before the command (did you mean --version?)"),
        (["-q", "isa"], "Error: there is no option -q before the command; options of a command go after it"),
        (["moe-to-bf17"], "Did you mean 'moe-to-bf16'?"),
        (["inspect", "Qwen/Qwen3-30B-A3B"], "error: Qwen/Qwen3-30B-A3B does not exist; of a model on the Hugging Face "
         "Hub, `hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B` makes a folder to give"),
        (["inspect", "/nowhere/at-all"], "error: /nowhere/at-all does not exist"),
        (["inspect", "x" * 300], "xxx cannot be read: File name too long"),
    ],
)  # fmt: skip
def test_the_command_line(arguments, said):
    assert last(*arguments).endswith(said)


def test_no_braces_and_no_words_of_a_library_in_any_help():

    for name in get_command(app).commands:
        text = ktforge(name, "--help", COLUMNS="80").stdout
        assert not {"{", "}", "typing.", "Literal"} & set(text.split()) and "{" not in text.splitlines()[0]


def test_summaries_are_not_cut(tmp_path):
    text = " ".join(ktforge("--help", COLUMNS="80").stdout.split())
    assert "..." not in text.partition("Commands:")[2] and "with upstream's options." in text


@pytest.mark.parametrize("place", ["config.json", "model.safetensors", "."])
def test_what_the_system_refuses_is_no_plugins_fault(tmp_path, monkeypatch, place):
    """As root may read everything, the system's refusal is made up."""
    folder = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config())
    refused, real, by_system = (folder / place).resolve(), Path.open, os.open

    def opened(self, *arguments, **options):
        if self.resolve() == refused:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **options)

    def listed(self):
        if self.resolve() == refused:
            raise PermissionError(13, "Permission denied", str(self))
        return iter([])

    def opened_by_system(path, *arguments, **options):
        if Path(path).resolve() == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return by_system(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "open", opened_by_system)
    if place == ".":
        monkeypatch.setattr(Path, "iterdir", listed)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied") as caught:
        read_source(AutoLoader(path=folder))
    assert len(set(caught.value.problems)) == 1 and "plugin" not in str(caught.value)


def test_a_directory_that_is_gone(tmp_path):
    (tmp_path / "here").mkdir()
    command = f"cd {tmp_path}/here && rmdir {tmp_path}/here && {sys.executable} -m ktforge inspect m"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said.startswith("error: ") and "the output of this command" not in said


def test_numbers_that_json_has_not_and_transformers_writes(tmp_path, out):
    folder = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config())
    config = {**checkpoints.config(), "swiglu_limits": [float("inf"), float("-inf")], "mscale": float("nan")}
    (folder / "config.json").write_text(json.dumps(config))
    done = ktforge("moe-to-bf16", "-i", folder, "-o", out)
    assert done.returncode == 0, done.stderr
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": float("nan")}))
    assert "hidden_size is nan; it must be a whole number" in last("inspect", folder)


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, np.float32), (np.inf, np.float16), (3.4e38, np.float32)])
def test_a_number_that_bf16_does_not_hold_is_called_no_more_than_that(tmp_path, out, value, dtype):
    data = checkpoints.tensors()
    name = next(n for n in data if ".experts." in n)
    data[name] = data[name].astype(dtype)
    data[name][3, 5] = value
    said = last("convert", "-i", checkpoints.write(tmp_path / "m", data, checkpoints.config()), "-o", out)
    assert f"{name} is NaN or infinite at row 3, column 5, or above 3.39e38, the largest number that BF16 holds" in said


def test_what_is_left_out_is_told_by_what_it_is(tmp_path, out):
    data = checkpoints.tensors()
    extra = {n.replace(".0.", f".{checkpoints.LAYERS}.", 1): a.copy() for n, a in data.items() if ".layers.0." in n}
    folder = checkpoints.write(tmp_path / "m", data | extra, checkpoints.config(num_nextn_predict_layers=1))
    command = ["convert", "-i", folder, "-o", out, "--dry-run"]
    (row,) = [line for line in ktforge(*command).stdout.splitlines() if line.startswith("left out")]
    assert f"{len(extra)} tensors of multi-token prediction, " in row
    both = ktforge(*command, "--set", "layout.non_experts=omit").stdout.splitlines()
    one, other = [line.split()[2:] for line in both if line.startswith("left out")]
    assert one[:4] == [str(len(extra)), "tensors", "of", "multi-token"]
    assert other[0] == str(len([n for n in data if ".experts." not in n])) and other[1] == "tensors,"
    assert f"layers.{checkpoints.LAYERS}." in one[-1] and f"layers.{checkpoints.LAYERS}." not in other[-1]


def test_a_dtype_that_is_no_weights(tmp_path):
    folder = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config())
    file = next(folder.glob("*.safetensors"))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    end = len(data) - 8 - length
    header = json.loads(data[8 : 8 + length]) | {"z": {"dtype": "C64", "shape": [1], "data_offsets": [end, end + 8]}}
    made = json.dumps(header).encode()
    file.write_bytes(len(made).to_bytes(8, "little") + made + data[8 + length :] + bytes(8))
    assert last("inspect", folder).endswith(
        "z has the dtype C64, which is no number format of weights: get a copy in BF16, FP16 or FP32, or save it so "
        "with transformers"
    )
