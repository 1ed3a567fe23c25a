"""What goes on, what is refused and why, and who may write."""

import errno
import fcntl
import importlib
import json
import os
import subprocess
import sys

import checkpoints
import pytest
from conversions import convert, model, pipeline, tree
from faults import Disk, dies, run_in_child
from ktforge_plugins import Int8, KtAmx, SafetensorsWriter

from ktforge import CheckpointError, KtforgeError, OutputError, PlanError, PluginError, Registry, Rule, hookimpl
from ktforge.__main__ import main
from ktforge.disk import lock
from ktforge.disk.marks import LOCK, PARTIAL, UNFINISHED
from ktforge.output import folder as output_folder
from ktforge.output import provenance
from ktforge.output.folder import is_unfinished, outlook
from ktforge.output.provenance import unversioned


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return model(tmp_path / "model", 1, 6, 512, 256)


def stop_at(number):
    """Ends a process after so many writes."""

    def action(call):
        return dies(call, after=True) if call.number == number else call.really()

    return Disk(action)


def unfinished(checkpoint, out, number=100):
    assert run_in_child(lambda: convert(checkpoint, out, stop_at(number))) == -9
    assert is_unfinished(out)
    return out


def foreseen(checkpoint, out):
    return outlook(pipeline(checkpoint, SafetensorsWriter(path=out)).plan())


class Seen:
    def __init__(self):
        self.resumed, self.written = [], []

    @hookimpl
    def ktforge_resumed(self, specs):
        self.resumed += [s.name for s in specs]

    @hookimpl
    def ktforge_unit_written(self, spec):
        self.written.append(spec.name)


def test_units_that_are_there_are_not_made_again(copy, out):
    unfinished(copy, out)
    seen = Seen()
    convert(copy, out, Disk(), registry=Registry(seen))
    assert len(seen.resumed) >= 2 and len(seen.written) >= 1
    assert len(seen.resumed) + len(seen.written) == 7 and not set(seen.resumed) & set(seen.written)


def test_restart_begins_anew(copy, out):
    unfinished(copy, out)
    seen = Seen()
    convert(copy, out, Disk(), registry=Registry(seen), restart=True)
    assert seen.resumed == [] and len(seen.written) == 7


def grown(copy):
    with (copy / "model-00001-of-00002.safetensors").open("ab") as opened:
        opened.write(b"x")


def touched(copy):
    os.utime(copy / "model-00002-of-00002.safetensors", ns=(1, 1))


def other_header(copy):
    path = copy / "model-00002-of-00002.safetensors"
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b'"format":"pt"', b'"format":"np"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_config(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "note": 1}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            touched,
            "^model-00002-of-00002.safetensors may have changed: "
            "its modification time is another, with the same size and header\n",
        ),
        (other_header, "^model-00002-of-00002.safetensors has changed: its header is another\n"),
        (other_config, "^config.json has changed\n"),
    ],
)
def test_another_source_is_refused(copy, out, change, message):
    unfinished(copy, out)
    (out / PARTIAL / LOCK).unlink()
    before = tree(out)
    change(copy)
    with pytest.raises(OutputError, match=message + r".*or start over with --restart$"):
        convert(copy, out, Disk())
    assert tree(out) == before
    convert(copy, out, Disk(), restart=True)
    assert not is_unfinished(out)


def test_another_pipeline_is_refused(copy, out):
    unfinished(copy, out)
    other = pipeline(copy, SafetensorsWriter(path=out, max_shard_size="200KB"))
    with pytest.raises(OutputError, match=r"^quantize.use was int4 and is int8\nso the unfinished .* with --restart$"):
        other.model_copy(update={"quantize": Int8()}).run()
    with pytest.raises(OutputError, match=r"^layout.threadpool_count was 1 and is 2\nso the unfinished"):
        other.model_copy(update={"layout": KtAmx(threadpool_count=2)}).run()


