"""Only regular files are opened: a pipe, whatever its name is, keeps nobody waiting. What may not be read is named."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conversions import convert, model, pipeline, tree
from faults import Disk, dies, run_in_child
from ktforge_plugins import KtFolderWriter, SafetensorsWriter
from permissions import as_anybody

from ktforge import KtforgeError, PlanError
from ktforge.contract.registry import Registry, load_file
from ktforge.disk.journal import Journal
from ktforge.disk.lock import held
from ktforge.disk.marks import MANIFEST, PARTIAL
from ktforge.pipeline.file import load_pipeline
from ktforge.testing import MemoryLoader


@pytest.fixture(autouse=True)
def in_time():
    """A pipe that is waited for ends the test."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture
def copy(tmp_path):
    folder = model(tmp_path / "model", 1, 3, 128, 128)
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("a")
    return folder


def in_place_of(path):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "hf_quant_config.json", "params.json"])
def test_pipes_in_a_checkpoint(copy, out, name):
    if name == "params.json":
        (copy / "config.json").unlink()
    in_place_of(copy / name)
    if name == "hf_quant_config.json":  # which nobody asks for
        convert(copy, out, Disk())
        return
    with pytest.raises(KtforgeError, match=r"not a file that has an end|config\.json is missing"):
        convert(copy, out, Disk())
    assert not out.exists()


def test_a_side_file_that_becomes_a_pipe(copy, out):
    def action(call):
        if call.name == "fsync" and "index.json" in call.path.name:
            in_place_of(copy / "tokenizer.json")
        return call.really()

    with pytest.raises(KtforgeError, match=r"tokenizer\.json is not a file that has an end"):
        convert(copy, out, Disk(action))


@pytest.mark.parametrize("name", [MANIFEST, "config.json", "tokenizer.json", "model.safetensors"])
def test_pipes_in_an_output_that_is_replaced(copy, out, name):
    convert(copy, out, Disk())
    wanted = tree(out)
    in_place_of(out / name)
    convert(copy, out, Disk(), overwrite=True)
    assert tree(out) == wanted


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lock", "cannot be written: a pipe or a device is in its place"),
        ("journal.jsonl", "is not a file that has an end"),
        ("model.safetensors.partial", "of the unfinished output is gone|a pipe or a device is in its place"),
        ("config.json.partial", "a pipe or a device is in its place"),
    ],
)
def test_pipes_in_an_output_that_grows(copy, out, name, said):
    def action(call):
        at = call.name == "pwrite" and call.path.name == "journal.jsonl"
        return dies(call, after=True) if at and b"staged" in bytes(call.arguments[1]) else call.really()

    assert run_in_child(lambda: convert(copy, out, Disk(action))) == -9
    in_place_of(out / PARTIAL / name)
    if name == "config.json.partial":
        (copy / "README.md").write_text("so that documents are written again")
    with pytest.raises(KtforgeError, match=said):
        convert(copy, out, Disk())
    assert ("a pipe" in (held(out / PARTIAL) or "")) == (name == "lock")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_files_that_a_command_is_given(tmp_path, kind):
    given = tmp_path / "given.py"
    if kind == "pipe":
        os.mkfifo(given)
    elif kind == "device":
        given.symlink_to("/dev/zero")
    else:
        given.mkdir()
    with pytest.raises(KtforgeError, match=r"given\.py is (not a file that has an end|a folder)"):
        load_pipeline(given, Registry())
    with pytest.raises(KtforgeError, match=r"given\.py is no file that has an end"):
        load_file(given)


def test_a_loader_that_names_a_pipe(copy, out, tmp_path):
    class Named(MemoryLoader):
        name = "named"

        def folder(self):
            return tmp_path

        def side_files(self):
            return [Path("pipe")]

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"it is no file that has an end"):
        Named.model_construct().open_side_file(Path("pipe"))


