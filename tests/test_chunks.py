"""Whatever is worked on in chunks, with more than two of them, the last one cut short: the bytes are those of one.

The constants are large, so that small tests never come to a second chunk: here each of them is small.
"""

import ast
import json
import os
from pathlib import Path

import checkpoints
import ktforge_plugins
import numpy as np
import pytest
import xxhash
from checkpoints import BF16
from conversions import convert, model, tree
from faults import Disk, fails
from ktforge_plugins import MoeToBf16, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.preprocess import integers, scales
from ktforge_plugins.writers import safetensors as safetensors_writer
from preprocess.units import fused_unit, stored_forms, weight_unit
from safetensors import safe_open

import ktforge
from ktforge import CheckpointError, OutputError, TensorSpec
from ktforge.checkpoint import loader as checkpoint_loader
from ktforge.contract.tensors import F32, Part, QuantPart, QuantSpec, UnitSpec
from ktforge.disk import reading, writing
from ktforge.disk.marks import JOURNAL, MANIFEST, PARTIAL
from ktforge.hf import heads
from ktforge.measure import codes, weights
from ktforge.output import hashing, sink
from ktforge.planning import shares
from ktforge.readback import loader as readback

#: Every constant that says how much is worked on at a time: its module, its name, and a small value.
CHUNKS = {
    "ktforge/hf/heads.py BLOCK": (heads, 1),  # tried in tests/hf
    "ktforge/checkpoint/loader.py COMPARED": (checkpoint_loader, 7),
    "ktforge/disk/reading.py CHUNK": (reading, 7),
    "ktforge/disk/writing.py CHUNK": (writing, 7),
    "ktforge/measure/codes.py BAND": (codes, 5),  # tried in tests/measure, as the next one is
    "ktforge/measure/weights.py BAND": (weights, 16),
    "ktforge/output/sink.py PIECE": (sink, 1000),
    "ktforge/planning/shares.py COPIED": (shares, 1000),
    "ktforge/readback/loader.py BAND": (readback, 1),
    "preprocess/integers.py BAND_CODES": (integers, 1),
    "writers/safetensors.py BLOCK": (safetensors_writer, 3),
}
#: Other large numbers: none of these is a step. What is called LIMIT or MOST is none either.
NO_CHUNKS = {
    "ktforge/calibration/imatrix.py LONGEST_NAME",
    "ktforge/hf/integers.py EXACT",
    "quantize/feedback.py OTHERS",
    "ktforge/planning/kinds.py LAYER",
    "ktforge/planning/kinds.py EXPERT",
    "ktforge/disk/system.py _BLOCK",
    "ktforge/disk/system.py _GET_QUOTA",
    "ktforge/testing/common.py SLACK",
}


def large_constants(root: Path, base: Path):
    """The module-level constants of 1,000 or more that are not called a limit."""
    for path in root.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                for name, value in zip(names, values, strict=False):
                    try:
                        number = eval(compile(ast.Expression(value), "", "eval"), {"__builtins__": {}})
                    except Exception:
                        continue
                    if type(number) is int and number >= 1000 and not {"LIMIT", "MOST"} & set(name.id.split("_")):
                        yield f"{path.relative_to(base).as_posix()} {name.id}"


def test_every_chunk_is_tried_here():
    """A new large constant belongs into one of the two lists."""
    own, plugins = Path(ktforge.__file__).parent, Path(ktforge_plugins.__file__).parent
    found = {*large_constants(own, own.parent), *large_constants(plugins, plugins)}
    assert found == CHUNKS.keys() | NO_CHUNKS


@pytest.fixture
def small(monkeypatch):
    """Makes the chunks small whose constants are named so."""

    def make(*names: str) -> None:
        for key, (module, value) in CHUNKS.items():
            name = key.split()[1]
            if name in names:
                monkeypatch.setattr(module, name, value)

    return make


# Weights that become BF16

#: Five bands of 16 rows, or six of the columns; the blocks of some forms do not end with a band.
ROWS, COLUMNS = 80, 96
FORMS = stored_forms(ROWS, COLUMNS)


