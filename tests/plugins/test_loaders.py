import json
import pickle
import subprocess
import sys

import checkpoints
import numpy as np
import pytest
import torch
from ktforge_plugins import AutoLoader, BinLoader, SafetensorsLoader
from ktforge_plugins.loaders import bin as bin_files

from ktforge import CheckpointError


def contents(loader) -> dict[str, np.ndarray]:
    return {spec.name: loader.read(spec) for spec in loader.scan()}


def same(loaded, expected) -> bool:
    return loaded.keys() == expected.keys() and all(
        loaded[n].dtype == a.dtype and loaded[n].shape == a.shape and loaded[n].tobytes() == a.tobytes()
        for n, a in expected.items()
    )


def write_bin(folder, data, shards=1, index=True):
    """pytorch_model*.bin beside whatever is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(data)
    files = ["pytorch_model.bin"]
    if shards > 1:
        files = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    for i, file in enumerate(files):
        torch.save({n: checkpoints.as_torch(data[n]) for n in names[i::shards]}, folder / file)
    if shards > 1 and index:
        weight_map = {n: files[i % shards] for i, n in enumerate(names)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(checkpoints.config()))
    return folder


MIXED = {
    "a.scalar": np.array(3.5, np.float32),
    "b.empty": np.empty((0, 4), np.float16),
    "c.bytes": np.arange(7, dtype=np.uint8),
    "d.long": np.arange(-3, 3),
    "e.bf16": np.arange(12, dtype=np.float32).astype(checkpoints.BF16).reshape(3, 4),
    "f.fp8": np.arange(4, dtype=np.float32).astype(checkpoints.F8),
    "g.bool": np.array([True, False, True]),
    "h.double": np.array([[1.5]]),
}


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_safetensors_forms(tmp_path, shards, index):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config(), shards, index)
    assert same(contents(SafetensorsLoader(path=folder)), MIXED)
    assert same(contents(AutoLoader(path=folder)), MIXED)


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_bin_forms(tmp_path, shards, index):
    folder = write_bin(tmp_path, MIXED, shards, index)
    assert same(contents(BinLoader(path=folder)), MIXED)
    assert same(contents(AutoLoader(path=folder)), MIXED)


def test_views_of_a_bin_file_are_read_as_themselves(tmp_path):
    base = torch.arange(24).reshape(4, 6)
    torch.save({"whole": base, "row": base[2], "columns": base[:, 1:3]}, tmp_path / "pytorch_model.bin")
    loaded = contents(BinLoader(path=tmp_path))
    assert all(np.array_equal(loaded[n], t.numpy()) for n, t in torch.load(tmp_path / "pytorch_model.bin").items())


def test_tensors_of_a_mapped_file_are_not_copied(source):
    loader = SafetensorsLoader(path=source)
    spec = next(s for s in loader.scan() if s.offset % 2 == 0)
    array = loader.read(spec)
    assert not array.flags.owndata and not array.flags.writeable


def test_auto_passes_io_on_or_refuses_it(tmp_path):
    folder = checkpoints.write(tmp_path / "safetensors", MIXED, checkpoints.config())
    for io, copied in (("pread", True), ("mmap", False), (None, False)):
        loader = AutoLoader(path=folder, io=io)
        arrays = [loader.read(s) for s in loader.scan() if s.nbytes and s.offset % s.dtype.itemsize == 0]
        assert arrays and all(a.flags.writeable == copied for a in arrays), io
    write_bin(tmp_path / "bin", MIXED)
    assert refusal(AutoLoader(path=tmp_path / "bin", io="pread")).endswith(
        "is read by the loader bin, and io is for safetensors: leave out io: pread"
    )


@pytest.mark.parametrize("form", ["mmap", "pread", "bin", "auto"])
def test_rows_of_a_tensor(tmp_path, form):
    data = {"x": np.arange(7 * 6 * 5, dtype=np.int16).reshape(7, 6, 5), "y": np.arange(3, dtype=np.int8)}
    if form == "bin":
        write_bin(tmp_path, data)
        loader = BinLoader(path=tmp_path)
    else:
        checkpoints.write(tmp_path, data, checkpoints.config())
        loader = AutoLoader(path=tmp_path) if form == "auto" else SafetensorsLoader(path=tmp_path, io=form)
    specs = {s.name: s for s in loader.scan()}
    for name, array in data.items():
        for start, stop in ((0, 1), (1, 3), (2, len(array)), (0, len(array))):
            rows = loader.rows(specs[name], start, stop)
            assert np.array_equal(loader.read(rows), array[start:stop])
            loader.release(rows)
            again = loader.rows(rows, stop - start - 1, stop - start)
            assert np.array_equal(loader.read(again), array[stop - 1 : stop])


def test_the_safetensors_path_does_not_import_torch(source, tmp_path):
    arguments = ["convert", "--input-path", str(source), "--output", str(tmp_path / "out"), "--quant-method", "int4"]
    script = (
        f"import sys, ktforge.cli; ktforge.cli.app({arguments}, standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def refusal(loader) -> str:
    with pytest.raises(CheckpointError) as caught:
        contents(loader)
    return str(caught.value)


def test_both_kinds_must_agree(tmp_path):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config())
    write_bin(folder, MIXED)
    assert same(contents(AutoLoader(path=folder)), MIXED)
    write_bin(folder, {**MIXED, "c.bytes": np.arange(8, dtype=np.uint8)})
    message = refusal(AutoLoader(path=folder))
    assert (
        "two copies of the weights that are not the same (c.bytes differs): keep one" in message
        and "{use: safetensors} or {use: bin}" in message
    )


def test_a_missing_shard_is_named(tmp_path):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config(), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "names model-00002-of-00003.safetensors, which is missing" in refusal(AutoLoader(path=folder))


def test_an_index_that_disagrees_is_refused(tmp_path):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config(), 2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["z.absent"] = "model-00001-of-00002.safetensors"
    del content["weight_map"]["c.bytes"]
    content["weight_map"]["d.long"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    message = refusal(SafetensorsLoader(path=folder))
    assert "the index places z.absent in" in message
    assert "holds c.bytes, which the index does not name" in message
    assert "the index places d.long in" in message and "but it is in" in message


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_tensor_in_two_files_is_one_if_the_bytes_are_equal(tmp_path, io):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config())
    copy = folder / "model-copy.safetensors"
    copy.write_bytes((folder / "model.safetensors").read_bytes())
    assert same(contents(SafetensorsLoader(path=folder, io=io)), MIXED)
    raw = bytearray(copy.read_bytes())
    raw[-1] ^= 1
    copy.write_bytes(raw)
    problem = refusal(SafetensorsLoader(path=folder, io=io))
    assert f"{copy} and {folder}/model.safetensors both hold" in problem and "\n" not in problem
    assert ", and not with the same content: if they are two copies of the model, such as in two prec" in problem


@pytest.mark.parametrize("kept", [0, 1])
def test_of_two_equal_ones_the_index_says_which(tmp_path, kept):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config(), 2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    for file in files:
        checkpoints.save_file(MIXED, folder / file)
    content["weight_map"] = dict.fromkeys(MIXED, files[kept])
    content["weight_map"]["d.long"] = files[1 - kept]
    index.write_text(json.dumps(content))
    loader = SafetensorsLoader(path=folder)
    assert same(contents(loader), MIXED)
    assert {s.name: s.file.name for s in loader.scan()} == content["weight_map"]


def test_a_second_precision_is_one_sentence(tmp_path):
    data = {f"layer.{i}.weight": np.ones((4, 4), np.float32) for i in range(50)}
    folder = checkpoints.write(tmp_path, data, checkpoints.config())
    half = {name: array.astype(np.float16) for name, array in data.items()}
    checkpoints.save_file(half, folder / "model.fp16.safetensors")
    message = refusal(SafetensorsLoader(path=folder))
    assert f"{folder}/model.fp16.safetensors and {folder}/model.safetensors both hold layer" in message
    assert "and 49 more tensors, and not with the same content" in message and "\n" not in message
    (folder / "model.safetensors").unlink()
    write_bin(folder, data)
    message = refusal(AutoLoader(path=folder))
    assert "two copies of the weights that are not the same" in message
    assert "the files are model.fp16.safetensors, pytorch_model" in message


@pytest.mark.parametrize(
    ("name", "mend"),
    [("consolidated.00.pth", "files of torch.save; where you trust them, save what they hold with safetensors.torch"),
     ("model.pt", "files of torch.save"), ("MODEL.PT", "files of torch.save"), ("last.ckpt", "files of torch.save"),
     ("model.bin", "call it pytorch_model.bin if torch.save wrote it"), ("tf_model.h5", "weights for other programs"),
     ("pytorch_model.BIN", "call it pytorch_model.bin"), ("model.onnx", "get the model's *.safetensors")],
)  # fmt: skip
def test_weights_of_other_kinds_are_called_what_they_are(tmp_path, name, mend):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config())
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(AutoLoader(path=folder))
    assert f"has no weights: neither *.safetensors nor pytorch_model*.bin, but {name}: " in message and mend in message
    assert not [p for p in AutoLoader(path=folder).side_files() if p.name == name]


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "model-2.SafeTensors"])
@pytest.mark.parametrize("alone", [True, False])
def test_letters_in_upper_case(tmp_path, name, alone):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config())
    (folder / "model.safetensors").rename(folder / name)
    if not alone:
        checkpoints.save_file({"x": np.ones(4, np.float32)}, folder / "model-1.safetensors")
    problem = f"{folder}/{name} would not be read for the letters of its name: call it {name.lower()}"
    assert refusal(AutoLoader(path=folder)) == problem
    assert not [p for p in AutoLoader(path=folder).side_files() if p.name == name], "no side file"


@pytest.mark.parametrize("where", ["../other.safetensors", "/etc/passwd"])
def test_an_index_that_points_outside_is_refused(tmp_path, where):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config(), 2)
    text = json.dumps({"weight_map": {"a.scalar": where}})
    (folder / "model.safetensors.index.json").write_text(text)
    assert "points outside its folder" in refusal(SafetensorsLoader(path=folder))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short_is_refused(tmp_path, keep):
    folder = checkpoints.write(tmp_path, MIXED, checkpoints.config())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is not a whole safetensors file" in refusal(SafetensorsLoader(path=folder))


def test_a_bin_file_cut_short_is_refused(tmp_path):
    folder = write_bin(tmp_path, MIXED)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-200])
    assert "is not a whole torch.save archive" in refusal(BinLoader(path=folder))


def test_a_pickle_that_calls_code_is_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"a": Bomb()}, tmp_path / "pytorch_model.bin")
    assert "holds pickled objects other than tensors" in refusal(BinLoader(path=tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "is not a whole torch.save archive" in refusal(BinLoader(path=tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("state", [[1, 2], {"state_dict": {"a": torch.zeros(1)}}, {1: torch.zeros(1)}])
def test_a_bin_file_that_is_no_state_dict_is_refused(tmp_path, state):
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert "is not a plain state dict" in refusal(BinLoader(path=tmp_path))


def test_folders_without_weights(tmp_path):
    assert "is empty: give the folder that holds config.json" in refusal(AutoLoader(path=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "has no weights: neither *.safetensors nor" in refusal(AutoLoader(path=tmp_path))
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    assert "but model-q4.gguf: llama.cpp's, quantised already; get the model's" in refusal(AutoLoader(path=tmp_path))
    assert "has no *.safetensors files" in refusal(SafetensorsLoader(path=tmp_path))
    assert "has no pytorch_model*.bin files" in refusal(BinLoader(path=tmp_path))
    assert "does not exist" in refusal(AutoLoader(path=tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    assert "is not a folder: give the folder that holds config.json" in refusal(AutoLoader(path=tmp_path / "file"))


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        AutoLoader(path=tmp_path).config()


@pytest.mark.parametrize("kind", [SafetensorsLoader, AutoLoader, BinLoader])
def test_a_loader_that_is_used_again_reads_what_is_there_now(tmp_path, kind):
    write = write_bin if kind is BinLoader else lambda f, d: checkpoints.write(f, d, checkpoints.config())
    loader = kind(path=write(tmp_path / "model", MIXED))
    assert same(contents(loader), MIXED)
    changed = {**MIXED, "c.bytes": np.arange(7, 14, dtype=np.uint8)}
    write(tmp_path / "new", changed)
    for file in (tmp_path / "new").iterdir():
        if file.is_file():
            file.replace(tmp_path / "model" / file.name)
    assert same(contents(loader), changed)


def test_reading_bin_without_torch_says_what_to_install(tmp_path, monkeypatch):
    folder = write_bin(tmp_path, MIXED)
    monkeypatch.setitem(sys.modules, "torch", None)
    for kind in (BinLoader, AutoLoader):
        assert "needs torch: pip install 'ktforge[torch]'" in refusal(kind(path=folder))


@pytest.mark.parametrize(
    ("metadata", "odd"),
    [({"format": "pt", "total": 3}, "'total' is 3"), ({"a": {"b": 1}}, """'a' is {"b": 1}"""), ([1], r"it is [1]")],
)
def test_metadata_that_is_no_map_of_strings_is_named(tmp_path, metadata, odd):
    """The library opens no such file, and neither does transformers; the tensors in it may be sound."""
    header = json.dumps({
        "__metadata__": metadata, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    }).encode()  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError) as caught:
        list(SafetensorsLoader(path=tmp_path).scan())
    (problem,) = caught.value.problems
    assert f"it must map strings to strings, and {odd}: save the tensors again" in problem
    assert str(tmp_path / "model.safetensors") in problem and "download" not in problem


def test_all_of_a_tensor_in_a_bin_file_is_let_go_of(tmp_path, monkeypatch):
    """From its first byte to its last, those between the strides too; and nothing of one that torch has copied."""
    whole = torch.arange(60, dtype=torch.int32).reshape(6, 10)
    state = {"plain": torch.ones(5, 3), "strided": whole[1:5, 2:9:3], "one": torch.ones(1), "none": torch.ones(0, 4)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    loader, dropped = BinLoader(path=tmp_path), []
    specs = {s.name: s for s in loader.scan()}
    monkeypatch.setattr(bin_files.system, "drop_pages", lambda address, nbytes: dropped.append((address, nbytes)))
    sizes = {"plain": 60, "strided": 4 * (3 * 10 + 2 * 3 + 1), "one": 4}
    for name, spec in specs.items():
        loader.read(spec)
        loader.release(spec)
        if name in sizes:
            start = loader._file(spec.file).tensors[name].data_ptr()
            assert dropped.pop() == (start, sizes[name])
        assert dropped == []
    rows = loader.rows(specs["plain"], 2, 4)
    loader.release(rows)
    assert dropped == [(loader._file(rows.file).tensors["plain"].data_ptr() + 24, 24)]
