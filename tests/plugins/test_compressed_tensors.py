"""The compressed-tensors layout against the library's own packing, and the rules for what is quantised."""

import json

import checkpoints
import numpy as np
import pytest
import reference
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from ktforge_plugins import CompressedTensors, Int4, Int8, KtAmx

from ktforge import Pipeline, QuantPart, QuantUnit, Rule, TensorSpec, Unit, UnitSpec, Unsupported
from ktforge.contract.tensors import BF16
from ktforge.testing import MemoryLoader, MemoryWriter, check_layout, check_quantizer, expert

QUANTIZERS = {4: Int4, 8: Int8}


def linear(n, k, seed=0) -> Unit:
    weight = (np.random.default_rng(seed).standard_normal((n, k)) * 0.1).astype(BF16)
    return Unit(UnitSpec("m.weight", {"weight": TensorSpec("m.weight", BF16, (n, k))}), {"weight": weight})


SHAPES = {"n": st.integers(1, 40), "groups": st.integers(1, 5), "seed": st.integers(0, 1000)}


@settings(max_examples=60, deadline=None)
@given(**SHAPES, size=st.sampled_from([8, 32, "channel"]), bits=st.sampled_from([4, 8]), symmetric=st.booleans())
def test_packing_equals_the_library(n, groups, seed, size, bits, symmetric):
    k = groups * (8 if size == "channel" else size)
    unit = linear(n, k, seed)
    packed = check_layout(CompressedTensors(), QUANTIZERS[bits](group_size=size, symmetric=symmetric), unit)
    codes, scales, zeros = reference.quantise_groups(
        unit.tensors["weight"], bits, k if size == "channel" else size, symmetric
    )  # fmt: skip
    want = {
        "m.weight_packed": pack_to_int32(torch.from_numpy(codes), bits).numpy(),
        "m.weight_scale": scales.astype(BF16),
        "m.weight_shape": np.array([n, k]),
    }
    if not symmetric:
        want["m.weight_zero_point"] = pack_to_int32(torch.from_numpy(zeros), bits, packed_dim=0).contiguous().numpy()
    assert packed.keys() == want.keys()
    for name, array in want.items():
        assert packed[name].dtype == array.dtype and packed[name].shape == array.shape, name
        assert packed[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("bits", [4, 8])
def test_narrow_codes_are_packed_without_the_lowest(bits):
    unit, layout, quantizer = linear(40, 96, 3), CompressedTensors(), QUANTIZERS[bits](group_size=32, narrow_range=True)
    packed = check_layout(layout, quantizer, unit)
    codes, scales, _ = reference.quantise_groups(unit.tensors["weight"], bits, 32, True, narrow=True)
    assert packed["m.weight_packed"].tobytes() == pack_to_int32(torch.from_numpy(codes), bits).numpy().tobytes()
    assert packed["m.weight_scale"].tobytes() == scales.astype(BF16).tobytes()
    assert codes.min() == 1 - (1 << (bits - 1))
    plain = QUANTIZERS[bits](group_size=32)
    methods = [q.plan(unit.spec, layout.demand(unit.spec)).method for q in (plain, quantizer)]
    assert methods == [f"minmax-int{bits}/1", f"minmax-narrow-int{bits}/1"]


def test_zero_points_have_no_narrow_range():
    unit = linear(4, 64).spec
    with pytest.raises(Unsupported, match="narrow_range is for symmetric codes: set symmetric: true"):
        Int4(symmetric=False, narrow_range=True).plan(unit, CompressedTensors().demand(unit))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "form"), [(4, "pack-quantized"), (8, "pack-quantized"), (8, "int-quantized")])
def test_the_library_decompresses_what_was_packed(bits, form, symmetric):
    """With the scheme that config.json declares."""
    unit = linear(24, 64, 1)
    model, layout = {"hidden_size": 64, "num_hidden_layers": 1}, CompressedTensors(format=form)
    writer, loader = MemoryWriter(), MemoryLoader(tensors={"m.weight": unit.tensors["weight"]}, model=model)
    quantizer = QUANTIZERS[bits](group_size=16, symmetric=symmetric)
    plan = Pipeline(loader=loader, quantize=quantizer, layout=layout, writer=writer).run().plan
    config = QuantizationConfig.model_validate(json.loads(plan.config_json)["quantization_config"])
    state = {n.removeprefix("m."): checkpoints.as_torch(a) for n, a in writer.tensors.items()}
    restored = BaseCompressor.get_value_from_registry(form).decompress(state, config.config_groups["group_0"])
    codes, scales, zeros = reference.quantise_groups(unit.tensors["weight"], bits, 16, symmetric)
    want = (codes.astype(np.float32) - np.repeat(zeros, 16, axis=1)) * np.repeat(scales, 16, axis=1)
    assert np.array_equal(
        checkpoints.as_numpy(restored["weight"]).astype(np.float32), want.astype(BF16).astype(np.float32)
    )


