"""A run is made from the files that it was planned with, and goes on with those that it began with, or says so."""

import json
import os
import shutil

import pytest
from conversions import convert, model, pipeline, tree
from faults import Disk, dies, run_in_child
from ktforge_plugins import KtAmx, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.loaders import safetensors as safetensors_loader

from ktforge import CheckpointError, OutputError, hookimpl
from ktforge.contract.registry import Registry
from ktforge.disk.marks import PARTIAL
from ktforge.output import folder as output_folder
from ktforge.output.folder import is_unfinished
from ktforge.planning import plan as planning


@pytest.fixture
def copy(tmp_path):
    return model(tmp_path / "model", 1, 3, 128, 128)


def killed(copy, out, name, file, count=1):
    """A run that is killed before a call; whether it came to that call."""
    seen = []

    def action(call):
        seen.extend([call] if call.name == name and file in call.path.name else [])
        return dies(call, after=False) if len(seen) == count else call.really()

    return run_in_child(lambda: convert(copy, out, Disk(action))) == -9


def undisturbed(copy, out):
    convert(copy, out, Disk())
    made = tree(out)
    shutil.rmtree(out)
    return made


# What decides the bytes, changed between two runs


@pytest.mark.parametrize("document", ["config.json", "hf_quant_config.json", "a.index.json", "ktforge_manifest.json"])
@pytest.mark.parametrize("change", ["edited", "gone", "new"])
def test_documents_of_the_source_count_by_content(copy, out, document, change):
    """Whatever becomes of them in the output's own config.json."""
    path = copy / document
    if not path.exists():
        path.write_text("{}")
    content = path.read_bytes()
    if change == "new" and document != "config.json":
        path.unlink()
    assert killed(copy, out, "pwrite", "journal.jsonl", 3)
    path.write_bytes(content + b"\n")
    if change == "gone" and document != "config.json":
        path.unlink()
    whatever = {"edited": "has changed", "gone": "is gone", "new": "is new"}
    wanted = "has changed" if document == "config.json" else whatever[change]
    with pytest.raises(OutputError, match=rf"^{document} {wanted}\nso the unfinished output in .* cannot go on"):
        convert(copy, out, Disk())
    if change == "new" and document != "config.json":
        path.unlink()
    else:
        path.write_bytes(content)
    convert(copy, out, Disk())
    assert not is_unfinished(out)


def test_a_quantisation_that_the_output_does_not_mention_counts(copy, out):
    class Silent(KtAmx):
        def edit_config(self, config, results):
            return {k: v for k, v in config.items() if k != "quantization_config"}

    made = pipeline(copy, SafetensorsWriter(path=out)).model_copy(update={"layout": Silent(threadpool_count=1)})
    before = made.plan()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config, indent=1))
    after = made.plan()
    assert before.documents.keys() == after.documents.keys() and before.documents != after.documents


SIDE = {
    "edited": lambda copy: (copy / "tokenizer.json").write_text('{"version": "2.0"}'),
    "added": lambda copy: (copy / "extra" / "new.txt").write_text("new"),
    "gone": lambda copy: (copy / "extra" / "notes.md").unlink(),
    "in a folder's place": lambda copy: (shutil.rmtree(copy / "extra"), (copy / "extra").write_text("a file")),
}
#: Before documents are staged, among them, before publishing, and at each step of it.
POINTS = [
    ("pwrite", "index.json", 1),
    ("fsync", "ktforge_manifest.json", 1),
    ("pwrite", "tokenizer.json", 1),
    ("pwrite", "UNFINISHED", 1),
    ("replace", "model.safetensors", 1),
    ("replace", "tokenizer.json", 1),
    ("replace", "config.json", 1),
    ("replace", "ktforge_manifest.json", 1),
    ("unlink", "UNFINISHED", 1),
    ("unlink", "journal.jsonl", 1),
]


@pytest.mark.parametrize("change", SIDE)
def test_side_files_alone_are_copied_again(copy, out, tmp_path, change):
    before = tmp_path / "before"
    shutil.copytree(copy, before)
    SIDE[change](copy)
    wanted = undisturbed(copy, out)
    for name, file, count in POINTS:
        where = f"{name} {file} {count}"
        for folder in (copy, out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, copy)
        assert killed(copy, out, name, file, count), where
        SIDE[change](copy)
        if not is_unfinished(out):  # killed behind its last change that counts
            continue
        convert(copy, out, Disk())
        assert tree(out) == wanted, where


