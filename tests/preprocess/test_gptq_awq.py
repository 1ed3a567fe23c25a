"""GPTQ and AWQ against their formulas, packed and worked out once more here; AWQ against compressed-tensors as well.

tests/runtime/test_auto_round.py compares with a library that writes both.
"""

import numpy as np
import pytest
import torch
from checkpoints import BF16
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from hypothesis import given, settings
from hypothesis import strategies as st
from ktforge_plugins import Awq, Gptq, MoeToBf16
from preprocess.units import weight, weight_unit

from ktforge import CheckpointError, Unsupported


def packed(codes: np.ndarray, bits: int, axis: int, order=None) -> np.ndarray:
    """int32 words of ``codes`` along an axis; place i of a word takes the code at ``order[i]``."""
    count = 32 // bits
    order = order or range(count)
    moved = np.moveaxis(codes, axis, -1)
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // count), np.uint32)
    for i, source in enumerate(order):
        words |= moved[..., source::count].astype(np.uint32) << np.uint32(bits * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def random_parts(bits, rows, columns, groups, dtype, seed=0, symmetric=False):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (columns, rows), np.uint8)
    zeros = np.full((groups, rows), 1 << (bits - 1), np.uint8)
    if not symmetric:
        zeros = random.integers(0, 1 << bits, (groups, rows), np.uint8)
    scale = (random.random((groups, rows)) * 0.02 + 1e-4).astype(dtype)
    return codes, zeros, scale


def expected(codes, zeros, scale, group_of) -> np.ndarray:
    value = codes.astype(np.float64) - zeros[group_of].astype(np.float64)
    return np.ascontiguousarray((value * scale[group_of].astype(np.float64)).astype(np.float32).T.astype(BF16))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("order", ["none", "plain", "desc_act"])
@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
def test_gptq(bits, symmetric, version, order, dtype):
    rows, columns, groups = 32, 128, 4
    codes, zeros, scale = random_parts(bits, rows, columns, groups, dtype, symmetric=symmetric)
    group_of = np.arange(columns) // (columns // groups)
    if order == "desc_act":
        group_of = np.random.default_rng(2).permutation(group_of)
    first = version != "gptq_v2"
    stored_zeros = (zeros.astype(int) - first) % (1 << bits)
    arrays = {
        "qweight": packed(codes, bits, 0), "qzeros": packed(stored_zeros, bits, 1), "scales": scale,
        "g_idx": group_of.astype(np.int32),
    }  # fmt: skip
    if order == "none":
        del arrays["g_idx"]
    quantization = {"quant_method": "gptq", "bits": bits} | ({"checkpoint_format": version} if version else {})
    got = weight(Gptq(), arrays, {"quantization_config": quantization})
    assert got.tobytes() == expected(codes, zeros, scale, group_of).tobytes()
    assert weight(MoeToBf16(), arrays, {"quantization_config": quantization}).tobytes() == got.tobytes()