def test_another_pipeline_over_a_finished_output_names_both_options(copy, out):
    """--restart alone would not replace what is there, and --overwrite alone would go on."""
    convert(copy, out, Disk())
    assert run_in_child(lambda: convert(copy, out, stop_at(60), overwrite=True)) == -9
    made = pipeline(copy, SafetensorsWriter(path=out, max_shard_size="200KB"))
    other = made.model_copy(update={"quantize": Int8(), "preprocess": ()})
    both = "quantize.use was int4 and is int8"
    for options in ({}, {"overwrite": True}):
        with pytest.raises(OutputError, match=rf"(?s){both}.*or start over with --restart --overwrite$"):
            other.run(**options)
    with pytest.raises(OutputError, match=r"is not empty: choose another folder, or say --restart --overwrite$"):
        other.run(restart=True)
    assert outlook(other.plan()).endswith(f"{both}): --restart --overwrite discards it")
    made.run()
    assert not is_unfinished(out), "what was begun with --overwrite goes on without it"


def test_a_staged_manifest_that_is_gone_beside_an_output_of_before(tiny, out, monkeypatch):
    def stops(*arguments, **options):
        raise KeyboardInterrupt

    made = pipeline(tiny, SafetensorsWriter(path=out))
    made.run()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(output_folder, "publish", stops)
        made.run(overwrite=True)
    (out / PARTIAL / "ktforge_manifest.json.partial").unlink()
    with pytest.raises(
        OutputError, match=r"manifest.json.partial is not in the unfinished output: .* with --restart --overwrite$"
    ):
        made.run()


PLUGIN = """\
from ktforge import hookimpl
from ktforge_plugins import KtAmx

class Mine(KtAmx):
    name = "mine"

@hookimpl
def ktforge_layouts():
    return [Mine]
"""


def test_another_plugin_is_refused(copy, out, tmp_path, monkeypatch, capsys):
    """A file has no version, so its content counts; where it lies does not."""
    plugin, file = tmp_path / "mine.py", tmp_path / "pipeline.yaml"
    plugin.write_text(PLUGIN)
    file.write_text(
        f"loader: {{use: safetensors, path: {copy}}}\nquantize: {{use: int4}}\n"
        f"layout: {{use: mine, threadpool_count: 1}}\nwriter: {{use: safetensors, path: {out}}}\n"
    )
    with monkeypatch.context() as patch:
        fill_up(patch, 20)
        run_main(patch, capsys, "run", str(file), "--plugin", str(plugin))
    assert is_unfinished(out)
    plugin.write_text(PLUGIN + "# mended\n")
    said = run_main(monkeypatch, capsys, "run", str(file), "--plugin", str(plugin))
    assert "error: the code of mine.py has changed\n" in said and "start over with --restart\n" in said
    (tmp_path / "moved").mkdir()
    plugin.rename(tmp_path / "moved" / "mine.py").write_text(PLUGIN)
    run_main(monkeypatch, capsys, "run", str(file), "--plugin", str(tmp_path / "moved" / "mine.py"), status=0)


