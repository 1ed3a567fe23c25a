"""Damaged checkpoints and journals through the whole pipeline: an output as good as ever, or one clear refusal."""

import importlib.util
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from conversions import convert, loader_accepts, model, tree
from faults import Disk, dies, run_in_child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktforge import KtforgeError
from ktforge.disk.marks import JOURNAL, PARTIAL

ROOT = Path(__file__).parents[1]
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return model(tmp_path_factory.mktemp("small") / "model", 1, 2, 128, 128, shards=1)


@FEW
@given(place=st.integers(0, 1200), value=st.integers(0, 255), cut=st.integers(0, 3))
def test_a_byte_of_the_header_is_another(small, tmp_path, place, value, cut):
    """Of a header of 1,064 bytes and the first weights; the file may be cut short as well."""
    broken, out = tmp_path / "broken", tmp_path / "out"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(small, broken)
    content = bytearray((broken / "model.safetensors").read_bytes())
    content[place] = value
    (broken / "model.safetensors").write_bytes(content[: len(content) - cut * 7])
    try:
        convert(broken, out, Disk())
    except KtforgeError as error:
        assert all(error.problems) and not loader_accepts(out)
    else:
        assert cut == 0 and loader_accepts(out)


@FEW
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5), st.data())
def test_a_value_of_config_json_is_another(small, tmp_path, value, data):
    broken, out = tmp_path / "broken", tmp_path / "out"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(small, broken)
    config = json.loads((small / "config.json").read_text())
    config[data.draw(st.sampled_from(sorted(config)))] = value
    (broken / "config.json").write_text(json.dumps(config))
    try:
        convert(broken, out, Disk())
    except KtforgeError as error:
        assert all(error.problems) and not loader_accepts(out)
    else:
        assert loader_accepts(out)


@settings(FEW, max_examples=15)
@given(st.data())
def test_a_journal_that_is_cut_off_costs_only_work(small, tmp_path, data):
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    convert(small, out, Disk())
    wanted = tree(out)
    shutil.rmtree(out)
    number = data.draw(st.integers(20, 70))
    run_in_child(lambda: convert(small, out, Disk(lambda c: dies(c, after=True) if c.number == number else c.really())))
    path = out / PARTIAL / JOURNAL
    content = path.read_bytes()
    garbage = data.draw(st.sampled_from([b"", b"\0" * 100, b'{"written": {"model.norm.weight": "0"}']))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] + garbage)
    convert(small, out, Disk())
    assert tree(out) == wanted


@pytest.fixture
def fuzz(monkeypatch):
    """tests/fuzz/fuzz.py without the fuzzer, which the suite does not need."""
    monkeypatch.setitem(sys.modules, "atheris", SimpleNamespace(instrument_imports=lambda include: nullcontext()))
    spec = importlib.util.spec_from_file_location("fuzz_targets", ROOT / "fuzz" / "fuzz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["safetensors", "config", "index", "pipeline", "journal"])
def test_the_corpus_is_read_or_refused(fuzz, tmp_path, target):
    inputs = list((ROOT / "fuzz" / "corpus" / target).iterdir())
    assert len(inputs) >= 2
    for path in inputs:
        try:
            getattr(fuzz, target)(tmp_path, path.read_bytes())
        except KtforgeError as error:
            assert error.problems and all(error.problems), path