@pytest.mark.parametrize(
    ("form", "less_one"),
    [("auto_round", False), ("auto_round:gptqmodel", False), ("auto_round:auto_gptq", True), ("auto_round:gptq", True)],
)
def test_auto_round_says_in_words_of_its_own_what_zero_points_are(form, less_one):
    codes, zeros, scale = random_parts(4, 32, 128, 4, np.float16)
    stored = (zeros.astype(int) - less_one) % 16
    arrays = {"qweight": packed(codes, 4, 0), "qzeros": packed(stored, 4, 1), "scales": scale}
    config = {"quantization_config": {"quant_method": "auto-round", "bits": 4, "packing_format": form}}
    got = weight(MoeToBf16(), arrays, config)
    assert got.tobytes() == expected(codes, zeros, scale, np.arange(128) // 32).tobytes()


@pytest.mark.parametrize(
    ("said", "less_one"),
    [
        ({"checkpoint_format": "gptq_v2", "packing_format": "auto_round:auto_gptq", "format": "gptq"}, False),
        ({"packing_format": "auto_round:auto_gptq", "checkpoint_format": "gptq_v2"}, False),
        ({"packing_format": "auto_round", "format": "gptq"}, False),
        ({"checkpoint_format": None, "packing_format": "auto_round"}, False),
        ({"checkpoint_format": None, "format": "gptq_v2"}, False),
        ({"checkpoint_format": "gptq", "packing_format": "auto_round"}, True),
        ({"checkpoint_format": None}, True),
        ({"packing_format": "auto"}, True),
    ],
)
def test_the_first_field_that_says_anything_counts(said, less_one):
    codes, zeros, scale = random_parts(4, 32, 128, 4, np.float16)
    stored = (zeros.astype(int) - less_one) % 16
    arrays = {"qweight": packed(codes, 4, 0), "qzeros": packed(stored, 4, 1), "scales": scale}
    got = weight(Gptq(), arrays, {"quantization_config": {"quant_method": "gptq", "bits": 4, **said}})
    assert got.tobytes() == expected(codes, zeros, scale, np.arange(128) // 32).tobytes()


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ({"version": "gemv", "checkpoint_format": "gemm"}, "gemv"),
        ({"version": None, "checkpoint_format": "marlin", "format": "gemm"}, "marlin"),
        ({"format": "GEMV_fast"}, "gemv_fast"),
        ({"version": "GEMM", "checkpoint_format": "marlin", "format": "gemv"}, None),
        ({"version": "gemm", "format": "gemv"}, None),
        ({}, None),
    ],
)
def test_the_first_field_that_says_a_version_counts(said, version):
    zeros = np.zeros((4, 4), np.int32)
    arrays = {"qweight": np.zeros((128, 4), np.int32), "qzeros": zeros, "scales": np.ones((4, 32), np.float16)}
    stage = Awq().bind({"quantization_config": {"quant_method": "awq", "bits": 4, **said}})
    if version is None:
        stage.plan(weight_unit(arrays).spec)
    else:
        with pytest.raises(Unsupported, match=f"AWQ in the order of its version {version}; awq reads"):
            stage.plan(weight_unit(arrays).spec)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("said", [4, None])
def test_gptq_of_mixed_bits_is_told_by_its_shapes(bits, said):
    codes, zeros, scale = random_parts(bits, 32, 128, 4, np.float16)
    arrays = {"qweight": packed(codes, bits, 0), "qzeros": packed(zeros, bits, 1), "scales": scale}
    config = {"quantization_config": {"quant_method": "gptq", "bits": said, "checkpoint_format": "gptq_v2"}}
    got = weight(MoeToBf16(), arrays, config)
    assert got.tobytes() == expected(codes, zeros, scale, np.arange(128) // 32).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_awq(dtype, groups):
    rows, columns, order = 64, 96, (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scale = random_parts(4, rows, columns, groups, dtype)
    arrays = {"qweight": packed(codes, 4, 1, order), "qzeros": packed(zeros, 4, 1, order), "scales": scale}
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "GEMM"}}
    got = weight(Awq(), arrays, config)
    assert got.tobytes() == expected(codes, zeros, scale, np.arange(columns) // (columns // groups)).tobytes()
    assert weight(MoeToBf16(), arrays, config).tobytes() == got.tobytes()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from([8, 32]), st.integers(0, 99))
def test_awq_means_what_compressed_tensors_reads(eights_of_rows, groups, size, seed):
    """Any words at all: the library takes them apart, and the products are torch's."""
    random = np.random.default_rng(seed)
    words = random.integers(-(1 << 31), 1 << 31, (groups * size, eights_of_rows)).astype(np.int32)
    zeros = random.integers(-(1 << 31), 1 << 31, (groups, eights_of_rows)).astype(np.int32)
    scale = (random.random((groups, 8 * eights_of_rows)) * 0.02 + 1e-4).astype(np.float16)
    codes, scales, zero_points = AutoAWQConverter(group_size=size)._convert_gemm_module(
        *(torch.from_numpy(a) for a in (words, scale, zeros))
    )
    difference = codes.float() - zero_points.float().repeat_interleave(size, 1)
    want = (difference * scales.float().repeat_interleave(size, 1)).bfloat16()
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": size}}
    got = weight(Awq(), {"qweight": words, "qzeros": zeros, "scales": scale}, config)
    assert got.tobytes() == want.contiguous().view(torch.int16).numpy().tobytes()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_any_shape(eights_of_rows, eights_of_groups, groups, seed):
    rows, columns = 8 * eights_of_rows, 8 * eights_of_groups * groups
    codes, zeros, scale = random_parts(4, rows, columns, groups, np.float16, seed)
    want = expected(codes, zeros, scale, np.arange(columns) // (columns // groups)).tobytes()
    gptq = {"qweight": packed(codes, 4, 0), "qzeros": packed(zeros, 4, 1), "scales": scale}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}}
    assert weight(MoeToBf16(), gptq, config).tobytes() == want
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    awq = {"qweight": packed(codes, 4, 1, order), "qzeros": packed(zeros, 4, 1, order), "scales": scale}
    assert weight(MoeToBf16(), awq, {"quantization_config": {"quant_method": "awq", "bits": 4}}).tobytes() == want


