"""`--verify-output`: what the disk gives back is what was written, or nothing is published."""

import os
from unittest import mock

import checkpoints
import conversions
import judged
import pytest
from judged import LAYOUTS
from ktforge_plugins import SafetensorsWriter
from typer.testing import CliRunner

import ktforge
from ktforge.cli import app
from ktforge.disk import writing
from ktforge.errors import AlreadyDone, OutputError


class BadDisk:
    """Writes another bit of one tensor than it is given, and says nothing."""

    def __init__(self, at):
        self._left = at

    def __getattr__(self, name):
        return getattr(os, name)

    def pwrite(self, descriptor, data, offset):
        self._left -= 1
        content = bytes(data)
        return os.pwrite(descriptor, judged.with_bit_flipped(content) if self._left == 0 else content, offset)


def run(source, out, **options):
    conversions.pipeline(source, SafetensorsWriter(path=out)).run(**options)


@pytest.mark.parametrize("at", [3, 40, 60])
def test_a_disk_that_writes_something_else(source, out, at):
    """Nothing is published, and the next run does not go on with it."""
    with mock.patch.object(writing, "os", BadDisk(at)), pytest.raises(OutputError, match="is not what was written"):
        run(source, out, workers=1, verify_output=True)
    assert not (out / "ktforge_manifest.json").exists() and not list(out.glob("*.safetensors"))
    assert not (out / ".ktforge-partial/journal.jsonl").exists()
    run(source, out, verify_output=True)
    assert judged.verify(out).ok


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_one_is_published_as_ever(source, out, name):
    judged.convert(source, out, name, verify_output=True)
    assert judged.verify(out).ok


def test_an_output_that_is_there_already_is_read_too(source, out):
    run(source, out)
    with pytest.raises(AlreadyDone):
        run(source, out, verify_output=True)
    judged.overwrite(judged.first(out, judged.is_code), judged.with_bit_flipped)
    with pytest.raises(OutputError, match="its hash is another"):
        run(source, out, verify_output=True)


def test_a_document_that_is_another_on_the_disk(source, out):
    """config.json is small, and no less needed."""
    before = writing.write_file

    def write_file(path, data, folders):
        before(path, data.replace(b"qwen3_moe", b"qwen2_moe") if path.name.startswith("config.json") else data, folders)

    with mock.patch.object(writing, "write_file", write_file), pytest.raises(OutputError, match=r"config\.json"):
        run(source, out, verify_output=True)


def test_the_command(source, out):
    done = CliRunner().invoke(app, ["convert", "-i", str(source), "-o", str(out), "--verify-output"])
    assert done.exit_code == 0, done.output
    assert checkpoints.load_output(out) and ktforge.verify(out).ok
