"""What --overwrite takes away, what it leaves, and what it refuses: never a file that is not in the way."""

import errno
import shutil

import pytest
from conversions import convert, model, tree
from faults import Disk, dies, fails, run_in_child

from ktforge import OutputError, PlanError
from ktforge.disk.marks import PARTIAL, UNFINISHED
from ktforge.output.folder import is_unfinished


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A checkpoint that ktforge did not write, with more shards than the output will have."""
    return model(tmp_path_factory.mktemp("other") / "model", 1, 2, 128, 128, shards=5)


@pytest.fixture
def foreign(other, out):
    shutil.copytree(other, out)
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("mine")
    (out / "linked.safetensors").symlink_to(other / "model-00001-of-00005.safetensors")
    (out / "gone.safetensors").symlink_to(out / "nowhere")
    (out / "link").symlink_to(other)
    return out


def at_the_end(call):
    return fails(errno.EIO)(call) if call.path.name == UNFINISHED else call.really()


def test_foreign_weights_go_when_the_new_ones_are_there_and_nothing_else_does(tiny, foreign, other):
    before, elsewhere = tree(foreign), tree(other)
    convert(tiny, foreign.parent / "alone", Disk())
    with pytest.raises(OutputError, match="UNFINISHED"):
        convert(tiny, foreign, Disk(at_the_end), overwrite=True)
    assert {n: h for n, h in tree(foreign).items() if not n.startswith(PARTIAL)} == before
    convert(tiny, foreign, Disk(), overwrite=True)
    assert {p.name for p in foreign.glob("*.safetensors")} == {
        p.name for p in (foreign.parent / "alone").glob("*.safetensors")
    }
    assert tree(other) == elsewhere, "a link goes, and what it leads to stays"
    assert (foreign / "notes" / "mine.txt").read_text() == "mine" and (foreign / "link").is_symlink()


@pytest.mark.parametrize("place", ["old/model.safetensors", ".cache/a/b.safetensors"])
def test_weights_below_are_refused_before_the_first_byte(tiny, foreign, place):
    (foreign / place).parent.mkdir(parents=True)
    (foreign / place).write_bytes(b"weights")
    before = tree(foreign)
    with pytest.raises(PlanError, match=f"{place} holds weights, and a loader that walks .* move them elsewhere$"):
        convert(tiny, foreign, Disk(), overwrite=True)
    assert tree(foreign) == before


@pytest.mark.parametrize("name", ["other.safetensors", "pytorch_model.bin", "config.json", "sub/other.safetensors"])
def test_what_appears_while_a_run_works_is_not_taken_away(tiny, out, name):
    def action(call):
        if call.name == "ftruncate" and "model-" in call.path.name:
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text("mine")
        return call.really()

    with pytest.raises(OutputError, match=f"{name} (has appeared since the run began|holds weights)"):
        convert(tiny, out, Disk(action))
    assert (out / name).read_text() == "mine" and not (out / UNFINISHED).exists()
    (out / name).unlink()
    convert(tiny, out, Disk())
    assert not is_unfinished(out)


def test_what_a_restart_discards_is_in_nobodys_way(tiny, out):
    """Killed while its files were renamed, then begun anew: what was published is no stranger's."""

    def action(call):
        return dies(call, after=True) if call.name == "replace" and call.path.name == "config.json" else call.really()

    assert run_in_child(lambda: convert(tiny, out, Disk(action))) == -9
    assert (out / UNFINISHED).exists() and (out / "config.json").exists()
    convert(tiny, out, Disk(), restart=True)
    assert not is_unfinished(out) and not (out / UNFINISHED).exists()