I32 = np.int32


@pytest.mark.parametrize(
    ("stage", "change", "quantization", "message"),
    [
        (Gptq, {"scales": None}, {}, "qweight is packed, but scales are missing"),
        (Gptq, {"qzeros": None, "scales": None}, {}, "but qzeros and scales are missing"),
        (Gptq, {"qzeros": np.zeros((4, 3), I32)}, {}, "this is GPTQ of 3 bits; gptq reads 2, 4 and 8: get the model"),
        (Gptq, {"qzeros": np.zeros((4, 5), I32)}, {}, "GPTQ of 5 bits; gptq reads"),
        (
            Gptq,
            {"qzeros": np.zeros((4, 0), I32)},
            {},
            r"qzeros \(I32 \[4, 0\]\) does not fit .*scales .* in 2, 4 or 8 bits",
        ),
        (Gptq, {"qzeros": np.zeros((3, 4), I32)}, {}, r"qzeros \(I32 \[3, 4\]\) does not fit .*scales"),
        (
            Gptq,
            {},
            {"checkpoint_format": "marlin"},
            "this is GPTQ in the form marlin; gptq reads gptq and gptq_v2: get",
        ),
        (Gptq, {}, {"is_marlin_format": True}, "GPTQ in the form marlin"),
        (Gptq, {}, {"checkpoint_format": "gptq_p"}, "GPTQ in the form gptq_p"),
        (Gptq, {"g_idx": np.zeros(3, I32)}, {}, r"g_idx .* must be integers \[128\]"),
        (Gptq, {"scales": np.ones((5, 32), np.float16), "qzeros": np.ones((5, 4), I32)}, {}, "there is no g_idx"),
        (Awq, {"qzeros": None}, {}, "qweight is packed, but qzeros are missing"),
        (Awq, {"scales": np.ones((4, 33), np.float16)}, {}, "does not fit .*qweight .* in 4 bits"),
        (Awq, {"scales": np.ones((4, 16), np.float16)}, {}, "is AWQ of 8 bits; awq reads 4; writers of 8 bits do not"),
        (Awq, {"qweight": np.zeros((128, 3), I32)}, {}, "is AWQ of 3 bits; awq reads 4: get the model in BF16"),
        (Awq, {"qweight": np.zeros((128, 4), np.int16)}, {}, "AWQ in I16 words, as llm-awq writes them; awq reads I32"),
        (Awq, {}, {"version": "gemv"}, "AWQ in the order of its version gemv; awq reads gemm: get the model in BF16"),
        (Awq, {"scales": np.ones((128, 1), np.float16)}, {}, "AWQ with outputs first, as in its version gemv"),
        (Awq, {}, {"version": "gemv_fast"}, "AWQ in the order of its version gemv_fast"),
        (Awq, {}, {"checkpoint_format": "marlin"}, "AWQ in the order of its version marlin"),
    ],
)
def test_what_does_not_fit_is_refused(stage, change, quantization, message):
    shape = (16, 32) if stage is Gptq else (128, 4)
    arrays = {"qweight": np.zeros(shape, I32), "qzeros": np.zeros((4, 4), I32), "scales": np.ones((4, 32), np.float16)}
    arrays = {n: a for n, a in (arrays | change).items() if a is not None}
    config = {"quantization_config": {"quant_method": stage.name, "bits": 4, **quantization}}
    with pytest.raises(Unsupported, match=message):
        stage().bind(config).plan(weight_unit(arrays).spec)


def test_an_order_that_points_nowhere_is_an_error():
    arrays = {
        "qweight": np.zeros((16, 32), I32),
        "qzeros": np.zeros((4, 4), I32),
        "scales": np.ones((4, 32), np.float16),
    }
    weight(Gptq(), arrays | {"g_idx": np.full(128, 3, I32)}, {"quantization_config": {"bits": 4}})
    for order in (np.full(128, 4, I32), np.eye(1, 128, 9, dtype=I32)[0] * 4, -np.eye(1, 128, 127, dtype=I32)[0]):
        with pytest.raises(CheckpointError, match="g_idx points to a group outside the 4"):
            weight(Gptq(), arrays | {"g_idx": order}, {"quantization_config": {"bits": 4}})
