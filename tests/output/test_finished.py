"""An output that is there already is made once; whatever speaks against that it is this one, is heard."""

import json
import os
import shutil

import checkpoints
import pytest
from ktforge_plugins import AutoLoader, Int4, Int8, KtAmx, SafetensorsWriter

from ktforge import AlreadyDone, OutputError, Pipeline
from ktforge.output.folder import outlook
from ktforge.planning import plan as planning


@pytest.fixture
def made(tmp_path):
    """A pipeline that has run."""
    source = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config(), 2)
    (source / "tokenizer.json").write_text("{}")
    pipeline = pipeline_of(tmp_path)
    pipeline.run()
    return pipeline


def pipeline_of(place, **changes):
    stages = {"loader": AutoLoader(path=place / "m"), "quantize": Int4(), "layout": KtAmx()}
    return Pipeline(**{**stages, "writer": SafetensorsWriter(path=place / "out"), **changes})


def snapshot(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_what_is_there_is_left_as_it_is(made, tmp_path, monkeypatch):
    before = snapshot(tmp_path / "out")
    with pytest.raises(AlreadyDone, match="holds this output already"):
        made.run()
    assert outlook(made.plan()) == f"{tmp_path / 'out'} holds this output already: nothing is to do"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AlreadyDone):  # the same folders by other names
        pipeline_of(tmp_path / ".." / tmp_path.name).run()
    assert snapshot(tmp_path / "out") == before
    made.run(overwrite=True)
    assert snapshot(tmp_path / "out") != before, "made anew"


def test_it_needs_no_room(made, monkeypatch):
    monkeypatch.setattr(planning, "shortages", lambda *_: ["no room"])
    assert made.plan().problems == ()


def touch(path):
    os.utime(path, ns=(path.stat().st_mtime_ns + 10**10,) * 2)


def flip(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    "change",
    [
        lambda m, out: touch(next(m.glob("*.safetensors"))),
        lambda m, out: flip(next(m.glob("*.safetensors"))),
        lambda m, out: (m / "LICENSE").write_text("new"),
        lambda m, out: (m / "tokenizer.json").write_text("{ }"),
        lambda m, out: (m.rename(m.parent / "old"), shutil.copytree(m.parent / "old", m)),
        lambda m, out: (out / "tokenizer.json").unlink(),
        lambda m, out: next(out.glob("*.safetensors")).unlink(),
        lambda m, out: os.truncate(next(out.glob("*.safetensors")), 100),
        lambda m, out: (out / "config.json").write_text("{}"),
        lambda m, out: (out / "more.safetensors").write_bytes(b""),
        lambda m, out: (out / "ktforge_manifest.json").unlink(),
        lambda m, out: (out / "ktforge_manifest.json").write_text("[]"),
        lambda m, out: (out / "ktforge_manifest.json").write_text('{"pipeline": 3}'),
        lambda m, out: (out / "ktforge_manifest.json").write_text('{"pipeline": {}}'),
        lambda m, out: (out / "ktforge_manifest.json").write_text('{"pipeline": {"loader": {"path": "\\u0000"}}}'),
        lambda m, out: (out / "UNFINISHED.safetensors").write_bytes(b""),
    ],
)  # fmt: skip
def test_anything_else_is_refused_as_ever(made, tmp_path, change):
    change(tmp_path / "m", tmp_path / "out")
    if (tmp_path / "out" / "UNFINISHED.safetensors").exists():
        assert "holds this output" not in (outlook(made.plan()) or "")
        return
    with pytest.raises(OutputError, match="is not empty") as caught:
        made.run()
    assert not isinstance(caught.value, AlreadyDone)


@pytest.mark.parametrize(
    "changes", [{"quantize": Int8()}, {"layout": KtAmx(threadpool_count=4)}, {"runtime": {"cpuinfer_threads": 3}}]
)
def test_another_pipeline_is_refused_as_ever(made, tmp_path, changes):
    with pytest.raises(OutputError, match="is not empty"):
        pipeline_of(tmp_path, **changes).run()


def test_code_that_no_version_stands_for_is_not_taken_for_the_same(made, tmp_path):
    class Own(Int4):
        """Whose code may have changed since."""

    mine = pipeline_of(tmp_path, quantize=Own(), writer=SafetensorsWriter(path=tmp_path / "mine"))
    mine.run()
    with pytest.raises(OutputError, match="is not empty"):
        mine.run()
    manifest = json.loads((tmp_path / "mine" / "ktforge_manifest.json").read_text())
    assert manifest["formats"] == ["kt-amx-int4/1"]
