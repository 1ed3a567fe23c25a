"""Folders as people have them: what can be read is read right, what cannot is named with the mend."""

import json
import os

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16
from ktforge_plugins import AutoLoader, BinLoader, Int4, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter

from ktforge import CheckpointError, Pipeline
from ktforge.checkpoint.folder import CheckpointFolder
from ktforge.disk.marks import JOURNAL, PARTIAL
from ktforge.disk.reading import JSON_LIMIT
from ktforge.testing import MemoryWriter

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """The small model in three shards with an index."""
    return checkpoints.write(tmp_path / "model", checkpoints.tensors(), checkpoints.config(), 3)


def refusals(folder, loader=AutoLoader) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Pipeline(loader=loader(path=folder), writer=MemoryWriter()).plan()
    return [p.replace(str(folder), "DIR") for p in caught.value.problems]


def scanned(folder, loader=AutoLoader) -> dict[str, np.ndarray]:
    opened = loader(path=folder)
    return {spec.name: opened.read(spec) for spec in opened.scan()}


def assert_same(made, expected):
    assert made.keys() == expected.keys()
    assert all(made[n].tobytes() == a.tobytes() for n, a in expected.items())


def test_a_journal_that_is_too_large_is_not_read(tmp_path):
    journal = tmp_path / PARTIAL / JOURNAL
    journal.parent.mkdir()
    journal.touch()
    os.truncate(journal, JSON_LIMIT + 1)
    with pytest.raises(CheckpointError, match=r"journal.jsonl has 100,000,001 bytes: too many to be what its name"):
        CheckpointFolder(tmp_path).check()


def test_shards_in_sub_folders_may_have_equal_names(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    places = {f"model-{i:05}-of-00003.safetensors": f"part{i}/model.safetensors" for i in (1, 2, 3)}
    for old, new in places.items():
        (folder / new).parent.mkdir()
        (folder / old).rename(folder / new)
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: places[f] for n, f in weight_map.items()}}))
    assert_same(scanned(folder), checkpoints.tensors())
    out = folder.parent / "out"
    Pipeline(loader=AutoLoader(path=folder), writer=SafetensorsWriter(path=out)).run()
    sources = json.loads((out / "ktforge_manifest.json").read_text())["source"]
    assert [s["file"] for s in sources] == sorted(places.values())


def test_without_an_index_sub_folders_are_only_pointed_to(folder):
    (folder / "fp32").mkdir()
    for shard in folder.glob("*.safetensors"):
        shard.rename(folder / "fp32" / shard.name)
    (folder / INDEX).unlink()
    assert refusals(folder) == ["DIR has no index, and *.safetensors only in sub-folders: give one of DIR/fp32"]


def test_a_folder_without_a_checkpoint_is_not_walked_through(folder, monkeypatch):
    """It may be a home directory or a whole disk."""
    (folder / "one" / "two" / "three").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for number, shard in enumerate(sorted(folder.glob("*.safetensors"))):
        shard.rename(folder / ("one/two/three" if number else ".hidden") / shard.name)
    (folder / INDEX).unlink()
    (folder / "config.json").unlink()

    def walked(*arguments):
        raise AssertionError("all files below were looked for")

    monkeypatch.setattr(type(folder), "rglob", walked)
    assert refusals(folder) == [
        "DIR/config.json is missing: download it again, or give the folder that holds it",
        "DIR has no index, and *.safetensors only in sub-folders: give one of DIR/one/two/three",
    ]


@pytest.mark.parametrize("index", [True, False])
def test_copies_under_the_publishers_names_are_left_alone(folder, index):
    data = {"layers.0.attention.wq.weight": np.zeros((4, 4), BF16)}
    checkpoints.save_file(data, folder / "consolidated.safetensors")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x")
    checkpoints.save_file(data, folder / "original" / "consolidated.safetensors")
    if not index:
        (folder / INDEX).unlink()
    assert_same(scanned(folder), checkpoints.tensors())


def test_a_consolidated_file_alone_is_read(tmp_path):
    folder = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config())
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert_same(scanned(folder), checkpoints.tensors())


def test_a_file_of_prediction_heads_needs_no_index(folder):
    extra = {"model.mtp_block.enorm.weight": np.ones(4, BF16)}
    checkpoints.save_file(extra, folder / "mtp.safetensors")
    for mtp, expected in (("keep", checkpoints.tensors() | extra), ("omit", checkpoints.tensors())):
        writer = MemoryWriter()
        plan = Pipeline(loader=AutoLoader(path=folder), writer=writer, mtp=mtp).run().plan
        assert_same(writer.tensors, expected)
        assert [t.name for t in plan.left_out] == ([] if mtp == "keep" else list(extra))