@pytest.mark.parametrize("back", [False, True])
def test_copying_them_again_may_be_killed_anywhere(copy, out, back):
    """Then the run goes on with them, or with those of before, put back."""
    old = undisturbed(copy, out)
    kept = (copy / "tokenizer.json").read_bytes()
    SIDE["edited"](copy)
    new = undisturbed(copy, out)
    number = 1
    while True:
        shutil.rmtree(out, ignore_errors=True)
        (copy / "tokenizer.json").write_bytes(kept)
        assert killed(copy, out, "replace", "ktforge_manifest.json")
        SIDE["edited"](copy)
        at = number

        def action(call, at=at):
            return dies(call, after=True) if call.number == at else call.really()

        if run_in_child(lambda action=action: convert(copy, out, Disk(action))) == 0:
            break
        if back:
            (copy / "tokenizer.json").write_bytes(kept)
        if is_unfinished(out):
            convert(copy, out, Disk())
            assert tree(out) == (old if back else new), number
        number += 1
    assert number > 20


# A file that is replaced while planning, or between planning and its use


def other_order(path):
    """Another file of the same size and time, with its tensors in another order."""
    found, content = path.stat(), bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[8 + length :] = content[8 + length :][::-1]
    new = path.with_name("new.tmp")
    new.write_bytes(content)
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("moment", ["planning", "planned", "running"])
def test_a_shard_that_is_replaced_is_an_error(copy, out, monkeypatch, io, moment):
    shard = next(copy.glob("model-00001-*"))
    made = pipeline(copy, SafetensorsWriter(path=out)).model_copy(
        update={"loader": SafetensorsLoader(path=copy, io=io)}
    )

    class Replaces:
        @hookimpl
        def ktforge_planned(self, plan):
            if moment == "running":
                other_order(shard)

    units_of = planning.units_of

    def replacing(*arguments):
        if moment == "planning":
            other_order(shard)
        return units_of(*arguments)

    monkeypatch.setattr(planning, "units_of", replacing)
    registry = Registry(Replaces())
    if moment == "planned":
        execute = pipeline.__globals__["Pipeline"].run.__globals__["execute"]

        def late(*arguments, **options):
            other_order(shard)
            return execute(*arguments, **options)

        monkeypatch.setitem(pipeline.__globals__["Pipeline"].run.__globals__, "execute", late)
    with pytest.raises(CheckpointError, match=rf"{shard} changed while it was read: another file has taken its place$"):
        made.run(registry=registry)
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_shard_that_is_replaced_and_put_back_is_not_read(copy, io):
    """Whoever opens it sees which file that is; whoever looks at the path later would not."""
    loader = SafetensorsLoader(path=copy, io=io)
    spec = max(loader.scan(), key=lambda s: s.nbytes)
    away = spec.file.rename(spec.file.with_suffix(".away"))
    shutil.copy2(away, spec.file)
    other_order(spec.file)
    with pytest.raises(CheckpointError, match=r"another file has taken its place$"):
        loader.read(spec)


def test_an_input_file_that_changes_behind_planning(copy, out, tmp_path):
    statistics = tmp_path / "statistics.dat"
    statistics.write_bytes(b"12345")

    class Calibrated(KtAmx):
        def input_files(self):
            return [statistics]

    class Replaces:
        @hookimpl
        def ktforge_planned(self, plan):
            statistics.write_bytes(b"54321")

    made = pipeline(copy, SafetensorsWriter(path=out)).model_copy(update={"layout": Calibrated(threadpool_count=1)})
    with pytest.raises(CheckpointError, match=rf"^{statistics} changed while it was read: it was modified$"):
        made.run(registry=Registry(Replaces()))


# --verify


def test_verify_sees_a_byte_of_whatever_is_published(copy, out, monkeypatch):
    def stops(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(output_folder, "publish", stops)
        convert(copy, out, Disk())
    files = [p for p in (out / PARTIAL).rglob("*.partial") if p.is_file()]
    assert len(files) == 6
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 3, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(OutputError, match=rf"{path.name}.* not what was written.*: start over with --restart$"):
                convert(copy, out, Disk(), verify=True)
        path.write_bytes(content)
    convert(copy, out, Disk(), verify=True)
    assert not is_unfinished(out)


def test_a_shard_that_is_replaced_while_its_header_is_read(copy, monkeypatch):
    """The library opens the path for itself: what it looked at must be the file whose header counts."""
    shard = next(copy.glob("model-00001-*"))
    look = safetensors_loader.safe_open

    def replacing(file, **options):
        if file == shard:
            other_order(shard)
        return look(file, **options)

    monkeypatch.setattr(safetensors_loader, "safe_open", replacing)
    with pytest.raises(CheckpointError, match=rf"{shard} changed while it was looked at: another file has taken"):
        list(SafetensorsLoader(path=copy).scan())
