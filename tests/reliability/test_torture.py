"""Runs that are killed, by SIGKILL or with the power, and go on: the output is that of a run which nobody disturbed."""

import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from conversions import convert, loader_accepts, pipeline, tree
from faults import Call, Disk, Power, dies, run_in_child
from ktforge_plugins import KtFolderWriter

from ktforge.disk.marks import PARTIAL, UNFINISHED
from ktforge.output.folder import is_unfinished


class Point(NamedTuple):
    """The first call of a kind to a file; ``when``, of the call and those before it, says which, if any would not do.

    ``replaces``: it only comes where an output is replaced.
    """

    call: str
    file: str
    when: Callable[[Call, list[str]], bool] = lambda call, before: True
    replaces: bool = False

    def is_at(self, call: Call, before: list[str]) -> bool:
        return call.name == self.call and self.file in call.path.name and self.when(call, before)


def notes(what: bytes) -> Callable[[Call, list[str]], bool]:
    """A line of the journal that says so."""
    return lambda call, before: what in bytes(call.arguments[1])


def behind(earlier: str) -> Callable[[Call, list[str]], bool]:
    return lambda call, before: any(earlier in made for made in before)


def is_alone(call: Call, before: list[str]) -> bool:
    """In its folder."""
    return len(list(call.path.parent.iterdir())) == 1


def is_last_shard(call: Call, before: list[str]) -> bool:
    number, count = re.search(r"model-(\d+)-of-(\d+)", call.path.name).groups()
    return number == count


#: Between any two of these something of note has happened.
POINTS = {
    "the staging folder is made": Point("mkdir", PARTIAL),
    "the lock is signed": Point("pwrite", "lock"),
    "the journal is opened": Point("open", "journal.jsonl"),
    "the journal is begun": Point("pwrite", "journal.jsonl", notes(b'"fingerprint"')),
    "its beginning is synced": Point("fsync", "journal.jsonl"),
    "its name is synced": Point("fsync", PARTIAL, behind("fsync journal.jsonl")),
    "a shard is opened": Point("open", "model-00001"),
    "a shard gets its size": Point("ftruncate", "model-00001"),
    "a header is written": Point("pwrite", "model-00001", lambda call, _: call.arguments[2] == 0),
    "a tensor is written": Point("pwrite", "model-00001", lambda call, _: call.arguments[2] > 0),
    "a tensor is synced": Point("fsync", "model-00001"),
    "the names of shards are synced": Point("fsync", PARTIAL, behind("fsync model-00001")),
    "a tensor is noted": Point("pwrite", "journal.jsonl", notes(b'"written"')),
    "the note is synced": Point("fsync", "journal.jsonl", behind("fsync model-00001")),
    "a tensor of another expert is noted": Point("pwrite", "journal.jsonl", notes(b"_exps.1.numa.0.weight")),
    "the last shard is opened": Point("open", "model-0000", is_last_shard),
    "the index is written": Point("pwrite", "index.json"),
    "the manifest is synced": Point("fsync", "ktforge_manifest.json"),
    "a side file is copied": Point("pwrite", "tokenizer.json"),
    "a side file is synced": Point("fsync", "tokenizer.json"),
    "all is noted as ready": Point("pwrite", "journal.jsonl", notes(b'"staged"')),
    "that note is synced": Point("fsync", "journal.jsonl", behind("fsync tokenizer.json")),
    "the mark is written": Point("pwrite", UNFINISHED),
    "the mark is synced": Point("fsync", UNFINISHED),
    "the mark's name is synced": Point("fsync", "out", behind(f"fsync {UNFINISHED}")),
    "the old manifest is put aside": Point("replace", "previous_manifest", replaces=True),
    "an old weight goes": Point("unlink", ".kt", replaces=True),
    "the last of a folder goes": Point("unlink", ".kt", is_alone, replaces=True),
    "an old folder goes": Point("rmdir", "_layer_0", replaces=True),
    "the first shard takes its name": Point("replace", "model-00001"),
    "the last shard takes its name": Point("replace", "model-0000", is_last_shard),
    "a side file takes its name": Point("replace", "tokenizer.json"),
    "the index takes its name": Point("replace", "index.json"),
    "config.json takes its name": Point("replace", "config.json"),
    "their names are synced": Point("fsync", "out", behind("replace model.safetensors.index.json")),
    "the manifest takes its name": Point("replace", "ktforge_manifest.json"),
    "the manifest's name is synced": Point("fsync", "out", behind("replace ktforge_manifest.json")),
    "the mark goes": Point("unlink", UNFINISHED),
    "that it has gone is synced": Point("fsync", "out", behind(f"unlink {UNFINISHED}")),
    "the journal goes": Point("unlink", "journal.jsonl"),
    "the lock goes": Point("unlink", "lock"),
    "the staging folder goes": Point("rmdir", PARTIAL),
}  # fmt: skip

