"""Statistics as they are kept: there and back, blended, refused; and llama.cpp's, written as llama.cpp writes them."""

import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktforge import CheckpointError, OutputError, TensorSpec, UnitSpec, Unsupported
from ktforge.calibration import Calibration, LayerStatistics, open_calibration, write_calibration
from ktforge.calibration.statistics import blended

EXPERTS, HIDDEN, SIZE = 3, 8, 6


def statistics(seed=0, inputs=0):
    random = np.random.default_rng(seed)
    kept = {}
    if inputs:
        kept["inputs"] = random.standard_normal((inputs, HIDDEN)).astype(ml_dtypes.bfloat16)
        kept["routed"] = random.integers(0, EXPERTS, (inputs, 2), np.int32)
    return LayerStatistics(
        np.array([10, 0, 1000]), random.random((EXPERTS, HIDDEN), np.float32),
        random.random((EXPERTS, SIZE), np.float32), **kept,
    )  # fmt: skip


def expert(layer=0, number=0, hidden=HIDDEN, size=SIZE):
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    tensors = {f"{p}.weight": TensorSpec(p, np.dtype(ml_dtypes.bfloat16), s) for p, s in shapes.items()}
    return UnitSpec("x", tensors, layer, number)


def test_there_and_back(tmp_path):
    layers = {7: statistics(1, inputs=5), 2: statistics(2)}
    write_calibration(tmp_path / "c.safetensors", layers, {"activation": "silu", "tokens": "9"})
    found = open_calibration(tmp_path / "c.safetensors")
    assert list(found.layers) == [2, 7] and found.activation == "silu"
    for number, layer in layers.items():
        for name, array in vars(layer).items():
            back = getattr(found.layers[number], name)
            assert (array is None) == (back is None)
            if array is not None:
                assert array.dtype == back.dtype and np.array_equal(array, back)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_blending_is_by_tokens():
    """n / (n + 2 columns) of its own, the rest the mean over all tokens of the layer."""
    layer = statistics()
    made = blended(layer.down, layer.tokens)
    whole = (layer.down * layer.tokens[:, None]).sum(0) / 1010
    for number, tokens in enumerate(layer.tokens):
        own = tokens / (tokens + 2 * SIZE)
        np.testing.assert_allclose(made[number], own * layer.down[number] + (1 - own) * whole, rtol=1e-6)
    assert np.array_equal(blended(layer.down, np.zeros(EXPERTS, int)), layer.down)


def test_a_projection_gets_its_statistics(tmp_path):
    layer = statistics()
    found = Calibration(tmp_path / "c", {4: layer})
    for number in range(EXPERTS):
        unit = expert(4, number)
        found.check(unit)
        for projection, known in {"gate": layer.gate_up, "up": layer.gate_up, "down": layer.down}.items():
            assert np.array_equal(found.mean_squares(unit, projection), blended(known, layer.tokens)[number])


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        (expert(3, 0), "knows nothing of layer 3"),
        (expert(4, 9), "knows 3 experts in layer 4"),
        (expert(4, 0, hidden=16), "has 8 input channels for gate of layer 4, and the weight has 16"),
        (expert(4, 0, size=16), "has 6 input channels for down of layer 4, and the weight has 16"),
        (UnitSpec("x", {}), "knows of routed experts alone"),
    ],
)
def test_another_model_is_refused(tmp_path, unit, why):
    with pytest.raises(Unsupported, match=why):
        Calibration(tmp_path / "c", {4: statistics()}).check(unit)


def changed(**changes):
    return LayerStatistics(**{**vars(statistics(inputs=5)), **changes})


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (changed(gate_up=np.full((3, 8), np.nan, np.float32)), "gate_up holds what is no mean square"),
        (changed(down=np.full((3, 6), -1, np.float32)), "down holds what is no mean square"),
        (changed(down=np.ones((2, 6), np.float32)), r"down is \[2, 6\], for 3 experts"),
        (changed(tokens=np.array([1, 2, -3])), "tokens holds a negative number"),
        (changed(inputs=None), "are there together or not at all"),
        (changed(inputs=np.ones((5, 7), ml_dtypes.bfloat16)), r"inputs is \[5, 7\]"),
        (changed(routed=np.zeros((4, 2), np.int32)), r"routed is \[4, 2\]"),
        (changed(routed=np.full((5, 2), 9, np.int32)), "names experts that are none of 3"),
    ],
)
def test_statistics_that_make_no_sense(tmp_path, layer, why):
    with pytest.raises(CheckpointError, match=why):
        write_calibration(tmp_path / "c.safetensors", {0: layer}, {})
    assert not list(tmp_path.iterdir())


