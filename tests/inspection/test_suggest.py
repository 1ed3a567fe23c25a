"""What ``init`` prints can be planned as it is, whatever the checkpoint; where nothing can be made, it says why."""

import re
from pathlib import Path

import checkpoints
import forms
import pytest

from ktforge import Registry
from ktforge.inspection.suggest import starter
from ktforge.pipeline.file import load_pipeline


@pytest.fixture(scope="module")
def registry():
    return Registry.installed()


def plan(text, tmp_path, registry):
    (tmp_path / "pipeline.yaml").write_text(text)
    return load_pipeline(tmp_path / "pipeline.yaml", registry, [f"writer.path={tmp_path / 'out'}"]).plan(registry)


def layout_of(planned):
    layout = planned.pipeline.layout
    return layout and (layout.name, planned.pipeline.quantize.name)


#: The forms that are not for kt-amx in INT4 → what they are for.
OTHERS = {
    **dict.fromkeys(
        [n for n in forms.FORMS if n.startswith("dense ") or n in ("qwen2 family", "llama family", "no kt-amx")],
        ("compressed-tensors", "int4"),
    ),
    "int8 alone": ("kt-amx", "int8"),
    "columns of 36": ("compressed-tensors", "int8"),
    **dict.fromkeys(["columns of 33", "fused unknown", "fused gpt-oss", "fused gpt-oss mxfp4", "gpt_oss family"]),
}


@pytest.mark.parametrize("name", [n for n in forms.FORMS if n not in forms.WRONG])
def test_every_form_gets_a_pipeline_that_can_be_planned(tmp_path, registry, name):
    folder = forms.write(tmp_path / "it's: a {folder}", name)
    planned = plan(starter(folder, registry), tmp_path, registry)
    assert planned.problems == ()
    assert layout_of(planned) == OTHERS.get(name, ("kt-amx", "int4"))
    assert any(planned.formats) == (planned.pipeline.layout is not None)


@pytest.mark.parametrize("name", forms.OUTPUTS)
def test_an_output_gets_one_too_or_the_command_that_reads_it(tmp_path, registry, name):
    folder = forms.OUTPUTS[name](tmp_path)
    text = starter(folder, registry)
    if "kt" in name:
        assert all(line.startswith("#") for line in text.splitlines())
        assert "is packed already (kt-amx-int" in text and f"ktforge dequantize --input-path '{folder}'" in text
    else:
        assert plan(text, tmp_path, registry).problems == ()


def test_what_is_to_be_mended_comes_first(tmp_path, registry):
    folder = forms.write(tmp_path / "model", "broken")
    text = starter(folder, registry)
    problems = plan(text, tmp_path, registry).problems
    assert "layout: {use: kt-amx, threadpool_count: 2}" in text
    problems = [p for p in problems if "whole routed experts only" not in p]  # since one has no up
    assert len(problems) == 2 and all(f"# To correct first: {problem}" in text for problem in problems)


def test_stages_that_are_needed_are_there(tmp_path, registry):
    folder = forms.write(tmp_path / "model", "fused qwen3.5")
    planned = plan(starter(folder, registry), tmp_path, registry)
    assert [s.name for s in planned.pipeline.preprocess] == ["split-experts", "moe-to-bf16"]
    assert planned.pipeline.layout.threadpool_count == 2


def test_a_count_that_fits_is_picked(tmp_path, registry):
    folder = forms.write(tmp_path / "model", "one node")
    assert plan(starter(folder, registry), tmp_path, registry).pipeline.layout.threadpool_count == 1


def test_what_was_not_chosen_says_why(tmp_path, registry):
    text = starter(forms.write(tmp_path / "model", "fused gpt-oss"), registry)
    kt_amx = (
        r"# Not kt-amx: model\.layers\.0\.mlp\.experts \(and 1 more\): kt-amx has no place for the biases of gate, .*\n"
    )
    standard = r"# Not compressed-tensors: .*: readers of compressed-tensors know no biases of experts, .*\n"
    assert re.search(f"{kt_amx}{standard}preprocess:\n", text)


def test_what_config_json_says_begins_no_line(tmp_path, registry):
    model = checkpoints.config(model_type="qwen3_moe\nwriter: {use: evil}\n\x1b[2J")
    text = starter(checkpoints.write(tmp_path / "model", forms.moe()[0], model), registry)
    assert text.startswith("# qwen3_moe\\nwriter: {use: evil}\\n\\x1b[2J, 4 experts")
    assert plan(text, tmp_path, registry).problems == ()


def test_a_folder_called_like_a_home_directory_is_none(tmp_path, registry, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints.write(tmp_path / "~model", *forms.moe())
    assert plan(starter(Path("~model"), registry), tmp_path, registry).problems == ()