@settings(max_examples=40, deadline=None)
@given(**SHAPES, bits=st.sampled_from([4, 8]), symmetric=st.booleans(), whole=st.booleans())
def test_unpack_undoes_pack(n, groups, seed, bits, symmetric, whole):
    layout = CompressedTensors(format="int-quantized" if whole and bits == 8 else "pack-quantized")
    unit = linear(n, 8 * groups)
    spec = QUANTIZERS[bits](group_size=8, symmetric=symmetric).plan(unit.spec, layout.demand(unit.spec))
    random, top = np.random.default_rng(seed), 1 << (bits - 1)
    codes = random.integers(-top, top, (n, 8 * groups), np.int8)
    zeros = None if symmetric else random.integers(-top, top, (n, groups), np.int8)
    part = QuantPart(codes, random.random((n, groups), np.float32).astype(BF16), zeros)
    out = {t.name: np.empty(t.shape, t.dtype) for t in layout.plan(spec).tensors}
    layout.pack(QuantUnit(spec, (part,)), out)
    (back,) = layout.unpack(out, spec).parts
    assert np.array_equal(back.codes, codes) and back.scales.tobytes() == part.scales.tobytes()
    assert zeros is None if back.zeros is None else np.array_equal(back.zeros, zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_kt_amx_unpacks_too(isa, bits, parts):
    layout, unit = KtAmx(threadpool_count=parts), expert((512, 256))
    quantizer = QUANTIZERS[bits]()
    made = check_quantizer(quantizer, layout, unit)
    back = layout.unpack(check_layout(layout, quantizer, unit), made.spec)
    for ours, theirs in zip(back.parts, made.parts, strict=True):
        assert np.array_equal(ours.codes, theirs.codes) and np.array_equal(ours.scales, theirs.scales)


@pytest.mark.parametrize(
    ("quantizer", "error"), [(Int4(group_size=32), 0.11), (Int4(group_size=32, symmetric=False), 0.11),
                             (Int4(group_size=32, narrow_range=True), 0.11),
                             (Int8(group_size=128), 0.01), (Int8(symmetric=False), 0.01)],
)  # fmt: skip
def test_quantizers_keep_the_contract(isa, quantizer, error):
    check_quantizer(quantizer, CompressedTensors(), max_error=error)


def test_columns_that_do_not_divide_are_refused():
    unit = linear(4, 100).spec
    layout = CompressedTensors()
    with pytest.raises(Exception, match="group_size 32 does not divide the 100 columns of the weight"):
        Int4(group_size=32).plan(unit, layout.demand(unit))
    with pytest.raises(Exception, match="has 100 columns, which is not a multiple of 8 codes a word"):
        layout.plan(Int4().plan(unit, layout.demand(unit)))
    with pytest.raises(Exception, match="int-quantized does not hold 4 bits"):
        CompressedTensors(format="int-quantized").plan(Int4().plan(unit, layout.demand(unit)))


@pytest.mark.parametrize("quantizer", [Int4(group_size=32), Int8(symmetric=False)])
def test_kt_amx_refuses_groups_and_zero_points_in_the_plan(quantizer):
    loader = MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config())
    plan = Pipeline(loader=loader, quantize=quantizer, layout=KtAmx(), writer=MemoryWriter()).plan()
    assert "(and 7 more): the layout has room for one scale a row and no zero point" in plan.problems[0]
    assert "set group_size: channel and symmetric: true" in plan.problems[0]


def convert(data, model, quantizer, rules=(), **layout):
    writer = MemoryWriter()
    pipeline = Pipeline(
        loader=MemoryLoader(tensors=data, model=model), quantize=quantizer, rules=rules,
        layout=CompressedTensors(**layout), writer=writer,
    )  # fmt: skip
    plan = pipeline.plan()
    if plan.problems:
        return plan.problems
    pipeline.run()
    return writer.tensors, json.loads(plan.config_json)


def test_a_moe_model_has_its_experts_quantised_and_the_rest_ignored():
    data = checkpoints.tensors()
    made, config = convert(data, checkpoints.config(), Int4(group_size=32))
    modules = {n.removesuffix(".weight") for n in data if ".experts." in n}
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    assert made.keys() == {n for n in data if ".experts." not in n} | {f"{m}.{s}" for m in modules for s in suffixes}
    quantization = config["quantization_config"]
    (group,) = quantization["config_groups"].values()
    assert group["targets"] == ["Linear"] and group["weights"]["group_size"] == 32
    assert set(quantization["ignore"]) == {
        n.removesuffix(".weight") for n, a in data.items() if a.ndim == 2 and ".experts." not in n
    }
    QuantizationConfig.model_validate(quantization)


