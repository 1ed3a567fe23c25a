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
from hostile import CONFIGS, GOOD, HEADERS, SAID_OF_CONFIGS, SAID_OF_HEADERS, header
from ktforge_plugins import BinLoader, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.loaders.kt_folder import KtFolderLoader

from ktforge import CheckpointError, Pipeline, PlanError
from ktforge.disk.marks import CONFIG, MANIFEST


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that a test may break."""
    return model(tmp_path / "model", 1, 2, 512, 256, shards=1)


def refused(call, message, error=CheckpointError, *, length=1000):
    """What is said of it: this, by that kind of error, and little more."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error and message in str(caught.value)
    assert 1 <= len(caught.value.problems) <= 101
    for problem in caught.value.problems:
        assert 10 < len(problem) < length and "\n" not in problem, problem
    return str(caught.value)


def convert(folder, loader=SafetensorsLoader):
    return pipeline(folder, SafetensorsWriter(path=folder.parent / "out")).model_copy(
        update={"loader": loader(path=folder)}
    ).run()  # fmt: skip


def made_of(out):
    """All files of an output but the manifest, which names the source; none of them is a link."""
    assert not any(path.is_symlink() for path in out.rglob("*"))
    return {name: found for name, found in tree(out).items() if name != MANIFEST}


def made_of_files(folder):
    """What comes of a folder as long as no file in it is a link."""
    pipeline(folder, SafetensorsWriter(path=folder.parent / "plain")).run()
    return made_of(folder.parent / "plain")


@pytest.mark.parametrize("kind", HEADERS)
def test_safetensors_headers(folder, kind):
    (folder / "model-2.safetensors").write_bytes(HEADERS[kind])
    said = refused(lambda: convert(folder), SAID_OF_HEADERS[kind])
    assert "model-2.safetensors" in said
    assert not (folder.parent / "out").exists()


def test_the_tests_above_are_refused_for_what_is_wrong_with_them(folder):
    (folder / "model-2.safetensors").write_bytes(header(GOOD))
    convert(folder)
    made = checkpoints.load_output(folder.parent / "out")
    assert made["a"].tobytes() == bytes(16) and len(made) > 1
    assert SAID_OF_HEADERS.keys() == HEADERS.keys() and SAID_OF_CONFIGS.keys() == CONFIGS.keys()


ELSEWHERE = "model.safetensors.index.json points outside its folder, to "
MISSING = "which is missing: download it again"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../etc/passwd", ELSEWHERE + "'../../etc/passwd'"),
        ("/etc/passwd", ELSEWHERE + "'/etc/passwd'"),
        ("a/../../b", ELSEWHERE + "'a/../../b'"),
        ("nul\0", ELSEWHERE + "'nul\\x00'"),
        ("x" * 10_000, f"{'x' * 200}, {MISSING}"),
        ("no-such-file", f"names no-such-file, {MISSING}"),
        ("", f"names ., {MISSING}"),
        (".", f"names ., {MISSING}"),
        ("link.safetensors", "model.safetensors is not in model.safetensors.index.json: remove it"),
    ],
)
def test_an_index_that_points_elsewhere(folder, name, message):
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "link.safetensors").symlink_to(outside)
    names = checkpoints.load_output(folder).keys()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(lambda: convert(folder), message)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", CONFIG])
def test_a_link_out_of_the_folder(folder, name):
    secret = folder.parent / "secret"
    (folder / "config.json").rename(secret)
    (folder / CONFIG).write_bytes(secret.read_bytes())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    outside = f"{name} is a link to {secret}, outside the checkpoint and where no link of its weights leads: put"
    said = refused(lambda: convert(folder), outside)
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
    refused(lambda: convert(folder), f"vocab.json is a link to {private / 'key'}, outside the checkpoint")


