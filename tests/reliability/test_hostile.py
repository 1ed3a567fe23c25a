"""Files from strangers: one clear sentence and no more, whatever is in them, in bounded time and memory."""

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from unittest import mock

import checkpoints
import pytest
from conversions import model, pipeline, tree
from hostile import CONFIGS, GOOD, HEADERS, header
from ktforge_plugins import BinLoader, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.loaders.kt_folder import KtFolderLoader

from ktforge import KtforgeError, Pipeline
from ktforge.disk.marks import CONFIG


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that a test may break."""
    return model(tmp_path / "model", 1, 2, 512, 256, shards=1)


def refused(call, *, length=1000):
    with pytest.raises(KtforgeError) as caught:
        call()
    assert 1 <= len(caught.value.problems) <= 101
    for problem in caught.value.problems:
        assert 10 < len(problem) < length and "\n" not in problem, problem
    return str(caught.value)


def convert(folder, loader=SafetensorsLoader):
    return pipeline(folder, SafetensorsWriter(path=folder.parent / "out")).model_copy(
        update={"loader": loader(path=folder)}
    ).run()  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_safetensors_headers(folder, kind):
    (folder / "model-2.safetensors").write_bytes(HEADERS[kind])
    said = refused(lambda: convert(folder))
    assert "model-2.safetensors" in said
    assert not (folder.parent / "out").exists()


def test_the_tests_above_are_refused_for_what_is_wrong_with_them(folder):
    (folder / "model-2.safetensors").write_bytes(header(GOOD))
    convert(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../b",
        "nul\0",
        "x" * 10_000,
        "no-such-file",
        "",
        ".",
        "link.safetensors",
    ],
)
def test_an_index_that_points_elsewhere(folder, name):
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "link.safetensors").symlink_to(outside)
    names = checkpoints.load_output(folder).keys()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(lambda: convert(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", CONFIG])
def test_a_link_out_of_the_folder(folder, name):
    secret = folder.parent / "secret"
    (folder / "config.json").rename(secret)
    (folder / CONFIG).write_bytes(secret.read_bytes())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    said = refused(lambda: convert(folder))
    assert f"{name} is a link to {secret}, outside the checkpoint and where no link of its weights leads: put" in said
    assert "say --follow-links" in said
    loader = SafetensorsLoader(path=folder, follow_links=True)
    Pipeline(loader=loader, writer=SafetensorsWriter(path=folder.parent / "out")).run()
    assert (folder.parent / "out" / name).read_bytes() == secret.read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "extra.safetensors", "pytorch_model.bin"])
def test_a_link_to_no_weights_lets_nothing_else_through(folder, name):
    """Such a link would make its folder one that side files may lead to."""
    private = folder.parent / "private"
    private.mkdir()
    (private / "key").write_bytes(b"secret" * 10)
    for path in (name, "vocab.json"):
        (folder / path).unlink(missing_ok=True)
        (folder / path).symlink_to(private / "key")
    assert "vocab.json is a link to" in refused(lambda: convert(folder))


def test_a_side_file_may_lead_to_no_hidden_one_beside_the_weights(folder):
    home = folder.parent / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "key").write_bytes(b"secret")
    (folder / "model.safetensors").rename(home / "model.safetensors")
    (folder / "model.safetensors").symlink_to(home / "model.safetensors")
    (folder / "vocab.json").symlink_to(home / ".ssh" / "key")
    assert "vocab.json is a link to" in refused(lambda: convert(folder))


def test_links_elsewhere_on_the_disk(folder):
    """What people have who keep weights on another disk: links of shards, and of what lies beside them."""
    store, links, outs = folder.parent / "store", folder.parent / "links", [folder.parent / n for n in ("one", "two")]
    folder.rename(store)
    (store / "more").mkdir()
    (store / "more" / "notes.md").write_text("# notes")
    for path in [p for p in store.rglob("*") if p.is_file()]:
        link = links / path.relative_to(store)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    for source, out in zip((store, links), outs, strict=True):
        pipeline(source, SafetensorsWriter(path=out)).run()
    one, two = (tree(out) for out in outs)
    del one["ktforge_manifest.json"], two["ktforge_manifest.json"]  # which name the source
    assert one == two and "more/notes.md" in one and not any(p.is_symlink() for p in outs[1].rglob("*"))
    said = refused(lambda: pipeline(links, SafetensorsWriter(path=store)).run(overwrite=True))
    assert "is a link into the output folder" in said


def test_links_into_a_hub_cache_from_anywhere(folder):
    blobs = folder.parent / "models--a--b" / "blobs"
    (blobs.parent / "snapshots").mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    convert(folder)


def test_a_kt_file_that_is_a_link_out_of_the_folder(tmp_path):
    secret, folder = tmp_path / "secret", tmp_path / "model/_layer_0/_numa_0"
    secret.write_bytes(b"12345678")
    folder.mkdir(parents=True)
    (folder / "INT4_up_0_8Byte_quant_.kt").symlink_to(secret)
    said = refused(lambda: list(KtFolderLoader(path=tmp_path / "model").scan()))
    assert "INT4_up_0_8Byte_quant_.kt is a link to" in said and "outside the checkpoint" in said


def test_a_hub_cache_is_links_and_that_is_fine(folder):
    snapshot = folder.parent / "models--a--b" / "snapshots" / "0123"
    blobs = folder.parent / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(p for p in folder.rglob("*") if p.is_file()):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path.rename(blobs / str(i)))
    pipeline(snapshot, SafetensorsWriter(path=folder.parent / "out")).run()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder):
    os.mkfifo(folder / "added_tokens.json")
    os.mkfifo(folder / "model-2.safetensors")
    convert(folder)
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)
    refused(lambda: convert(folder))


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_json(folder, kind):
    (folder / CONFIG).write_bytes(CONFIGS[kind])
    assert CONFIG in refused(lambda: convert(folder))


@pytest.mark.parametrize("value", [-1, 10**30, "7168", 1.5, [], {}, True, 10**6])
@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "num_hidden_layers", "moe_intermediate_size"])
def test_sizes_that_are_none(folder, key, value):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, key: value}))
    if key == "num_hidden_layers" and value is True:
        value = 1
    refused(lambda: convert(folder))


@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "num_hidden_layers", "moe_intermediate_size"])
def test_a_size_that_is_null_is_what_the_tensors_say(folder, key):
    config = json.loads((folder / CONFIG).read_text())
    before = pipeline(folder, SafetensorsWriter(path=folder.parent / "out")).plan()
    (folder / CONFIG).write_text(json.dumps({**config, key: None}))
    after = pipeline(folder, SafetensorsWriter(path=folder.parent / "out")).plan()
    assert not after.problems and after.model == before.model
    assert [f.header for f in after.files] == [f.header for f in before.files]


def test_config_that_would_take_forever(folder):
    config = json.loads((folder / CONFIG).read_text())
    config |= {"num_hidden_layers": 999_999, "num_experts": 999_999, "mlp_only_layers": list(range(10**6))}
    (folder / CONFIG).write_text(json.dumps(config))
    refused(lambda: convert(folder))


@pytest.mark.parametrize("block", [[0, 0], [-1, 128], [10**30, 128], ["128", "128"], [128], [1.5, 2]])
def test_blocks_that_are_none(tmp_path, block):
    folder = checkpoints.fp8_checkpoint(tmp_path / "model", (128, 128))
    config = json.loads((folder / CONFIG).read_text())
    config["quantization_config"]["weight_block_size"] = block
    (folder / CONFIG).write_text(json.dumps(config))
    refused(lambda: convert(folder))


# .bin files. torch is a part of the test, as its reader is what has to hold.


class Calls:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def archive(path, pickled, compression=zipfile.ZIP_STORED, **more):
    with zipfile.ZipFile(path, "w", compression) as opened:
        opened.writestr("model/data.pkl", pickled)
        opened.writestr("model/version", "3\n")
        for name, content in more.items():
            opened.writestr(f"model/{name}", content)


@pytest.fixture
def bin_folder(folder):
    torch = pytest.importorskip("torch")
    state = {n: torch.zeros(a.shape, dtype=torch.bfloat16) for n, a in checkpoints.load_output(folder).items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def test_a_pickle_that_calls_is_not_called(bin_folder):
    import torch

    marker = bin_folder.parent / "called"
    for save in (lambda p: torch.save({"a": Calls(marker)}, p), lambda p: p.write_bytes(pickle.dumps(Calls(marker)))):
        save(bin_folder / "pytorch_model-2.bin")
        said = refused(lambda: convert(bin_folder, BinLoader))
        assert "pytorch_model-2.bin" in said and not marker.exists()


PICKLES = {
    "nothing": b"",
    "protocol 4": pickle.dumps({"a": 1}, 4),
    "protocol 0": pickle.dumps({"a": 1}, 0),
    "no dict": pickle.dumps([1], 2),
    "no tensors": pickle.dumps({"a": 1}, 2),
    "cut off": b"\x80\x02}q",
    "string of 2 GB": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "gigabyte": b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x3f\x85R.",
}


#: Functions and classes that weights-only loading calls, each asked for 777 million bytes or items out of nothing.
BOMBS = {
    "bytearray": b"cbuiltins\nbytearray\nJ\x00\xf1\x5a\x2e",
    "storage": b"ctorch\nFloatStorage\nJ\x00\xf1\x5a\x2e",
    "untyped storage": b"ctorch.storage\nUntypedStorage\nJ\x00\xf1\x5a\x2e",
    "tensor": b"ctorch\nFloatTensor\nJ\x00\xf1\x5a\x2e",
    "without a storage": b"ctorch._utils\n_rebuild_meta_tensor_no_storage\nJ\x00\xf1\x5a\x2e",
    "place in memory": b"ccollections\nOrderedDict\n)Rr\x00\x00\x00\x7f",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_pickle_that_asks_for_memory(bin_folder, kind):
    """Nothing of it is called: torch.load is not reached."""
    import torch

    call = BOMBS[kind] + (b"" if kind == "place in memory" else b"\x85R")
    archive(bin_folder / "pytorch_model-2.bin", b"\x80\x02}X\x01\x00\x00\x00a" + call + b"s.")
    with mock.patch.object(torch, "load", wraps=torch.load) as loads:
        said = refused(lambda: convert(bin_folder, BinLoader))
    assert "pytorch_model-2.bin" in said
    assert "other than tensors" in said or "not as torch.save writes it" in said
    assert all(Path(call.args[0]).name != "pytorch_model-2.bin" for call in loads.call_args_list)


def rebuilt(count, offset, shape, strides):
    """The pickle of {"a": tensor} of F32, with these places in the storage 0."""

    def numbers(values):
        return b"(" + b"".join(b"J" + struct.pack("<i", v) for v in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ"
    storage += struct.pack("<i", count) + b"tQ"
    place = b"J" + struct.pack("<i", offset) + numbers(shape) + numbers(strides)
    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n(" + storage + place
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "offset", "shape", "strides", "sentence"),
    [
        (5, 0, (4,), (1,), "and has 16 in the archive"),
        (1 << 29, 0, (4,), (1,), "and has 16 in the archive"),
        (-1, 0, (4,), (1,), "and has 16 in the archive"),
        (4, 1, (4,), (1,), "goes beyond its storage of 4 items"),
        (4, 0, (2, 2), (3, 1), "goes beyond its storage of 4 items"),
        (4, 0, (1 << 29,), (1,), "goes beyond its storage of 4 items"),
        (4, 0, (4,), (-1,), "without a shape"),
        (4, 0, (4,), (1, 1), "without a shape"),
    ],
)
def test_tensors_lie_in_their_archive(bin_folder, count, offset, shape, strides, sentence):
    path = bin_folder / "pytorch_model-2.bin"
    archive(path, rebuilt(4, 0, (2, 2), (2, 1)), **{"data/0": bytes(16)})
    assert [t.shape for t in BinLoader(path=bin_folder).scan() if t.file == path] == [(2, 2)]
    archive(path, rebuilt(count, offset, shape, strides), **{"data/0": bytes(16)})
    assert sentence in refused(lambda: convert(bin_folder, BinLoader))


def test_every_dtype_and_parameter_is_no_bomb(bin_folder):
    import torch

    kinds = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.uint8, torch.bool, torch.int64)
    state = {str(kind): torch.zeros(4, 6).to(kind)[1:, ::2] for kind in kinds}
    marked = torch.nn.Parameter(torch.zeros(3))
    marked.note = "kept"
    state |= {"parameter": torch.nn.Parameter(torch.zeros(3)), "marked": marked, "empty": torch.zeros(0, 3)}
    path = bin_folder / "pytorch_model-2.bin"
    torch.save(state, path)
    found = {t.name: t.shape for t in BinLoader(path=bin_folder).scan() if t.file == path}
    assert found == {name: tuple(t.shape) for name, t in state.items()}


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles(bin_folder, kind):
    archive(bin_folder / "pytorch_model-2.bin", PICKLES[kind])
    assert "pytorch_model-2.bin" in refused(lambda: convert(bin_folder, BinLoader))


def test_zip_bombs(bin_folder):
    path = bin_folder / "pytorch_model-2.bin"
    archive(path, b"\0" * 200_000_000, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**6
    assert "is compressed" in refused(lambda: convert(bin_folder, BinLoader))
    path.write_bytes(b"PK\x05\x06" + bytes(18))
    refused(lambda: convert(bin_folder, BinLoader))
    (bin_folder / "pytorch_model-3.bin").write_bytes((bin_folder / "pytorch_model.bin").read_bytes()[:-100])
    path.unlink()
    refused(lambda: convert(bin_folder, BinLoader))


def test_a_tensor_larger_than_its_file(bin_folder):
    import torch

    torch.save({"a": torch.zeros(1).expand(1 << 40)}, bin_folder / "pytorch_model-2.bin")
    assert "a has 4,398,046,511,104 bytes, its storage 4" in refused(lambda: convert(bin_folder, BinLoader))