#: What is made unreadable → what has to be said of it.
UNREADABLE = {
    "config.json": r"config\.json cannot be read: Permission denied",
    "model-00001-of-00002.safetensors": r"model-00001-of-00002\.safetensors cannot be read: Permission denied",
    "model.safetensors.index.json": r"model\.safetensors\.index\.json cannot be read: Permission denied",
    "tokenizer.json": r"tokenizer\.json cannot be read: Permission denied",
    "notes": r"notes cannot be looked into: Permission denied",
    ".": r"model' is not readable",
    "../out": r"out' is not readable",
    "../out/deep": r"out/deep cannot be looked into: Permission denied",
    "../plugin.py": r"plugin.py' is not readable",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_may_not_be_read_is_named(copy, out, tmp_path, name):
    """And nothing else is blamed for it."""
    command = ["convert", "-i", copy, "-o", out, "--plugin", tmp_path / "plugin.py", "--overwrite"]
    (tmp_path / "plugin.py").write_text("import ktforge\n\n\n@ktforge.hookimpl\ndef ktforge_planned(plan):\n    pass\n")
    (out / "deep").mkdir(parents=True)
    (copy / name).chmod(0)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "ktforge", *map(str, command)], capture_output=True, text=True, preexec_fn=as_anybody
        )
    finally:
        (copy / name).chmod(0o700)
    assert run.returncode and re.search(UNREADABLE[name], run.stderr), run.stderr
    assert "Traceback" not in run.stderr and "plugin auto" not in run.stderr and "download" not in run.stderr
    assert not (out / MANIFEST).exists()


#: Folders and files of a checkpoint whose names ktforge needs, in an output or while it grows.
TAKEN = [
    "lock/a.txt",
    "journal.jsonl/a.txt",
    "previous_manifest.json/a.txt",
    "config.json.partial/a.txt",
    "model.safetensors/a.txt",
    "model.safetensors.partial/a.txt",
    f"{MANIFEST}/a.txt",
    f"{MANIFEST}.partial/a.txt",
    "README.md.partial/a.txt",
]


@pytest.mark.parametrize("name", TAKEN)
def test_names_that_ktforge_needs_itself(copy, out, name):
    (copy / "README.md").write_text("a")
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("a")
    with pytest.raises(
        KtforgeError,
        match=r"cannot go into the output, where ktforge needs the name|README.md.partial says so",
    ):
        convert(copy, out, Disk())
    assert not out.exists()


def test_a_file_in_the_place_of_a_folder_of_the_layout(copy, out):
    (copy / "_layer_0").write_text("a")
    with pytest.raises(PlanError, match=r"^_layer_0 cannot go into the output, where ktforge needs the name _layer_0"):
        pipeline(copy, KtFolderWriter(path=out)).run()
    assert not out.exists()
    pipeline(copy, SafetensorsWriter(path=out)).run()


@pytest.mark.parametrize("deep", [b"[" * 999, b'{"pid":' * 140, b"[" * 100_000])
def test_files_of_ktforges_own_that_are_deep(copy, out, deep):
    """A lock, a journal, a manifest and a config that no run wrote."""
    staging = out / PARTIAL
    staging.mkdir(parents=True)
    (staging / "lock").write_bytes(deep)
    assert held(staging) is None
    (staging / "journal.jsonl").write_bytes(deep + b"\n")
    assert not Journal(staging / "journal.jsonl").fingerprint
    (out / MANIFEST).write_bytes(deep)
    (out / "config.json").write_bytes(deep)
    convert(copy, out, Disk(), overwrite=True)
    assert not staging.exists()


@pytest.mark.parametrize("count", [0, -1, 1025, 10**9, True, 2.5, "many"])
def test_workers_are_bounded(copy, out, count):
    with pytest.raises(KtforgeError, match=r"workers is a whole number from 1 to 1,024, not"):
        pipeline(copy, SafetensorsWriter(path=out)).run(workers=count)
    assert not out.exists()