def test_a_side_file_may_lead_to_no_hidden_one_beside_the_weights(folder):
    home = folder.parent / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "key").write_bytes(b"secret")
    (folder / "model.safetensors").rename(home / "model.safetensors")
    (folder / "model.safetensors").symlink_to(home / "model.safetensors")
    (folder / "vocab.json").symlink_to(home / ".ssh" / "key")
    refused(lambda: convert(folder), f"vocab.json is a link to {home / '.ssh' / 'key'}, outside the checkpoint")


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
    before = tree(store)
    into = pipeline(links, SafetensorsWriter(path=store))
    refused(lambda: into.run(overwrite=True), "is a link into the output folder", PlanError)
    assert tree(store) == before


def test_links_into_a_hub_cache_from_anywhere(folder):
    wanted = made_of_files(folder)
    blobs = folder.parent / "models--a--b" / "blobs"
    (blobs.parent / "snapshots").mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    convert(folder)
    assert made_of(folder.parent / "out") == wanted


def test_a_kt_file_that_is_a_link_out_of_the_folder(tmp_path):
    secret, folder = tmp_path / "secret", tmp_path / "model/_layer_0/_numa_0"
    secret.write_bytes(b"12345678")
    folder.mkdir(parents=True)
    (folder / "INT4_up_0_8Byte_quant_.kt").symlink_to(secret)
    linked = f"INT4_up_0_8Byte_quant_.kt is a link to {secret}, outside the checkpoint"
    refused(lambda: list(KtFolderLoader(path=tmp_path / "model").scan()), linked)


def test_a_hub_cache_is_links_and_that_is_fine(folder):
    wanted = made_of_files(folder)
    snapshot = folder.parent / "models--a--b" / "snapshots" / "0123"
    blobs = folder.parent / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(p for p in folder.rglob("*") if p.is_file()):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path.rename(blobs / str(i)))
    pipeline(snapshot, SafetensorsWriter(path=folder.parent / "out")).run()
    assert made_of(folder.parent / "out") == wanted


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder):
    wanted = {n: a.tobytes() for n, a in checkpoints.load_output(folder).items() if ".experts." not in n}
    os.mkfifo(folder / "added_tokens.json")
    os.mkfifo(folder / "model-2.safetensors")
    convert(folder)
    made = checkpoints.load_output(folder.parent / "out")
    assert all(made[n.removeprefix("model.")].tobytes() == data for n, data in wanted.items())
    assert not (folder.parent / "out" / "added_tokens.json").exists()
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)
    refused(lambda: convert(folder), "config.json is not a file")


@pytest.mark.parametrize("kind", CONFIGS)
def test_config_json(folder, kind):
    (folder / CONFIG).write_bytes(CONFIGS[kind])
    refused(lambda: convert(folder), SAID_OF_CONFIGS[kind])


@pytest.mark.parametrize("value", [-1, 10**30, "7168", 1.5, [], {}, True, 10**6])
@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "num_hidden_layers", "moe_intermediate_size"])
def test_sizes_that_are_none(folder, key, value):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, key: value}))
    most = 50_000 if key in ("num_experts", "num_hidden_layers") else 1_000_000
    if value == most:  # a size that could be, and is not that of the tensors
        refused(
            lambda: convert(folder),
            f"but config.json says [{'512, ' if key == 'hidden_size' else ''}1000000",
            PlanError,
        )
        return
    shown = repr(value)[:40]
    refused(lambda: convert(folder), f"config.json: {key} is {shown}; it must be a whole number up to {most:,}")


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
    said = refused(
        lambda: convert(folder), "config.json: num_experts is 999999; it must be a whole number up to 50,000"
    )
    assert "config.json: num_hidden_layers is 999999; it must be" in said