def test_what_counts_as_code(tmp_path, monkeypatch):
    """A package that is not installed counts with all its modules, and so does the quantizer of a rule."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("STEP = 1\n")
    (package / "stage.py").write_text("from ktforge_plugins import Int8\nclass Mine(Int8):\n    name = 'mine'\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("my_package.stage").Mine()
    plain = pipeline(tmp_path, SafetensorsWriter(path=tmp_path / "out"))
    with_rule = plain.model_copy(update={"rules": (Rule(match="*", quantizer=mine),)})
    assert "my_package" not in unversioned(plain)
    before = unversioned(with_rule)["my_package"]
    (package / ".#core.py").symlink_to("somebody@somewhere.4711")
    assert unversioned(with_rule)["my_package"] == before
    (package / "core.py").write_text("STEP = 2\n")
    assert unversioned(with_rule)["my_package"] != before
    monkeypatch.setattr(provenance, "_is_editable", lambda distribution: False)
    assert unversioned(plain) == {}, "an installed version stands for its code"
    assert unversioned(with_rule).keys() == {"my_package"}


def test_a_moved_checkpoint_is_the_same(copy, out, tmp_path):
    unfinished(copy, out)
    moved = copy.rename(tmp_path / "moved")
    seen = Seen()
    convert(moved, out, Disk(), registry=Registry(seen))
    assert seen.resumed


def test_verify_reads_what_is_there(copy, out):
    unfinished(copy, out)
    (shard,) = (out / PARTIAL).glob("model-00001-*")
    content = shard.read_bytes()
    place = 8 + int.from_bytes(content[:8], "little")
    shard.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(OutputError, match=r"model-00001-\S+: \S+ is not what was written, so the disk may be failing"):
        convert(copy, out, Disk(), verify=True)
    shard.write_bytes(content)
    convert(copy, out, Disk(), verify=True)
    assert not is_unfinished(out)


@pytest.mark.parametrize(("damage", "what"), [(os.unlink, "is gone"), (lambda p: os.truncate(p, 9), "has 9 bytes; ")])
def test_a_file_that_is_not_whole_is_not_trusted(copy, out, damage, what):
    unfinished(copy, out)
    (shard,) = (out / PARTIAL).glob("model-00001-*")
    damage(shard)
    with pytest.raises(OutputError, match=f"of the unfinished output {what}.*: start over with --restart"):
        convert(copy, out, Disk())


@pytest.mark.parametrize("lost", ["ktforge_manifest.json", "config.json"])
def test_a_staged_file_that_is_gone_is_not_published_without(tiny, out, monkeypatch, lost):
    def stops(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(output_folder, "publish", stops)
        pipeline(tiny, SafetensorsWriter(path=out)).run()
    (out / PARTIAL / f"{lost}.partial").unlink()
    with pytest.raises(OutputError, match=r"is not in the unfinished output: .*; start over with --restart$"):
        pipeline(tiny, SafetensorsWriter(path=out)).run()
    assert is_unfinished(out)
    pipeline(tiny, SafetensorsWriter(path=out)).run(restart=True)
    assert not is_unfinished(out) and (out / "ktforge_manifest.json").exists()


def test_an_error_leaves_what_was_made(copy, out, monkeypatch):
    def breaks(self, unit, buffers):
        if unit.spec.unit.name.endswith(".4"):
            raise IndexError("oops")
        pack(self, unit, buffers)

    pack = KtAmx.pack
    with monkeypatch.context() as patch:
        patch.setattr(KtAmx, "pack", breaks)
        patch.setattr(KtAmx, "fused", lambda *_: None)
        with pytest.raises(PluginError, match=r"^plugin kt-amx .* failed on model.layers.0.mlp.experts.4: IndexError"):
            pipeline(copy, SafetensorsWriter(path=out)).run(workers=1)
    seen = Seen()
    pipeline(copy, SafetensorsWriter(path=out)).run(registry=Registry(seen))
    assert len(seen.resumed) == 5


@pytest.mark.parametrize("error", [KeyError("x"), KtforgeError("no"), SystemExit(0), KeyboardInterrupt()])
def test_an_observer_that_fails_does_not_stop_the_run(copy, out, caplog, error):
    class Fails:
        @hookimpl
        def ktforge_unit_written(self, spec):
            raise error

    convert(copy, out, Disk(), registry=Registry(Fails()))
    assert not is_unfinished(out) and (out / "ktforge_manifest.json").exists()
    (message,) = caplog.messages
    assert message.startswith(f"plugin Fails failed in ktforge_unit_written ({type(error).__name__}")


def test_a_side_file_that_is_gone_by_the_end(copy, out):
    class Removes(KtAmx):
        def pack(self, unit, buffers):
            super().pack(unit, buffers)
            (copy / "tokenizer.json").unlink(missing_ok=True)

    removing = pipeline(copy, SafetensorsWriter(path=out)).model_copy(update={"layout": Removes(threadpool_count=1)})
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read: No such file"):
        removing.run()
    assert is_unfinished(out)


def test_a_link_in_the_place_of_a_file_is_not_followed(copy, out, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    unfinished(copy, out)
    (shard,) = (out / PARTIAL).glob("model-00001-*")
    shard.with_name(shard.name.replace("00001-", "00007-")).symlink_to(victim)
    with pytest.raises(OutputError, match=r"model-00007-.* cannot be written: Too many levels of symbolic links"):
        convert(copy, out, Disk())
    assert victim.read_text() == "mine"
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / PARTIAL).symlink_to(tmp_path)
    with pytest.raises(PlanError, match="is a symbolic link, which ktforge does not make"):
        convert(copy, tmp_path / "two", Disk())


@pytest.mark.parametrize("path", ["/tmp/x", "../x", "a/../../x", "", "a\0b"])
def test_a_writer_that_leaves_the_folder_is_refused(copy, out, path):
    class Elsewhere(SafetensorsWriter):
        def plan(self, tensors, formats):
            (file,) = super().plan(tensors, formats)
            return [type(file)(path, file.header, file.tensors)]

    with pytest.raises(PluginError, match="which is outside the output folder"):
        pipeline(copy, Elsewhere(path=out)).run()
    assert not out.exists()


# Locks


def test_one_run_at_a_time(tiny, out):
    held = out / PARTIAL / LOCK
    held.parent.mkdir(parents=True)
    with held.open("w") as opened:
        json.dump({"pid": 4711, "host": "elsewhere"}, opened)
        opened.flush()
        fcntl.flock(opened, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="is being written by process 4711 on elsewhere: wait for it"):
            convert(tiny, out, Disk())
        assert foreseen(tiny, out) == (
            f"{out} is being written by process 4711 on elsewhere: wait for it, or choose another folder"
        )
    with pytest.raises(OutputError, match=rf"whether that still runs cannot be seen from here: .* remove {held}"):
        convert(tiny, out, Disk())
    assert f"remove {held}" in foreseen(tiny, out)
    held.unlink()
    assert foreseen(tiny, out) is None
    convert(tiny, out, Disk())


def test_the_lock_of_a_dead_process_is_stale(tiny, out):
    unfinished(tiny, out, 60)
    assert (out / PARTIAL / LOCK).exists()
    convert(tiny, out, Disk())


def test_without_locks_in_the_file_system_the_process_number_counts(tiny, out, monkeypatch):
    def flock(*arguments):
        raise OSError(38, "not here")

    monkeypatch.setattr(fcntl, "flock", flock)
    held = out / PARTIAL / LOCK
    held.parent.mkdir(parents=True)
    held.write_text(json.dumps({**lock._here(), "pid": os.getppid()}))
    with pytest.raises(OutputError, match=rf"is being written by process {os.getppid()}"):
        convert(tiny, out, Disk())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    held.write_text(json.dumps({**lock._here(), "pid": child.pid}))
    convert(tiny, out, Disk())


# The command


def command(source, out, *more):
    options = ["--input-path", source, "--output", out, "--quant-method", "int4", "--threadpool-count", "1"]
    return [sys.executable, "-m", "ktforge", "convert", *map(str, options), *more]


def run_main(monkeypatch, capsys, *words, status=1):
    """What the command says on stderr."""
    monkeypatch.setattr(sys, "argv", ["ktforge", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    return capsys.readouterr().err


def fill_up(monkeypatch, writes):
    """The disk has room for so many writes."""
    left, write = iter(range(writes)), os.pwrite

    def filling_up(*arguments):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", filling_up)


def test_a_full_disk_says_that_the_output_can_go_on(copy, out, monkeypatch, capsys):
    fill_up(monkeypatch, 20)
    said = run_main(monkeypatch, capsys, "convert", *command(copy, out)[4:])
    assert "No space left on device" in said
    assert f"{out} is unfinished: the same command goes on where it stopped" in said


def test_a_damaged_source_does_not_say_so(copy, out, monkeypatch, capsys):
    data = checkpoints.load_output(copy)
    name = checkpoints.expert_name(0, 5, "down")
    data[name][0, 0] = float("nan")
    checkpoints.write(copy, data, json.loads((copy / "config.json").read_text()), 2)
    said = run_main(monkeypatch, capsys, "convert", *command(copy, out)[4:])
    assert f"{name} is NaN or infinite" in said and "\nerror: " in said
    assert "goes on where it stopped" not in said, "a good copy is another source"


def test_what_would_steer_a_terminal_is_spelled_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ktforge", *command(tmp_path / "\x1b[2Jgone", tmp_path / "out")[3:]])
    with pytest.raises(SystemExit):
        main()
    assert "\\x1b[2Jgone does not exist" in capsys.readouterr().err


def test_an_unfinished_output_is_no_source(copy, out, tmp_path):
    convert(copy, out, Disk())
    (out / UNFINISHED).touch()
    with pytest.raises(CheckpointError, match=r"is an unfinished output of ktforge.*: run the same command again"):
        convert(out, tmp_path / "next", Disk())
