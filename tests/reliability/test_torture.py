"""Runs that are killed, by SIGKILL or with the power, and go on: the output is that of a run which nobody disturbed."""

import random
import shutil

import pytest
from conversions import convert, loader_accepts, pipeline, tree
from faults import Disk, Power, dies, run_in_child
from ktforge_plugins import KtFolderWriter

from ktforge.disk.marks import PARTIAL, UNFINISHED
from ktforge.output.folder import is_unfinished

#: (call, file, which one of these calls) between any two of which something of note has happened.
POINTS = [
    ("mkdir", ".ktforge-partial", 1),
    ("pwrite", "lock", 1),
    ("open", "journal.jsonl", 1),
    ("pwrite", "journal.jsonl", 1),
    ("fsync", "journal.jsonl", 1),
    ("open", "model-00001", 1),
    ("ftruncate", "model-00001", 1),
    ("pwrite", "model-00001", 1),
    ("pwrite", "model-00001", 2),
    ("fsync", "model-00001", 1),
    ("fsync", ".ktforge-partial", 2),
    ("pwrite", "journal.jsonl", 2),
    ("fsync", "journal.jsonl", 2),
    ("pwrite", "journal.jsonl", 5),
    ("pwrite", "index.json", 1),
    ("fsync", "ktforge_manifest.json", 1),
    ("pwrite", "tokenizer.json", 1),
    ("pwrite", UNFINISHED, 1),
    ("fsync", UNFINISHED, 1),
    ("fsync", "out", 1),
    ("replace", "previous_manifest", 1),
    ("unlink", "_scale_.kt", 1),
    ("unlink", "_scale_.kt", 6),
    ("rmdir", "_layer_0", 1),
    ("replace", "model-00001", 1),
    ("replace", "model-00003", 1),
    ("replace", "index.json", 1),
    ("replace", "config.json", 1),
    ("replace", "ktforge_manifest.json", 1),
    ("unlink", UNFINISHED, 1),
    ("unlink", "journal.jsonl", 1),
    ("unlink", "lock", 1),
    ("rmdir", ".ktforge-partial", 1),
]


def weights_and_documents(folder):
    return {n: h for n, h in tree(folder).items() if not n.startswith(PARTIAL)}


def check_cut_off(out, before, wanted, where):
    """What is there now is the old output, the new one, or something that no loader takes."""
    found = weights_and_documents(out) if out.exists() else {}
    assert found in (before, wanted) or not loader_accepts(out), where
    assert "ktforge_manifest.json" not in found or found == before or loader_accepts(out) == (found == wanted), where
    return found == wanted


@pytest.mark.parametrize("end", ["before", "after", "power"])
def test_a_run_may_be_killed_at_any_chosen_point(tiny, tmp_path, end):
    out, old = tmp_path / "out", tmp_path / "old"
    pipeline(tiny, KtFolderWriter(path=old)).run()
    before = tree(old)
    shutil.copytree(old, out)
    convert(tiny, out, Disk(), overwrite=True)
    wanted = tree(out)
    for name, file, count in POINTS:
        shutil.rmtree(out)
        shutil.copytree(old, out)
        power = Power(tmp_path / "attic")
        seen = []

        def action(call, name=name, file=file, count=count, power=power, seen=seen):
            if call.name == name and file in call.path.name:
                seen.append(call)
                if len(seen) == count:
                    power.cut() if end == "power" else dies(call, after=end == "after")
            return power.run(call) if end == "power" else call.really()

        where = f"{end} {name} {file} {count}"
        assert run_in_child(lambda action=action: convert(tiny, out, Disk(action), overwrite=True)) == -9, where
        done = check_cut_off(out, before, wanted, where)
        if not done or is_unfinished(out):
            convert(tiny, out, Disk(), overwrite=not (out / UNFINISHED).exists())
            assert tree(out) == wanted, where
        shutil.rmtree(tmp_path / "attic")


@pytest.mark.parametrize(("workers", "save_every", "kills"), [(1, 0.0, 40), (2, 0.02, 20)])
def test_a_run_may_be_killed_any_number_of_times(many, tmp_path, workers, save_every, kills):
    out = tmp_path / "out"
    options = {"workers": workers, "save_every": save_every, "shard": "100KB"}
    total = len(convert(many, out, Disk(), **options))
    wanted = tree(out)
    shutil.rmtree(out)
    chance = random.Random(workers)
    killed = 0
    while True:
        number, after = chance.randint(1, total // kills), chance.random() < 0.5

        def action(call, number=number if killed < kills else None, after=after):
            return dies(call, after=after) if call.number == number else call.really()

        status = run_in_child(lambda action=action: convert(many, out, Disk(action), **options))
        assert status in (-9, 0), "a run neither finished nor was killed"
        if check_cut_off(out, {}, wanted, killed) or status == 0:
            break
        killed += 1
    assert killed == kills
    if is_unfinished(out):
        convert(many, out, Disk(), **options)
    assert weights_and_documents(out) == wanted
