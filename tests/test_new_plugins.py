"""What ``ktforge new-plugin --kind`` writes, as a third party would use it: installed, tested, run."""

import csv
import json
import re
import tomllib
from pathlib import Path

import checkpoints
import environments
import numpy as np
import pytest
from environments import call

from ktforge import ConfigError
from ktforge.cli.commands.new_plugin import Kind
from ktforge.skeleton import FILES, KINDS, write_skeleton

TEMPLATES = Path(__file__).parent / "example_plugins"
#: That every kind is a template and an option, too, a test holds.
NAMES = {kind: f"my-{kind}" for kind in KINDS}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment with a package of each kind, each by a name of its own."""
    folder = environments.create(tmp_path_factory.mktemp("environment"))
    for kind, name in NAMES.items():
        call(folder, "-m", "ktforge", "new-plugin", name, "--kind", kind)
    environments.install(folder, *(folder / f"ktforge-{name}" for name in NAMES.values()))
    return folder


def test_every_kind_is_a_template_and_an_option():
    assert [*Kind] == [*KINDS]
    assert {path.name for path in TEMPLATES.iterdir()} == set(KINDS)
    for kind in KINDS:
        found = {p.relative_to(TEMPLATES / kind).as_posix() for p in (TEMPLATES / kind).rglob("*.*") if p.is_file()}
        assert {f for f in found if not f.endswith(".pyc")} == {f for f in FILES if f != "pyproject.toml"}


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_tests_pass_there(environment, kind):
    folder = environment / f"ktforge-{NAMES[kind]}"
    assert not [p for p in folder.rglob("*") if "xample" in p.name + (p.read_text() if p.suffix in SUFFIXES else "")]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    stage = {"preprocess": "preprocessor", "quantize": "quantizer"}.get(kind, kind)
    assert project["description"] == f'The {stage} "{NAMES[kind]}" for ktforge'
    done = call(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder / "tests")
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout


SUFFIXES = (".py", ".md", ".toml")


def test_they_are_listed(environment):
    rows = [line.split()[:3] for line in call(environment, "-m", "ktforge", "plugins").stdout.splitlines()]
    for kind in set(KINDS) - {"observer"}:
        assert [NAMES[kind], kind, f"ktforge-{NAMES[kind]}"] in rows


def test_a_pipeline_runs_with_all_of_them(environment, tmp_path):
    """From .npz files in a format of its own, by a preset of its own, to raw files, watched."""
    source, out, log = tmp_path / "source", tmp_path / "out", tmp_path / "units.csv"
    source.mkdir()
    data = checkpoints.tensors()
    stored, restored = as_row_max(data)
    np.savez(source / "weights.npz", **stored)
    (source / "config.json").write_text(json.dumps(checkpoints.config()))
    inspected = call(environment, "-m", "ktforge", "inspect", source).stdout
    assert "my-layout" in inspected and "my-quantize" in inspected
    pipeline = call(
        environment, "-m", "ktforge", "convert", "--input-path", source, "--output", out, "--quant-method", "my-layout",
        "--print-pipeline",
    ).stdout  # fmt: skip
    (tmp_path / "pipeline.yaml").write_text(re.sub(r"writer: .*", f"writer: {{use: my-writer, path: {out}}}", pipeline))
    call(environment, "-m", "ktforge", "run", tmp_path / "pipeline.yaml", KTFORGE_MY_OBSERVER_FILE=str(log))
    made = read_raw(out)
    for name, weight in restored.items():
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            back = made[f"{stem}.codes"] * np.repeat(made[f"{stem}.scales"], 32, axis=1)
            # Half a step of 127, and half a step of BF16 on the way.
            assert np.abs(back - weight).max() <= np.abs(weight).max() * (1 / 254 + 1 / 512)
        else:
            assert np.array_equal(made[name].astype(np.float32), weight)
    rows = list(csv.reader(log.read_text().splitlines()))
    assert [rows[0][0], rows[-1][0]] == ["begun", "finished"]
    assert "model.layers.1.mlp.experts.3" in {row[1] for row in rows if row[0] == "written"}


def as_row_max(data):
    """The checkpoint with its experts as int8 codes and row_max, the rest in float32; and what that stands for."""
    stored, restored = {}, {}
    for name, array in data.items():
        array = array.astype(np.float32)
        if ".experts." in name:
            most = np.abs(array).max(axis=1)
            codes = np.rint(array / most[:, None] * 127).astype(np.int8)
            stored |= {name: codes, name.replace(".weight", ".row_max"): most}
            array = codes * (most / np.float32(127))[:, None]
        else:
            stored[name] = array
        restored[name] = array
    return stored, restored


def read_raw(folder):
    raw, dtypes = (folder / "weights.raw").read_bytes(), {"BF16": checkpoints.BF16, "I8": np.int8, "F32": np.float32}
    found = {}
    for name, entry in json.loads((folder / "weights.json").read_text()).items():
        count = int(np.prod(entry["shape"]))
        found[name] = np.frombuffer(raw, dtypes[entry["dtype"]], count, entry["offset"]).reshape(entry["shape"])
    return found


@pytest.mark.parametrize(("name", "layout"), [("my-quantize", "compressed-tensors"), ("my-layout", "my-layout")])
def test_convert_and_dequantize_know_them_by_name(environment, source, tmp_path, name, layout):
    packed, back = tmp_path / "packed", tmp_path / "back"
    call(
        environment, "-m", "ktforge", "convert", "--input-path", source, "--output", packed, "--quant-method", name,
    )  # fmt: skip
    assert layout in call(environment, "-m", "ktforge", "inspect", packed, check=False).stdout
    call(environment, "-m", "ktforge", "dequantize", "--input-path", packed, "--output", back)
    made = checkpoints.load_output(back)
    assert made.keys() == checkpoints.tensors().keys()
    for tensor, weight in checkpoints.tensors().items():
        wanted = weight.astype(np.float32)
        error = np.linalg.norm(made[tensor].astype(np.float32) - wanted) / np.linalg.norm(wanted)
        assert error < (0.15 if ".experts." in tensor else 1e-9), tensor


def test_a_kind_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="'exporter' is no kind of plugin: there are loader, preprocess, quantize"):
        write_skeleton("mine", tmp_path / "new", "exporter")