#: How a run ends, before or after a call or with the power, and which of the names that are not synced a power cut
#: leaves: none, all but the oldest, the newest alone, or any.
ENDS: dict[str, Callable[[int, int], bool] | None] = {
    "before": None,
    "after": None,
    "power, no name is left": lambda place, count: False,
    "power, the oldest is lost": lambda place, count: place > 0,
    "power, the newest is left": lambda place, count: place == count - 1,
    "power, half are left": lambda place, count: random.Random(f"{place} of {count}").random() < 0.5,
}


def weights_and_documents(folder):
    return {n: h for n, h in tree(folder).items() if not n.startswith(PARTIAL)}


def check_cut_off(out, before, wanted, where):
    """What is there now is the old output, the new one, or something that no loader takes."""
    found = weights_and_documents(out) if out.exists() else {}
    assert found in (before, wanted) or not loader_accepts(out), where
    assert "ktforge_manifest.json" not in found or found == before or loader_accepts(out) == (found == wanted), where
    return found == wanted


@pytest.mark.parametrize(
    ("end", "replaces"),
    [
        *((end, True) for end in ENDS if end != "power, the newest is left"),
        *((end, False) for end in list(ENDS)[3:]),  # where nothing was, each name that comes back is the run's own
    ],
)
def test_a_run_may_be_killed_at_any_chosen_point(tiny, tmp_path, end, replaces):
    out, old = tmp_path / "out", tmp_path / "old"
    pipeline(tiny, KtFolderWriter(path=old)).run()
    before = tree(old) if replaces else {}

    def begin():
        shutil.rmtree(out, ignore_errors=True)
        if replaces:
            shutil.copytree(old, out)

    begin()
    convert(tiny, out, Disk(), overwrite=replaces)
    wanted = tree(out)
    for where, point in POINTS.items():
        if point.replaces and not replaces:
            continue
        begin()
        cut_off(tmp_path / "attic", end, point, where, lambda disk: convert(tiny, out, disk, overwrite=replaces))
        done = check_cut_off(out, before, wanted, where)
        if not done or is_unfinished(out):
            convert(tiny, out, Disk(), overwrite=replaces and not (out / UNFINISHED).exists())
            assert tree(out) == wanted, where


def cut_off(attic, end, point, where, work):
    """Ends a run in a process of its own at a point."""
    power, made = Power(attic, ENDS[end] or (lambda place, count: True)), []

    def action(call):
        if point.is_at(call, made):
            power.cut() if ENDS[end] else dies(call, after=end == "after")
        made.append(f"{call.name} {call.path.name}")
        return power.run(call) if ENDS[end] else call.really()

    assert run_in_child(lambda: work(Disk(action))) == -9, where
    shutil.rmtree(attic)


#: Those at which names of folders within folders count.
IN_FOLDERS = ["a tensor of another expert is noted", "all is noted as ready", "the mark is written",
              "config.json takes its name", "the manifest takes its name", "the mark goes", "the journal goes",
              "the staging folder goes"]  # fmt: skip


@pytest.mark.parametrize("end", list(ENDS)[2:])
def test_names_of_folders_survive_the_power(tiny, tmp_path, end):
    """The files of a kt-folder are two folders deep, and nothing but what made these syncs their names."""
    out = tmp_path / "out"
    convert(tiny, out, Disk(), writer=KtFolderWriter)
    wanted = tree(out)
    for where in IN_FOLDERS:
        shutil.rmtree(out)
        work = partial(convert, tiny, out, writer=KtFolderWriter)
        cut_off(tmp_path / "attic", end, POINTS[where], where, work)
        done = check_cut_off(out, {}, wanted, where)
        if not done or is_unfinished(out):
            convert(tiny, out, Disk(), writer=KtFolderWriter)
            assert tree(out) == wanted, where


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
