"""Every call of the file layer fails in turn: one clear sentence, and the next run finishes what was begun."""

import errno
import hashlib
import os
import shutil

import checkpoints
import pytest
from faults import Disk, at, fails, short_write, torn_write
from ktforge_plugins import Int4, KtAmx, KtFolderWriter, MoeToBf16, SafetensorsLoader, SafetensorsWriter
from safetensors import SafetensorError, safe_open

from ktforge import OutputError, Pipeline, files, output


def tree(folder):
    """Relative path → hash of every file."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def loader_accepts(folder):
    """Whether a loader that walks a folder for *.safetensors, as kt-kernel's does, finds weights and no fault."""
    found = [os.path.join(root, f) for root, _, names in os.walk(folder) for f in names if f.endswith(".safetensors")]
    try:
        for path in found:
            with safe_open(path, "numpy") as opened:
                opened.keys()
    except SafetensorError:
        return False
    return bool(found)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint of six units: one layer, two experts, a norm."""
    random = checkpoints.tensors()
    kept = {n: a for n, a in random.items() if ".layers.0.mlp.experts" in n and int(n.split(".")[5]) < 2}
    kept["model.norm.weight"] = random["model.norm.weight"]
    folder = tmp_path_factory.mktemp("tiny") / "model"
    checkpoints.write(folder, kept, checkpoints.config(num_experts=2, num_hidden_layers=1), 2)
    for name in ("generation_config.json", "chat_template.jinja", "modeling_custom.py", "vocab.txt", "tokenizer.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture(autouse=True)
def save_always(monkeypatch):
    monkeypatch.setattr(output, "SAVE_EVERY", 0.0)


def pipeline(source, writer):
    return Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=Int4(),
        layout=KtAmx(threadpool_count=1), writer=writer,
    )  # fmt: skip


def run(source, out, monkeypatch, action, *, writer=SafetensorsWriter, **options):
    """Runs with one worker on a failing disk and returns the calls that were made to it."""
    disk = Disk(action) if action else Disk()
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", disk)
        shards = {"max_shard_size": "200KB"} if writer is SafetensorsWriter else {}
        pipeline(source, writer(path=out, **shards)).run(workers=1, **options)
    return disk.calls


#: Failures that end nothing: the lock is recognised as stale, and an empty folder is in nobody's way.
HARMLESS = {"unlink lock", "rmdir .ktforge-partial"}
FAULTS = {
    "EIO": fails(errno.EIO), "ENOSPC": fails(errno.ENOSPC), "short write": short_write, "torn write": torn_write
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "replaces"),
    [("EIO", False), ("ENOSPC", True), ("short write", False), ("torn write", False), ("torn write", True)],
)
def test_any_call_may_fail(tiny, tmp_path, monkeypatch, fault, replaces):
    out, old = tmp_path / "out", tmp_path / "old"
    pipeline(tiny, KtFolderWriter(path=old)).run()
    before = tree(old)
    if replaces:
        shutil.copytree(old, out)
    calls = run(tiny, out, monkeypatch, None, overwrite=replaces)
    wanted = tree(out)
    assert len(calls) > 100 and sum(c.startswith("replace") for c in calls) >= 8
    for number, call in enumerate(calls, 1):
        if fault.endswith("write") and not call.startswith("pwrite"):
            continue
        shutil.rmtree(out)
        if replaces:
            shutil.copytree(old, out)
        try:
            run(tiny, out, monkeypatch, at(number, FAULTS[fault]), overwrite=replaces)
            assert fault == "short write" or call in HARMLESS, call
        except OutputError as error:
            assert fault != "short write", call
            assert len(error.problems) == 1 and "cannot be written: " in str(error), call
            assert ("make room" in str(error)) == (fault in ("ENOSPC", "torn write")), call
            found = {n: h for n, h in tree(out).items() if not n.startswith(output.PARTIAL)} if out.exists() else {}
            if found != wanted:
                assert (loader_accepts(out) == replaces and found == before) or not loader_accepts(out), call
            if found != wanted or output.is_unfinished(out):
                run(tiny, out, monkeypatch, None, overwrite=replaces)
        left = {output.PARTIAL + "/lock"} if call in HARMLESS else set()
        assert {n: h for n, h in tree(out).items() if n not in left} == wanted, call