def test_files_that_are_none(tmp_path):
    import os

    from safetensors.numpy import save_file

    path = tmp_path / "c"
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        open_calibration(path)
    with pytest.raises(CheckpointError, match="is not a file that has an end"):
        open_calibration(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a file that has an end"):
        open_calibration(tmp_path / "pipe")
    save_file({"x": np.ones(1)}, path)
    with pytest.raises(CheckpointError, match="is no calibration"):
        open_calibration(path)
    save_file({"x": np.ones(1)}, path, {"format": "ktforge-calibration", "version": "2"})
    with pytest.raises(CheckpointError, match="is a calibration of version 2"):
        open_calibration(path)
    ours = {"format": "ktforge-calibration", "version": "1"}
    for name, array, why in [
        ("other", np.ones(1), "holds other, which no calibration does"),
        ("layers.0.tokens", np.ones(1), "tokens is F64, and should be I64"),
        ("layers.0.tokens", np.ones(1, np.int64), "has no gate_up of layer 0"),
    ]:
        save_file({name: array}, path, ours)
        with pytest.raises(CheckpointError, match=why):
            open_calibration(path)
    save_file({}, path, ours)
    with pytest.raises(CheckpointError, match="statistics of no routed experts"):
        open_calibration(path)


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match="nowhere/c cannot be written"):
        write_calibration(tmp_path / "nowhere" / "c", {0: statistics()}, {})


@given(st.binary(max_size=200), st.sampled_from([b"", b"GGUF", struct.pack("<Q", 20) + b"{"]))
def test_garbage_is_refused_in_a_sentence(tmp_path_factory, garbage, start):
    path = tmp_path_factory.mktemp("garbage") / "c"
    path.write_bytes(start + garbage)
    with pytest.raises(CheckpointError):
        open_calibration(path)


@given(st.data())
def test_a_damaged_file_is_refused_or_whole(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "c"
    write_calibration(path, {0: statistics()}, {})
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        found = open_calibration(path)
    except CheckpointError:
        return
    assert all(layer.problem() is None for layer in found.layers.values())


def legacy(path, entries, calls=4):
    """As llama-imatrix wrote it until 2025: a value is the mean square times the calls."""
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(entries)))
        for name, squares in entries.items():
            file.write(struct.pack("<i", len(name)) + name.encode())
            file.write(struct.pack("<ii", calls, squares.size) + (squares * calls).astype("<f4").tobytes())
        file.write(struct.pack("<i", 7) + struct.pack("<i", 8) + b"text.txt")
    return path


def entries_of(layer, number=5):
    stem = f"blk.{number}"
    return {
        "blk.0.attn_q.weight": np.ones(HIDDEN, np.float32),
        f"{stem}.ffn_gate_inp.weight": np.ones(HIDDEN, np.float32),
        f"{stem}.ffn_gate_exps.weight": layer.gate_up, f"{stem}.ffn_up_exps.weight": layer.gate_up,
        f"{stem}.ffn_down_exps.weight": layer.down,
    }  # fmt: skip


def test_the_old_imatrix(tmp_path):
    layer = statistics()
    found = open_calibration(legacy(tmp_path / "old.dat", entries_of(layer)))
    assert list(found.layers) == [5] and found.activation is None
    np.testing.assert_allclose(found.layers[5].gate_up, layer.gate_up, rtol=1e-6)
    np.testing.assert_allclose(found.layers[5].down, layer.down, rtol=1e-6)
    assert not found.layers[5].tokens.any()


def write_gguf(path, layer, number=5, counts=None):
    """As llama-imatrix writes it since 2025: sums, and the tokens of each expert."""
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_type("imatrix")
    counts = layer.tokens.astype(np.float32) if counts is None else counts
    for name in ("gate", "up", "down"):
        squares = layer.down if name == "down" else layer.gate_up
        writer.add_tensor(f"blk.{number}.ffn_{name}_exps.weight.in_sum2", squares * counts[:, None])
        writer.add_tensor(f"blk.{number}.ffn_{name}_exps.weight.counts", counts[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_new_imatrix(tmp_path):
    layer = statistics()
    found = open_calibration(write_gguf(tmp_path / "new.gguf", layer)).layers[5]
    assert np.array_equal(found.tokens, layer.tokens)
    known = layer.tokens > 0
    np.testing.assert_allclose(found.gate_up[known], layer.gate_up[known], rtol=1e-6)
    np.testing.assert_allclose(found.down[known], layer.down[known], rtol=1e-6)
    assert np.isfinite(blended(found.down, found.tokens)).all() and blended(found.down, found.tokens)[1].any()


def test_an_imatrix_that_says_too_little(tmp_path):
    layer = statistics()
    whole = entries_of(layer)
    for left, why in [
        ("blk.5.ffn_gate_inp.weight", "does not say how many experts blk.5 has"),
        ("blk.5.ffn_down_exps.weight", "has not both gate or up and down of layer 5"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            open_calibration(legacy(tmp_path / "x", {n: v for n, v in whole.items() if n != left}))
    with pytest.raises(CheckpointError, match="of a model without routed experts"):
        open_calibration(legacy(tmp_path / "x", {"blk.0.attn_q.weight": np.ones(4, np.float32)}))
    with pytest.raises(CheckpointError, match="there are 3 counts"):
        broken = LayerStatistics(layer.tokens, layer.gate_up, layer.down)
        open_calibration(write_gguf(tmp_path / "n.gguf", broken, counts=np.array([1, np.nan, 2], np.float32)))


def test_without_the_package(tmp_path, monkeypatch):
    from ktforge import ConfigError
    from ktforge.calibration import imatrix

    path = write_gguf(tmp_path / "new.gguf", statistics())
    monkeypatch.setattr(imatrix, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ktforge\[imatrix\]'"):
        open_calibration(path)