def test_index_and_shards_that_disagree(folder):
    checkpoints.save_file({"x": np.ones(1, BF16)}, folder / "model-00009-of-00009.safetensors")
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refusals(folder) == [
        f"DIR/{INDEX} names model-00002-of-00003.safetensors, which is missing: download it again",
        f"DIR/model-00009-of-00009.safetensors is not in {INDEX}: remove it, or get the index that belongs to it",
    ]


def test_without_an_index_the_names_tell_what_is_missing(folder):
    (folder / INDEX).unlink()
    assert_same(scanned(folder), checkpoints.tensors())
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refusals(folder) == ["DIR/model-00002-of-00003.safetensors is missing: download it again"]


def test_a_tensor_in_two_shards(folder):
    (folder / INDEX).unlink()
    checkpoints.save_file({"model.norm.weight": np.zeros(256, BF16)}, folder / "more.safetensors")
    (problem,) = refusals(folder)
    assert problem.startswith("DIR/model-0000") and "DIR/more.safetensors both hold model.norm.weight, and" in problem


def test_weight_and_scale_may_be_in_different_shards(tmp_path):
    one = checkpoints.fp8_checkpoint(tmp_path / "one", (128, 128))
    data = scanned(one)
    sort = sorted(data, key=lambda n: n.endswith("_scale_inv"))
    config = json.loads((one / "config.json").read_text())
    results = []
    for folder in (one, checkpoints.write(tmp_path / "two", {n: data[n] for n in sort}, config, 3)):
        writer = MemoryWriter()
        Pipeline(
            loader=SafetensorsLoader(path=folder), preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(),
            writer=writer,
        ).run()  # fmt: skip
        results.append(writer.tensors)
    assert_same(*results)


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "config.json", "tokenizer.json", INDEX])
def test_a_git_lfs_pointer_is_called_one(folder, name):
    (folder / name).write_text(POINTER)
    assert refusals(folder) == [
        f"DIR/{name} is a Git-LFS pointer, not the file itself: run `git lfs pull` in its repository"
    ]