def test_a_dense_model_has_its_linear_weights_quantised():
    model, keys = checkpoints.architectures()["qwen2"]
    random = np.random.default_rng(0)
    data = {n: random.standard_normal(shape, np.float32).astype(BF16) for n, (_, shape) in keys.items()}
    made, config = convert(data, model, Int4(group_size=128))
    kept = {"lm_head.weight", "model.embed_tokens.weight"}
    for name, array in data.items():
        quantised = name.endswith("_proj.weight")
        assert (name.removesuffix("weight") + "weight_packed" in made) == quantised
        assert (name in made) != quantised
        assert quantised or name in kept or array.ndim == 1
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]


RULES = (
    Rule(match="*.layers.0.*", quantizer=None),
    Rule(match=r"re:.*\.experts\.\d+\.down_proj", quantizer=Int8(group_size="channel")),
    Rule(match="*.self_attn.?_proj.weight", quantizer=Int8(group_size=64)),
)


def test_rules_choose_by_name_and_the_first_match_wins():
    made, config = convert(checkpoints.tensors(), checkpoints.config(), Int4(group_size=32), RULES)
    assert not any("layers.0." in n and "_packed" in n for n in made)
    stem = "model.layers.1.mlp.experts.2"
    assert made[f"{stem}.gate_proj.weight_packed"].shape == (checkpoints.SIZE, checkpoints.HIDDEN // 8)
    assert made[f"{stem}.down_proj.weight_packed"].shape == (checkpoints.HIDDEN, checkpoints.SIZE // 4)
    assert made["model.layers.1.self_attn.k_proj.weight_scale"].shape == (128, 4)
    assert "model.layers.1.mlp.gate.weight" in made
    groups = config["quantization_config"]["config_groups"]
    schemes = [(g["weights"]["num_bits"], g["weights"]["group_size"]) for g in groups.values()]
    assert schemes == [(4, 32), (8, 64), (8, None)]
    assert groups["group_0"]["targets"] == ["Linear"]
    assert groups["group_1"]["targets"] == [f"model.layers.1.self_attn.{p}_proj" for p in "koqv"]
    assert "model.layers.0.mlp.experts.3.up_proj" in config["quantization_config"]["ignore"]


@pytest.mark.parametrize("match", ["*.nothing.*", "*.layers.0.self_attn.*", "*norm.weight"])
def test_a_rule_that_decides_nothing_is_an_error(match):
    rules = (*RULES, Rule(match=match, quantizer=None))
    (problem,) = convert(checkpoints.tensors(), checkpoints.config(), Int4(group_size=32), rules)
    assert problem.startswith(f"the rule {match!r} matches no weight that can be quantised")


def test_a_rule_that_is_no_pattern_is_an_error():
    with pytest.raises(ValueError, match="is no regular expression"):
        Rule(match="re:(", quantizer=None)


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [(None, "rules keep model.layers.0.mlp.experts.1 and 1 more, but kt-amx needs all"),
     (Int8(), "rules ask for experts of 4 and 8 bits, but kt-amx has one precision")],
)  # fmt: skip
def test_kt_amx_has_no_gap_and_one_precision(quantizer, message):
    """The engine would stop at the first expert that is missing, without a word."""
    loader = MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config())
    rules = (Rule(match="*.experts.1.*", quantizer=quantizer),)
    pipeline = Pipeline(loader=loader, quantize=Int4(), rules=rules, layout=KtAmx(), writer=MemoryWriter())
    assert pipeline.plan().problems == (message,)


def test_a_quantizer_gets_what_it_planned_and_may_have_options_without_a_hash():
    seen = []

    class Listed(Int8):
        name = "listed"
        layers: list[int]

        def quantize(self, unit, spec):
            seen.append((unit.spec == spec.unit, sorted(unit.tensors)))
            return super().quantize(unit, spec)

    rules = (Rule(match="*.down_proj.weight", quantizer=Listed(layers=[1])),)
    convert(checkpoints.tensors(), checkpoints.config(), Int4(group_size=32), rules)
    assert seen == [(True, ["down.weight"])] * (checkpoints.LAYERS * checkpoints.EXPERTS)


def test_weights_that_stay_quantised_are_refused():
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = checkpoints.config(quantization_config=quantization)
    (problem,) = convert(checkpoints.tensors(), model, Int4(group_size=32))
    assert "config.json has a quantization_config already" in problem and "put moe-to-bf16 under preprocess" in problem


def test_kt_amx_holds_whole_experts_only():
    rules = (Rule(match="*.down_proj.weight", quantizer=None),)
    loader = MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config())
    pipeline = Pipeline(loader=loader, quantize=Int4(), rules=rules, layout=KtAmx(), writer=MemoryWriter())
    assert "kt-amx holds whole routed experts only" in pipeline.plan().problems[0]
