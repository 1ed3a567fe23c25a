"""An output folder is finished, or it is as it was before."""

import json
import os

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Int4, KtAmx, KtFolderWriter, MoeToBf16, SafetensorsLoader, SafetensorsWriter

from ktforge import OutputError, Pipeline, PlanError, PluginError, open_folder
from ktforge.disk.marks import PARTIAL
from ktforge.output.folder import outlook
from ktforge.testing import MemoryLoader


def pipeline(source, writer, **layout):
    return Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(**layout),
        writer=writer,
    )  # fmt: skip


def listing(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_side_files_are_carried_over_unchanged(source, out):
    pipeline(source, SafetensorsWriter(path=out)).run()
    for name in checkpoints.SIDE_FILES:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    Pipeline(loader=SafetensorsLoader(path=source), writer=SafetensorsWriter(path=out)).run(overwrite=True)
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes(), "where no stage has edited it"
    assert not (out / PARTIAL).exists()


def test_the_manifest_says_what_was_made_of_what(source, out):
    pipeline(source, SafetensorsWriter(path=out), threadpool_count=4).run()
    manifest = json.loads((out / "ktforge_manifest.json").read_text())
    assert manifest["formats"] == ["kt-amx-int4/1"]
    assert manifest["numa_nodes"] == 4
    assert manifest["pipeline"]["layout"] == {"use": "kt-amx", "threadpool_count": 4, "non_experts": "rename"}
    assert [(s["file"], s["bytes"]) for s in manifest["source"]] == [
        (p.name, p.stat().st_size) for p in sorted(source.glob("*.safetensors"))
    ]
    assert all(len(s["header_xxh3_128"]) == 32 for s in manifest["source"])
    assert len({s["header_xxh3_128"] for s in manifest["source"]}) == 2


def test_a_folder_with_something_in_it_needs_overwrite(source, out):
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty: choose another folder, or say --overwrite"):
        pipeline(source, SafetensorsWriter(path=out)).run()
    assert listing(out) == ["notes.txt"]


def test_a_plan_says_what_a_run_would_do_about_the_folder(source, out):
    made = pipeline(source, SafetensorsWriter(path=out))
    assert outlook(made.plan()) is None
    out.mkdir()
    assert outlook(made.plan()) is None, "an empty folder is as good as none"
    (out / "notes.txt").write_text("mine")
    said = f"{out} is not empty: the run needs --overwrite, which replaces its weights at the end"
    assert outlook(made.plan()) == said
    refused = pipeline(source, SafetensorsWriter(path=out), threadpool_count=3).plan()
    assert refused.problems and outlook(refused) is None
    units = len(refused.units)
    assert repr(refused) == f"<Plan: {units} units, 0 files, {len(refused.problems)} problem>", "one line, in a shell"


def test_a_plan_says_how_an_unfinished_output_goes_on(source, out):
    made = pipeline(source, SafetensorsWriter(path=out))
    planned = made.plan()
    tensors = [t for f in planned.files for t in f.tensors]
    with pytest.raises(KeyboardInterrupt), open_folder(out, planned, {}) as sink:
        sink.write(tensors[0], np.zeros(tensors[0].shape, tensors[0].dtype))
        raise KeyboardInterrupt
    assert outlook(made.plan()) == (
        f"{out} holds an unfinished output of this pipeline: the run goes on behind 1 of {len(tensors)} tensors; "
        "--restart begins anew"
    )
    other = outlook(pipeline(source, SafetensorsWriter(path=out), non_experts="keep").plan())
    assert other.startswith(f"{out} holds an unfinished output that cannot go on (")
    assert "layout.non_experts was rename and is keep" in other and other.endswith("): --restart discards it")
    (out / "notes.txt").write_text("mine")
    assert "the run goes on with --overwrite behind" in outlook(made.plan())
    made.run(overwrite=True)
    assert outlook(made.plan()) == f"{out} holds this output already: nothing is to do"
    other = pipeline(source, SafetensorsWriter(path=out), non_experts="keep").plan()
    assert outlook(other) == f"{out} is not empty: the run needs --overwrite, which replaces its weights at the end"


def test_overwrite_leaves_no_weights_of_before(source, out):
    pipeline(source, SafetensorsWriter(path=out, max_shard_size="300KB")).run()
    (out / "notes.txt").write_text("mine")
    pipeline(source, KtFolderWriter(path=out)).run(overwrite=True)
    assert len(list(out.glob("*.safetensors"))) == 1
    assert (out / "notes.txt").read_text() == "mine"
    pipeline(source, SafetensorsWriter(path=out)).run(overwrite=True)
    assert not list(out.glob("_layer_*"))
    fresh = out.parent / "fresh"
    pipeline(source, SafetensorsWriter(path=fresh)).run()
    assert listing(out) == sorted([*listing(fresh), "notes.txt"])


def test_a_failed_overwrite_leaves_the_old_output(source, out):
    pipeline(source, SafetensorsWriter(path=out)).run()
    before = {name: (out / name).read_bytes() for name in listing(out)}
    data = checkpoints.tensors()
    data[checkpoints.expert_name(1, 3, "gate")][0, 0] = np.nan
    broken = MemoryLoader(tensors=data, model=checkpoints.config())
    failing = pipeline(source, SafetensorsWriter(path=out)).model_copy(update={"loader": broken})
    with pytest.raises(Exception, match="is NaN or infinite"):
        failing.run(overwrite=True)
    assert {name: (out / name).read_bytes() for name in listing(out)} == before


@pytest.mark.parametrize("place", ["inside", "around", "same"])
def test_output_and_checkpoint_must_not_overlap(tmp_path, place):
    source = checkpoints.write(tmp_path / "a" / "model", checkpoints.tensors(), checkpoints.config())
    target = {"inside": source / "out", "around": tmp_path / "a", "same": tmp_path / "a" / "." / "model"}[place]
    with pytest.raises(PlanError, match="overlap: choose another folder"):
        pipeline(source, SafetensorsWriter(path=target)).run(overwrite=True)
    assert (source / "model.safetensors").exists()


def test_a_file_in_the_way(source, out):
    out.write_text("x")
    with pytest.raises(PlanError, match="is a file: give a folder"):
        pipeline(source, SafetensorsWriter(path=out)).run(overwrite=True)


def test_a_file_above(source, out):
    out.write_text("x")
    for folder in (out / "a", out / "a" / "b"):
        with pytest.raises(PlanError, match=rf"would lie below {out}, which is a file: give another folder"):
            pipeline(source, SafetensorsWriter(path=folder)).run()


def test_nothing_that_loaders_look_for_exists_before_the_end(source, out):
    seen = []

    class Spy(KtAmx):
        def pack(self, unit, buffers):
            super().pack(unit, buffers)
            seen.extend(p.suffix for p in out.rglob("*") if p.is_file())

    spying = pipeline(source, SafetensorsWriter(path=out)).model_copy(update={"layout": Spy()})
    spying.run(workers=1)
    assert set(seen) == {".partial", ".jsonl", ""}, "growing files, the journal, the lock"


def test_an_error_of_the_system_names_the_file(source, out, monkeypatch):
    def full(*arguments):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device: make room, then"):
        pipeline(source, SafetensorsWriter(path=out)).run(workers=1)


def test_a_tensor_that_is_never_written_is_an_error(source, out):
    planned = pipeline(source, SafetensorsWriter(path=out)).plan()
    with pytest.raises(PluginError, match="was planned but never written"), planned.pipeline.writer.open(planned):
        pass
    assert set(listing(out)) == {".ktforge-partial/journal.jsonl"}, "what there is can go on"


def test_a_tensor_that_is_written_twice_is_an_error(source, out):
    planned = pipeline(source, SafetensorsWriter(path=out)).plan()
    tensor = planned.files[0].tensors[0]
    data = np.zeros(tensor.shape, tensor.dtype)
    with (
        pytest.raises(PluginError, match="was written twice or never planned"),
        planned.pipeline.writer.open(planned) as sink,
    ):
        sink.write(tensor, data)
        sink.write(tensor, data)
