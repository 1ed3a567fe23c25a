"""What is not the run's own: folders of other runs, files that a forged manifest lists, links, pipes."""

import json
import os
import shutil

import pytest
from conversions import convert, model, pipeline, tree
from faults import Disk, dies, run_in_child
from ktforge_plugins import KtFolderWriter, SafetensorsLoader, SafetensorsWriter

from ktforge import CheckpointError, KtforgeError, OutputError
from ktforge.disk.marks import MANIFEST, PARTIAL, UNFINISHED


def with_notes(folder):
    """A side file in a folder of its own."""
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("a")
    return folder


@pytest.fixture
def copy(tmp_path):
    return with_notes(model(tmp_path / "model", 1, 3, 128, 128))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with tensors of the same names and sizes, and other bytes."""
    folder = with_notes(model(tmp_path_factory.mktemp("other") / "model", 1, 3, 128, 128))
    for path in folder.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-100:] = bytes(100)
        path.write_bytes(content)
    return folder


@pytest.mark.parametrize("ends", ["UNFINISHED", "tokenizer.json", None])
@pytest.mark.parametrize(
    "point",
    [
        ("pwrite", "model.safetensors", 3),
        ("pwrite", "journal.jsonl", 3),
        ("fsync", "index.json", 1),
        ("fsync", MANIFEST, 1),
        ("fsync", UNFINISHED, 1),
        ("fsync", "out", 2),
        ("open", "model.safetensors", 1),
        ("mkdir", "notes", 1),
        ("open", "tokenizer.json", 1),
        ("open", UNFINISHED, 1),
        ("replace", "model.safetensors", 1),
        ("replace", MANIFEST, 1),
        ("unlink", UNFINISHED, 1),
    ],
)
def test_a_folder_that_another_run_has_is_left_to_it(copy, other, out, tmp_path, ends, point):
    """The first run is stopped, its folder moved away, and another one begins at its path; then the first goes on. The
    call that it was stopped before is made to the folder that it began in, too."""
    convert(other, out, Disk())
    wanted = tree(out)
    shutil.rmtree(out)
    name, file, count = point
    seen = []

    def killed_at(call):
        return dies(call, after=False) if ends and call.name == "pwrite" and ends in call.path.name else call.really()

    def action(call):
        if call.name == name and file in call.path.name:
            seen.append(call)
            if len(seen) == count:
                out.rename(tmp_path / "moved")
                assert run_in_child(lambda: convert(other, out, Disk(killed_at))) == (-9 if ends else 0)
                seen.append(tree(out))
        return call.really()

    with pytest.raises(OutputError, match=r"was moved, removed or replaced while the run worked"):
        convert(copy, out, Disk(action))
    assert tree(out) == seen[count]
    if ends:
        convert(other, out, Disk())
    assert tree(out) == wanted
    shutil.rmtree(out)
    (tmp_path / "moved").rename(out)
    convert(copy, out, Disk())


@pytest.mark.parametrize("call", ["open model.safetensors", "replace model.safetensors", f"replace {MANIFEST}"])
def test_a_staging_folder_that_another_run_has_is_left_to_it(copy, out, tmp_path, call):
    """The output folder is the same, and what the first run had staged there is gone."""
    name, file = call.split()
    staging = out / PARTIAL

    def action(made):
        if made.name == name and file in made.path.name and not (tmp_path / "aside").exists():
            staging.rename(tmp_path / "aside")
            staging.mkdir()
            (staging / (file + ".partial")).write_text("of another run")
            (staging / "lock").write_text("{}")
        return made.really()

    with pytest.raises(OutputError, match=r"was moved, removed or replaced while the run worked"):
        convert(copy, out, Disk(action))
    assert {p.name: p.read_text() for p in staging.iterdir()} == {f"{file}.partial": "of another run", "lock": "{}"}
    assert (out / MANIFEST).exists() == (call == f"replace {MANIFEST}")


def test_no_link_within_the_output_is_followed(copy, out, tmp_path):
    """Not even one that was put there between the look at it and the call."""
    (tmp_path / "elsewhere").mkdir()

    def action(made):
        if made.name == "replace" and made.path.name == "model.safetensors" and (out / "notes").is_dir():
            shutil.rmtree(out / "notes")
            (out / "notes").symlink_to(tmp_path / "elsewhere")
        return made.really()

    with pytest.raises(OutputError, match=r"a\.txt cannot be written: (Not a directory|Too many levels)"):
        convert(copy, out, Disk(action))
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(OutputError, match=r"notes.*symbolic link"):
        convert(copy, out, Disk())
    (out / "notes").unlink()
    (out / "notes").symlink_to(out)
    with pytest.raises(OutputError, match=r"a\.txt would lie behind .*notes, a symbolic link, which ktforge does not"):
        convert(copy, out, Disk())
    (out / "notes").unlink()
    convert(copy, out, Disk())
    assert (out / "notes" / "a.txt").read_text() == "a"


FORGED = [
    f"{PARTIAL}/model.safetensors.partial",
    f"./{PARTIAL}/config.json.partial",
    f"notes/../{PARTIAL}/lock",
    ".git/config",
    "mine.gguf",
    "notes/mine.BIN",
    "/etc/hostname",
    "../elsewhere.txt",
    "a\0b",
    "",
    ".",
    "x" * 5000,
]


@pytest.mark.parametrize("listed", [FORGED, {"a": 1}, "notes", 7, None, [1, ["x"]]])
def test_a_manifest_is_a_stranger(copy, other, out, tmp_path, listed):
    for folder in (out / ".git", out / "notes"):
        folder.mkdir(parents=True)
    mine = [out / ".git" / "config", out / "mine.gguf", out / "notes" / "mine.BIN", tmp_path / "elsewhere.txt"]
    for path in mine:
        path.write_text("mine")
    shutil.copy(next(other.glob("*.safetensors")), out / "model.safetensors")
    (out / MANIFEST).write_text(json.dumps({"side_files": listed}))
    convert(copy, tmp_path / "alone", Disk())
    convert(copy, out, Disk(), overwrite=True)
    assert all(path.read_text() == "mine" for path in mine)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "alone" / "model.safetensors").read_bytes()


def test_nothing_behind_a_link_goes_and_nothing_goes_before_a_refusal(copy, out, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    pipeline(copy, KtFolderWriter(path=elsewhere)).run()
    pipeline(copy, KtFolderWriter(path=out)).run()
    (out / "_layer_9").symlink_to(elsewhere / "_layer_0")
    (out / "_layer_notes").mkdir()
    (elsewhere / "_layer_0" / "_numa_9").mkdir()
    before, there = tree(out), tree(elsewhere)
    with pytest.raises(OutputError, match=r"_layer_9/.* would lie outside .* behind a symbolic link: remove the link$"):
        convert(copy, out, Disk(), overwrite=True)
    assert {n: h for n, h in tree(out).items() if not n.startswith(PARTIAL)} == before and tree(elsewhere) == there
    assert not (out / UNFINISHED).exists()
    (out / "_layer_9").unlink()
    convert(copy, out, Disk())
    assert tree(elsewhere) == there and (elsewhere / "_layer_0" / "_numa_9").is_dir()
    assert (out / "_layer_notes").is_dir() and not (out / "_layer_0").exists()


def test_a_side_file_that_becomes_a_link_is_not_followed(copy, out, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")

    def action(call):
        if call.name == "fsync" and "index.json" in call.path.name:
            (copy / "tokenizer.json").unlink()
            (copy / "tokenizer.json").symlink_to(secret)
        return call.really()

    with pytest.raises(CheckpointError, match=r"tokenizer.json is a link to .*secret, outside the checkpoint"):
        convert(copy, out, Disk(action))
    assert not any(p.is_file() and p.read_bytes() == b"secret" for p in out.rglob("*"))


@pytest.mark.parametrize("name", ["mtp.safetensors", "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("behind_a_link", [False, True])
def test_a_pipe_keeps_nobody_waiting(copy, out, tmp_path, name, behind_a_link):
    pipe = tmp_path / "pipe" if behind_a_link else copy / name
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(pipe)
    if behind_a_link:
        (copy / name).symlink_to(pipe)
    try:
        pipeline(copy, SafetensorsWriter(path=out)).run()
    except KtforgeError as error:
        assert name in str(error)
    else:
        assert not behind_a_link and name == "mtp.safetensors", "a pipe is no file of the folder, unless one is named"


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_pipe_in_the_place_of_a_file_that_was_scanned(copy, io):
    loader = SafetensorsLoader(path=copy, io=io)
    spec = max(loader.scan(), key=lambda s: s.nbytes)
    spec.file.unlink()
    os.mkfifo(spec.file)
    with pytest.raises(CheckpointError, match=r"is not a file that has an end"):
        loader.read(spec)