@pytest.mark.parametrize("block", [[0, 0], [-1, 128], [10**30, 128], ["128", "128"], [128], [1.5, 2]])
def test_blocks_that_are_none(tmp_path, block):
    folder = checkpoints.fp8_checkpoint(tmp_path / "model", (128, 128))
    config = json.loads((folder / CONFIG).read_text())
    config["quantization_config"]["weight_block_size"] = block
    (folder / CONFIG).write_text(json.dumps(config))
    message = f"config.json: weight_block_size is {block}; it must be [rows, columns]"
    if block == [10**30, 128]:  # rows in one block each, of which there are as many as scales only in one
        message = f"which is no scale for all, for rows or for blocks of {block} (config.json)"
    refused(lambda: convert(folder), message, PlanError)


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
    objects = "pytorch_model-2.bin holds pickled objects other than tensors, which could run code, so it is not loaded"
    for save, message in (
        (lambda p: torch.save({"a": Calls(marker)}, p), objects),
        (lambda p: p.write_bytes(pickle.dumps(Calls(marker))), "pytorch_model-2.bin is not a whole torch.save archive"),
        (lambda p: archive(p, pickle.dumps({"a": Calls(marker)}, 2)), objects),
    ):
        save(bin_folder / "pytorch_model-2.bin")
        refused(lambda: convert(bin_folder, BinLoader), message)
        assert not marker.exists() and not (bin_folder.parent / "out").exists()


OBJECTS, NO_STATE = "holds pickled objects other than tensors", "is not a plain state dict of dense tensors"
#: What is pickled, and what is said of it.
PICKLES = {
    "nothing": (b"", "is not as torch.save writes it: pickle exhausted before seeing STOP"),
    "protocol 4": (pickle.dumps({"a": 1}, 4), OBJECTS),
    "protocol 0": (pickle.dumps({"a": 1}, 0), OBJECTS),
    "no dict": (pickle.dumps([1], 2), NO_STATE),
    "no tensors": (pickle.dumps({"a": 1}, 2), NO_STATE),
    "cut off": (b"\x80\x02}q", "is not as torch.save writes it: not enough data"),
    "string of 2 GB": (b"\x80\x02X\xff\xff\xff\x7fabc.", "is not as torch.save writes it: expected 2147483647 bytes"),
    "deep": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", NO_STATE),
    "gigabyte": (b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x3f\x85R.", OBJECTS),
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

    in_memory = kind == "place in memory"
    call = BOMBS[kind] + (b"" if in_memory else b"\x85R")
    archive(bin_folder / "pytorch_model-2.bin", b"\x80\x02}X\x01\x00\x00\x00a" + call + b"s.")
    message = "is not as torch.save writes it: a place in memory" if in_memory else OBJECTS
    with mock.patch.object(torch, "load", wraps=torch.load) as loads:
        refused(lambda: convert(bin_folder, BinLoader), f"pytorch_model-2.bin {message}")
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
    refused(lambda: convert(bin_folder, BinLoader), sentence)


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
    pickled, message = PICKLES[kind]
    archive(bin_folder / "pytorch_model-2.bin", pickled)
    refused(lambda: convert(bin_folder, BinLoader), f"pytorch_model-2.bin {message}")
    assert not (bin_folder.parent / "out").exists()


def test_zip_bombs(bin_folder):
    path = bin_folder / "pytorch_model-2.bin"
    archive(path, b"\0" * 200_000_000, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**6
    refused(lambda: convert(bin_folder, BinLoader), "pytorch_model-2.bin is compressed (model/data.pkl)")
    path.write_bytes(b"PK\x05\x06" + bytes(18))
    refused(lambda: convert(bin_folder, BinLoader), "pytorch_model-2.bin has no data.pkl as torch.save writes it")
    (bin_folder / "pytorch_model-3.bin").write_bytes((bin_folder / "pytorch_model.bin").read_bytes()[:-100])
    path.unlink()
    refused(lambda: convert(bin_folder, BinLoader), "pytorch_model-3.bin is not a whole torch.save archive (cut short")


def test_a_tensor_larger_than_its_file(bin_folder):
    import torch

    torch.save({"a": torch.zeros(1).expand(1 << 40)}, bin_folder / "pytorch_model-2.bin")
    message = "pytorch_model-2.bin: a has 4,398,046,511,104 bytes, its storage 4"
    refused(lambda: convert(bin_folder, BinLoader), message)
