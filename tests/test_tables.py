"""Tables of names, spelled out entry by entry: one that is lost from a table is lost from a test that reads it."""

import json

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16, F8
from ktforge_plugins import AutoLoader, Fp8, MoeToBf16, SafetensorsLoader
from preprocess.units import made, weight_unit
from safetensors import numpy as safetensors_numpy

from ktforge import CheckpointError, Pipeline
from ktforge.checkpoint.downloads import MARKS
from ktforge.checkpoint.folder import QUANTIZATION_FILES, WEIGHT_SUFFIXES, CheckpointFolder
from ktforge.contract.tensors import DTYPES, dtype_name
from ktforge.model.number_format import ACTIVATION
from ktforge.testing import MemoryLoader, MemoryWriter
from ktforge.text import counted, parse_size, size_text

DOWNLOADS = [
    ".aria2", ".lftp-pget-status", ".st", ".part", ".incomplete", ".crdownload", ".opdownload", ".download",
    ".downloading", ".!qb", ".!ut", ".bc!", ".fdmdownload", ".xltd", ".td", ".mega", ".partial",
]  # fmt: skip
WEIGHTS = [
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".msgpack", ".h5", ".npz", ".kt",
]  # fmt: skip
DESCRIPTIONS = ["hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"]
ACTIVATIONS = [
    "input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "activation_scale", "qscale_act",
]  # fmt: skip
KINDS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def test_none_is_forgotten_here():
    assert set(DOWNLOADS) == MARKS and set(WEIGHTS) == WEIGHT_SUFFIXES
    assert set(DESCRIPTIONS) == QUANTIZATION_FILES and set(ACTIVATIONS) == ACTIVATION
    assert {name: dtype.name for name, dtype in DTYPES.items()} == KINDS
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())


@pytest.fixture
def folder(tmp_path):
    return checkpoints.write(tmp_path / "model", {"w": np.ones((2, 2), BF16)}, checkpoints.config())


@pytest.mark.parametrize("mark", [*DOWNLOADS, *map(str.upper, DOWNLOADS)])
def test_a_download_that_has_not_finished(folder, mark):
    """Beside weights and beside a side file, which are there at their full size; alone, it is nobody's file."""
    (folder / f"other{mark}").touch()
    assert [s.name for s in AutoLoader(path=folder).scan()] == ["w"]
    assert not [p for p in CheckpointFolder(folder).side_files() if p.name.startswith("other")]
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / f"{name}{mark}").touch()
        with pytest.raises(CheckpointError, match="has not been downloaded to its end"):
            loader = AutoLoader(path=folder)
            list(loader.scan())
            loader.side_files()
        (folder / f"{name}{mark}").unlink()


@pytest.mark.parametrize("suffix", [*WEIGHTS, *map(str.upper, WEIGHTS)])
def test_weights_are_no_side_files(folder, suffix):
    for place in ("sub/x", "x"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / (place + suffix)).write_bytes(b"x")
    (folder / "x.txt").touch()
    found = {str(p) for p in CheckpointFolder(folder).side_files()}
    assert "x.txt" in found and f"x{suffix}" not in found and f"sub/x{suffix}" not in found


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_what_describes_a_quantisation_goes_with_it(tmp_path, name):
    folder = checkpoints.fp8_checkpoint(tmp_path / "model", (128, 128))
    (folder / name).write_text("{}")
    loader = SafetensorsLoader(path=folder)
    stays = Pipeline(loader=loader, writer=MemoryWriter()).plan().side_files
    goes = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=MemoryWriter()).plan().side_files
    assert {p.name for p in stays} - {p.name for p in goes} == {name}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_where_config_json_describes_it(key, nested):
    data = {}
    for i, (name, array) in enumerate(checkpoints.tensors().items()):
        data[name] = array
        if ".experts." in name:
            data[name], data[name + "_scale_inv"] = checkpoints.to_fp8(array, (128, 128), i)
    said = {key: {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config = checkpoints.config(**({"text_config": said} if nested else said), expert_dtype="fp8", amx_quantization={})
    loader = MemoryLoader(tensors=data, model=config)
    plan = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=MemoryWriter()).plan()
    assert plan.problems == ()
    assert json.loads(plan.config_json) == checkpoints.config(**({"text_config": {}} if nested else {}))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_scales_of_activations_go(name):
    arrays = {"weight": np.ones((4, 4), F8), "weight_scale": np.ones((), np.float32), name: np.float32([0.5])}
    for stage in (Fp8(), MoeToBf16()):
        assert list(made(stage, weight_unit(arrays)).tensors) == ["gate.weight"]


@pytest.mark.parametrize("name", [n for n in KINDS if not n.startswith(("BF", "F8"))])
def test_every_dtype_is_read_as_it_is(tmp_path, name):
    array = np.arange(12).reshape(3, 4).astype(DTYPES[name])
    safetensors_numpy.save_file({"w": array}, tmp_path / "model.safetensors")
    loader = SafetensorsLoader(path=tmp_path)
    (spec,) = loader.scan()
    assert spec.dtype == array.dtype == np.dtype(KINDS[name]) and np.array_equal(loader.read(spec), array)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7), ("0", 0), ("1KB", 1000), ("1kb", 1000), ("2MB", 2_000_000), ("5GB", 5_000_000_000),
        ("1TB", 10**12), ("1KiB", 1024), ("3MiB", 3 << 20), ("4GiB", 4 << 30), (" 1.5 GB ", 1_500_000_000),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "5 potatoes", "1TiB", "1.GB", ".5GB", "1" * 16, "1 2"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="is not a size such as 5GB, 500MB or 4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1000, "1.00 kB"), (999_999, "1,000.00 kB"),
        (10**6, "1.00 MB"), (10**9 - 1, "1,000.00 MB"), (10**9, "1.00 GB"), (10**12, "1.00 TB"),
        (17_670_000_000, "17.67 GB"), (10**16, "10,000.00 TB"),
    ],
)  # fmt: skip
def test_sizes_as_people_read_them(size, text):
    assert size_text(size) == text


def test_numbers_of_things():
    assert [counted(n, "file") for n in (0, 1, 2, 6144)] == ["0 files", "1 file", "2 files", "6,144 files"]
