"""A preset decides quantizer, layout and writer, and what options of ``convert`` set in them."""

import json
from types import SimpleNamespace

import pytest
from conversions import tree
from typer.testing import CliRunner

from ktforge import PluginError, Preset, Registry, hookimpl
from ktforge.cli import app
from ktforge.inspection.suggest import starter

INT4, KT_AMX, KT_FOLDER = {"use": "int4"}, {"use": "kt-amx", "threadpool_count": 1}, {"use": "kt-folder"}


def installed(*presets):
    return Registry.installed(SimpleNamespace(__name__="theirs", ktforge_presets=hookimpl(lambda: presets)))


def test_its_writer_is_that_of_init(source):
    lines = starter(source, installed(Preset("files", INT4, KT_AMX, "", writer=KT_FOLDER, order=-1))).splitlines()
    assert "writer: {use: kt-folder, path: out}" in lines
    assert "writer: {use: safetensors, path: out, max_shard_size: 5GB}" in starter(source, installed()).splitlines()


def test_its_writer_is_that_of_convert(source, tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(
        "from ktforge import Preset, hookimpl\n"
        "@hookimpl\ndef ktforge_presets():\n"
        f"    return [Preset('files', {INT4}, {KT_AMX}, '', writer={KT_FOLDER},\n"
        "                   options={'threadpool_count': 'layout.threadpool_count'})]\n"
    )
    words = ["convert", "--input-path", source, "--output", tmp_path / "out", "--quant-method", "files"]
    done = CliRunner().invoke(app, list(map(str, [*words, "--plugin", file, "--threadpool-count", "2"])))
    assert done.exit_code == 0, done.output
    written = tree(tmp_path / "out")
    assert any(name.startswith("_layer_0/_numa_1/INT4_up_0_") for name in map(str, written))
    assert json.loads((tmp_path / "out/ktforge_manifest.json").read_text())["pipeline"]["writer"]["use"] == "kt-folder"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"writer": {"max_shard_size": "5GB"}}, "without `use` of a stage"),
        ({"options": {"group_size": "quantise.group_size"}}, r"with options\['group_size'\]: they map group_size, "),
        ({"options": {"group_size": "quantize"}}, r"to quantize\.KEY, layout\.KEY or writer\.KEY\[=VALUE\]"),
        ({"options": {"group": "quantize.group_size"}}, r"with options\['group'\]"),
    ],
)
def test_what_an_author_has_to_correct(wrong, said):
    with pytest.raises(PluginError, match=f"plugin theirs offers the preset 'files' .*{said}.*: correct it"):
        installed(Preset("files", INT4, KT_AMX, "", **wrong))