def stored_in(form: str, experts: int = 0):
    """A projection in a form of tests/preprocess/units.py, or one of each expert, with numbers of all sizes in it."""
    random = np.random.default_rng(0)
    stored, quantization = FORMS[form]
    arrays = {}
    for name, (shape, dtype) in stored.items():
        shape, dtype = ((experts,) if experts else ()) + shape, np.dtype(dtype)
        if name.endswith("g_idx"):
            order = random.permutation(np.arange(COLUMNS) // 32).astype(dtype)
            arrays[name] = np.broadcast_to(order, shape)
        elif dtype.kind in "iu":
            low, high = (110, 127) if "scale" in name else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            arrays[name] = random.integers(low, high, shape, dtype)
        else:
            arrays[name] = (random.random(shape) + 0.5).astype(dtype)
    unit = fused_unit({f"down.{p}": a for p, a in arrays.items()}) if experts else weight_unit(arrays)
    return unit, {"quantization_config": quantization}


def made(unit, config) -> bytes:
    (result,) = MoeToBf16().bind(config).apply(unit)
    (role,) = result.tensors
    return np.ascontiguousarray(result.tensors[role]).tobytes()


@pytest.mark.parametrize("experts", [0, 2])
@pytest.mark.parametrize("form", FORMS)
def test_bands_of_rows_have_their_own_scales(form, experts, monkeypatch):
    unit, config = stored_in(form, experts)
    monkeypatch.setattr(integers, "BAND_CODES", 1 << 40)
    assert len(list(integers.bands(ROWS, COLUMNS))) == len(list(integers.bands(COLUMNS, ROWS))) == 1
    at_once = made(unit, config)
    monkeypatch.setattr(integers, "BAND_CODES", 1)
    assert len(list(integers.bands(ROWS, COLUMNS))) > 2 and len(list(integers.bands(COLUMNS, ROWS))) > 2
    assert made(unit, config) == at_once
    assert len({at_once[i : i + 2 * COLUMNS] for i in range(0, len(at_once), 2 * COLUMNS)}) == max(1, experts) * ROWS, (
        "rows differ"
    )


@pytest.mark.parametrize("block", [(1, 96), (5, 32), (24, 7), (80, 96)])
def test_blocks_that_do_not_end_with_a_band(block, monkeypatch):
    random = np.random.default_rng(0)
    values = random.standard_normal((ROWS - 7, COLUMNS), np.float32).astype(BF16)
    grid = tuple(-(-n // b) for n, b in zip(values.shape, block, strict=True))
    scale = (random.random(grid, np.float32) + 0.5).astype(np.float32)
    monkeypatch.setattr(integers, "BAND_CODES", 1)
    wanted = (values.astype(np.float32) * checkpoints.spread(scale, block, values.shape)).astype(BF16)
    assert scales.scaled(values, scale, block).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("rows", "columns", "band"), [(1, 9, 1), (16, 9, 1), (17, 9, 1), (200, 3, 100), (0, 5, 1)])
def test_bands_are_all_rows_once(rows, columns, band, monkeypatch):
    monkeypatch.setattr(integers, "BAND_CODES", band)
    found = [n for some in integers.bands(rows, columns) for n in range(some.start, some.stop)]
    assert found == list(range(rows))
    assert all(some.start % integers.ROWS == 0 for some in integers.bands(rows, columns))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_bits", [None, 8])
def test_packed_weights_are_restored_a_band_at_a_time(symmetric, scale_bits, monkeypatch):
    random, (n, k), groups = np.random.default_rng(0), (7, 48), 3
    packed = random.integers(-8, 8, (n, k)).astype(np.int8)
    zeros = None if symmetric else random.integers(-8, 8, (n, groups)).astype(np.int8)
    scale = (random.random((n, groups)) + 0.5).astype(np.float32)
    weight = TensorSpec("a.weight", BF16, (n, k))
    spec = QuantSpec(
        UnitSpec("a", {"weight": weight}), (Part("", 0, (0, n), (0, k)),), 4, "m/1", k // groups, symmetric, F32,
        scale_bits,
    )  # fmt: skip
    step = np.float32(1 if scale_bits is None else 16)
    zero = np.zeros((n, groups), np.int8) if zeros is None else zeros
    wanted = (packed - np.repeat(zero, 16, 1)).astype(np.float32) * step * np.repeat(scale, 16, 1)
    for band in (1, 2 * k, 3 * k + 1, 1 << 40):
        monkeypatch.setattr(readback, "BAND", band)
        out = np.zeros((n, k), BF16)
        readback.restore(spec, QuantPart(packed, scale, zeros), out)
        assert out.tobytes() == wanted.astype(BF16).tobytes(), band


# Files


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A few experts, a tensor that is only copied, and side files of several chunks, one of them no multiple of any."""
    folder = model(tmp_path_factory.mktemp("chunks") / "model", 1, 2, 128, 128)
    (folder / "tokenizer.json").write_text(json.dumps({"vocab": {f"token{i}": i for i in range(50)}}))
    (folder / "spiece.model").write_bytes(bytes(range(256)) + b"end")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "seven.txt").write_bytes(b"1234567")
    data = {"zz.weight": np.arange(50 * 64).astype(np.float32).reshape(50, 64).astype(BF16)}
    checkpoints.save_file(data, folder / "model-00003-of-00003.safetensors")
    for i in (1, 2):
        (folder / f"model-{i:05}-of-00002.safetensors").rename(folder / f"model-{i:05}-of-00003.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """What comes of it where everything is one chunk."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(source, out, Disk())
    for name in ("tokenizer.json", "spiece.model", "empty.txt", "seven.txt", "extra/notes.md"):
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    return without_manifest(out)


def without_manifest(out):
    """The files of an output; its manifest names the folder."""
    return {name: found for name, found in tree(out).items() if name != MANIFEST}


ALL = ("CHUNK", "PIECE", "BLOCK", "COPIED")


@pytest.mark.parametrize("names", [*((name,) for name in ALL), ALL])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_output_is_the_same_in_any_chunks(source, whole, out, small, names, workers):
    small(*names)
    convert(source, out, Disk(), workers=workers)
    assert without_manifest(out) == whole


@pytest.mark.parametrize("names", [("CHUNK",), ("PIECE",), ("COPIED",), ("CHUNK", "PIECE", "COPIED")])
def test_hashes_are_those_of_the_whole_tensor(source, out, small, names):
    small(*names)
    with pytest.raises(OutputError):
        convert(source, out, Disk(lambda c: fails(5)(c) if "UNFINISHED" in c.path.name else c.really()), shard="10MB")
    lines = [json.loads(line) for line in (out / PARTIAL / JOURNAL).read_text().splitlines()]
    noted = {name: found for line in lines for name, found in line.get("written", {}).items()}
    (shard,) = (out / PARTIAL).glob("model*.safetensors.partial")
    content, checked = shard.read_bytes(), 0
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            assert noted[name] == xxhash.xxh3_128_hexdigest(content[begin + low : begin + high]), name
            checked += 1
    assert checked == len(noted) > 12
    convert(source, out, Disk(), shard="10MB", verify=True)


@pytest.mark.parametrize("size", [0, 6, 7, 8, 14, 20, 21, 22])
def test_a_file_is_hashed_to_its_end(tmp_path, small, size):
    small("CHUNK")
    content = bytes(range(size))
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as opened:
        assert reading.content_hash(opened) == xxhash.xxh3_128_hexdigest(content)
    found = xxhash.xxh3_128()
    with (tmp_path / "file").open("rb") as opened:
        hashing.add_range(found, opened.fileno(), 1, max(0, size - 2))
    assert found.hexdigest() == xxhash.xxh3_128_hexdigest(content[1 : max(1, size - 1)])


@pytest.mark.parametrize("place", [0, 6, 7, 13, 14, 22, None])
def test_duplicates_are_compared_to_their_end(tmp_path, small, place):
    small("COMPARED")
    one = np.arange(23, dtype=np.uint8)
    other = one.copy()
    if place is not None:
        other[place] ^= 0x80
    for name, array in (("a", one), ("b", other)):
        checkpoints.save_file({"w": array}, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.config()))
    loader = SafetensorsLoader(path=tmp_path)
    if place is None:
        assert [spec.name for spec in loader.scan()] == ["w"]
    else:
        with pytest.raises(CheckpointError, match="both hold w, and not with the same content"):
            list(loader.scan())


@pytest.mark.parametrize("count", [2047, 2048, 2049, 5000])
def test_a_header_of_more_tensors_than_are_written_at_a_time(tmp_path, count):
    """In the order of the tensors, one behind the other, as the library itself reads them."""
    specs = [TensorSpec(f"model.layers.{i}.w", F32 if i % 3 else BF16, (i % 4, 2)) for i in range(count)]
    (file,) = SafetensorsWriter(path=tmp_path).plan(specs, ())
    header = bytes(file.header)
    assert len(header) == len(file.header)
    entries = json.loads(header[8:])
    entries.pop("__metadata__")
    assert list(entries) == [t.name for t in file.tensors] and len(entries) == count
    end = 0
    for tensor in file.tensors:
        entry = entries[tensor.name]
        assert entry["data_offsets"] == [end, end + tensor.nbytes] and entry["shape"] == list(tensor.shape)
        assert entry["dtype"] == ("BF16" if tensor.dtype == BF16 else "F32")
        end += tensor.nbytes
    with (tmp_path / "x.safetensors").open("wb") as opened:
        opened.write(header)
        opened.truncate(len(header) + end)
    with safe_open(tmp_path / "x.safetensors", "numpy") as opened:
        assert set(opened.keys()) == entries.keys()


def test_a_read_that_the_system_cuts_short_goes_on(source, monkeypatch):
    """Linux reads 2 GB at most."""
    read = os.preadv
    loader = SafetensorsLoader(path=source, io="pread")
    specs = [s for s in loader.scan() if s.nbytes > 99]
    wanted = [SafetensorsLoader(path=source).read(s).tobytes() for s in specs]
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:99]], offset))
    assert [loader.read(s).tobytes() for s in specs] == wanted


def test_a_write_that_the_system_cuts_short_goes_on(source, whole, out):
    def a_few(call):
        if call.name != "pwrite":
            return call.really()
        descriptor, data, offset = call.arguments
        return os.pwrite(descriptor, data[:1001], offset)

    convert(source, out, Disk(a_few))
    assert without_manifest(out) == whole


def test_a_side_file_that_cannot_be_read_on_is_an_error(source, out, small, monkeypatch):
    small("CHUNK")
    reads = iter(range(100))

    def read(opened, path):
        if next(reads) == 2:
            raise CheckpointError(f"{path} cannot be read: Input/output error")
        return opened.read(7)

    monkeypatch.setattr(writing, "_read", read)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        convert(source, out, Disk())