def test_pointers_in_place_of_bin_files(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_text(POINTER)
    assert "DIR/pytorch_model.bin is a Git-LFS pointer" in refusals(folder)[0]


@pytest.mark.parametrize("cut", [4, 200, -1])
def test_a_truncated_download_names_the_file(folder, cut):
    path = folder / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    (problem,) = refusals(folder)
    assert problem.startswith(f"DIR/{path.name}") and "download it again" in problem


def test_places_that_are_no_checkpoint(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusals(empty) == ["DIR is empty: give the folder that holds config.json"]
    assert refusals(tmp_path / "nowhere") == ["DIR does not exist"]
    assert refusals(folder / "config.json") == ["DIR is not a folder: give the folder that holds config.json"]
    (folder / "config.json").unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refusals(folder) == [
        "DIR/config.json is missing: download it again, or give the folder that holds it",
        f"DIR/{INDEX} names model-00002-of-00003.safetensors, which is missing: download it again",
    ]


def hub_cache(tmp_path, folder):
    """The same files as huggingface_hub caches them: a snapshot of links to blobs."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123abc"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(p for p in folder.iterdir() if p.is_file()):
        (cache / "blobs" / str(number)).write_bytes(path.read_bytes())
        os.symlink(f"../../blobs/{number}", snapshot / path.name)
    return cache, snapshot


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(tmp_path, folder):
    cache, snapshot = hub_cache(tmp_path, folder)
    assert_same(scanned(snapshot), checkpoints.tensors())
    out = tmp_path / "out"
    Pipeline(loader=AutoLoader(path=snapshot), writer=SafetensorsWriter(path=out)).run()
    assert not any(p.is_symlink() for p in out.iterdir())
    assert (out / "tokenizer.json").read_text() == checkpoints.SIDE_FILES["tokenizer.json"]
    assert refusals(cache) == ["DIR is a folder of the hub's cache: give one of its snapshots: DIR/snapshots/0123abc"]


@pytest.mark.parametrize("index", [True, False])
def test_a_link_to_nothing_is_a_missing_file(tmp_path, folder, index):
    _, snapshot = hub_cache(tmp_path, folder)
    (snapshot / "model-00003-of-00003.safetensors").resolve().unlink()
    if not index:
        (snapshot / INDEX).unlink()
    (problem,) = refusals(snapshot)
    assert "model-00003-of-00003.safetensors" in problem and "download it again" in problem


def test_tied_weights_of_a_bin_file_are_written_each(tmp_path):
    import torch

    shared = torch.arange(64 * 256, dtype=torch.float32).reshape(64, 256)
    state = {"model.embed_tokens.weight": shared, "lm_head.weight": shared, "tail.weight": shared[32:].t()}
    checkpoints.write(tmp_path, {}, checkpoints.config())
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(scanned(tmp_path, BinLoader), {n: t.contiguous().numpy() for n, t in state.items()})


def test_everything_wrong_with_the_tensors_comes_at_once(tmp_path):
    data = scanned(checkpoints.fp8_checkpoint(tmp_path / "good", (128, 128)))
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    del (
        data["model.layers.0.mlp.experts.1.up_proj.weight"],
        data["model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"],
    )
    for expert in (0, 2, 3):
        del data[f"model.layers.1.mlp.experts.{expert}.gate_proj.weight_scale_inv"]
    data["model.layers.0.mlp.experts.2.down_proj.weight_scale_inv"] = np.ones((3, 5), np.float32)
    data["model.layers.0.mlp.experts.3.gate_proj.weight"] = np.zeros((256, 256), checkpoints.F8)
    data["model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv"] = np.ones((2, 2), np.float32)
    folder = checkpoints.write(tmp_path / "bad", data, {**config, "num_experts": 5})
    plan = Pipeline(loader=AutoLoader(path=folder), preprocess=[MoeToBf16()], writer=MemoryWriter()).plan()
    stem = "model.layers.{}.mlp.experts.{}"
    missing = "gate_proj.weight is FP8, but its scale (weight_scale_inv, weight_scale, scale, qscale_weight) is missing"
    odd = "down_proj.weight_scale_inv is [3, 5], which is no scale for all, for rows or for blocks of [128, 128]"
    small = "gate is BF16 [256, 256], but config.json says [512, 256] (hidden size 256, expert size 512)"
    assert set(plan.problems) == {
        f"{stem.format(0, 1)}: has no up projection",
        "layer 0: expert 4 missing; config.json announces 5",
        "layer 1: expert 4 missing; config.json announces 5",
        f"{stem.format(1, 0)} (and 2 more): {missing} from the checkpoint: download it again",
        f"{stem.format(0, 2)}: {odd} (config.json) of down_proj.weight [256, 512]",
        f"{stem.format(0, 3)}: {small}",
    }


@pytest.mark.parametrize("mark", ["aria2", "part", "incomplete", "crdownload", "!qB", "lftp-pget-status"])
@pytest.mark.parametrize("index", [True, False])
def test_a_shard_whose_download_goes_on_is_refused_whatever_its_size(folder, mark, index):
    if not index:
        (folder / INDEX).unlink()
    name = "model-00002-of-00003.safetensors"
    (folder / f"{name}.{mark}").write_bytes(b"x")
    said = f"DIR/{name} has not been downloaded to its end: {name}.{mark} says so; let the download finish, or, if "
    assert refusals(folder) == [said + f"the file is whole, remove DIR/{name}.{mark}"]
    (folder / name).unlink()  # some programs give it its name at the end
    assert [p for p in refusals(folder) if p.startswith(said)]


def test_of_a_link_it_is_what_the_link_leads_to_that_has_to_be_whole(folder, tmp_path):
    names = [p.name for p in folder.glob("*.safetensors")]
    (tmp_path / "disk").mkdir()
    for name in names:
        (folder / name).symlink_to((folder / name).rename(folder / f"{name}.data"))
    (folder / f"{names[0]}.data.aria2").touch()
    assert any(f"{names[0]}.data has not been downloaded to its end" in p for p in refusals(folder))


def test_downloads_that_nothing_is_read_of_stop_nothing_and_are_not_carried_over(folder):
    for name in ("consolidated.safetensors", "consolidated.safetensors.aria2", "film.crdownload", "README.md.part"):
        (folder / name).write_bytes(b"x")
    assert {str(p) for p in CheckpointFolder(folder).side_files()} == checkpoints.SIDE_FILES.keys()
    assert_same(scanned(folder), checkpoints.tensors())
    (folder / "tokenizer.json.aria2").touch()
    assert [p.partition(":")[0] for p in refusals(folder)] == ["DIR/tokenizer.json has not been downloaded to its end"]


def test_a_lone_file_that_has_not_its_name_yet(tmp_path):
    folder = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config())
    (folder / "model.safetensors").rename(folder / "model.safetensors.part")
    assert refusals(folder)[0].startswith("DIR/model.safetensors has not been downloaded to its end")
