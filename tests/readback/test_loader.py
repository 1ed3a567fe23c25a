"""Whatever was packed comes back as the BF16 weights that its codes and scales stand for."""

import json

import checkpoints
import numpy as np
import pytest
import reference
from ktforge_plugins import (
    CompressedTensors,
    Int4,
    Int8,
    KtAmx,
    KtFolderWriter,
    SafetensorsLoader,
    SafetensorsWriter,
    SplitExperts,
)

from ktforge import CheckpointError, Pipeline, Registry
from ktforge.pipeline.presets import dequantize_pipeline
from ktforge.readback.loader import PackedLoader, packed_loader
from ktforge.readback.packed import find_packed


@pytest.fixture(scope="module")
def registry():
    return Registry.installed()


def kt_values(weight, projection, bits, parts):
    """The BF16 weights that kt-amx stands for."""
    shares = []
    for share in np.split(weight, parts, axis=1 if projection == "down" else 0):
        codes, scale = reference.quantise(np.ascontiguousarray(share), bits)
        step = np.float32(16 if bits == 4 else 1)
        shares.append((codes.astype(np.float32) * step * scale[:, None]).astype(checkpoints.BF16))
    return np.concatenate(shares, axis=1 if projection == "down" else 0)


def group_values(weight, bits, size, symmetric):
    codes, scales, zeros = reference.quantise_groups(weight, bits, size, symmetric)
    spread = np.repeat(scales, size, axis=1)
    return ((codes.astype(np.float32) - np.repeat(zeros, size, axis=1)) * spread).astype(checkpoints.BF16)


def round_trip(source, tmp_path, registry, quantizer, layout, writer=SafetensorsWriter, manifest=True):
    packed, back = tmp_path / "packed", tmp_path / "back"
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=quantizer, layout=layout, writer=writer(path=packed)).run()
    if not manifest:
        (packed / "ktforge_manifest.json").unlink()
    dequantize_pipeline(packed, back, registry).run()
    assert json.loads((back / "config.json").read_text()) == checkpoints.config()
    assert not list(back.rglob("*.kt"))
    return checkpoints.load_output(back)


def compare(made, expected):
    data = checkpoints.tensors()
    assert made.keys() == data.keys()
    for name, array in data.items():
        want = expected(name.split(".")[-2].split("_")[0], array) if ".experts." in name else array
        assert made[name].dtype == checkpoints.BF16 and made[name].tobytes() == want.tobytes(), name


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("writer", [SafetensorsWriter, KtFolderWriter])
@pytest.mark.parametrize(("bits", "parts"), [(4, 1), (4, 4), (8, 2)])
def test_kt_amx(source, tmp_path, registry, bits, parts, writer, manifest):
    quantizer = Int4() if bits == 4 else Int8()
    made = round_trip(source, tmp_path, registry, quantizer, KtAmx(threadpool_count=parts), writer, manifest)
    compare(made, lambda projection, weight: kt_values(weight, projection, bits, parts))


@pytest.mark.parametrize(("bits", "size", "symmetric"), [(4, 32, True), (4, 128, False), (8, 64, True), (8, 32, False)])
def test_compressed_tensors(source, tmp_path, registry, bits, size, symmetric):
    quantizer = (Int4 if bits == 4 else Int8)(group_size=size, symmetric=symmetric)
    made = round_trip(source, tmp_path, registry, quantizer, CompressedTensors())
    compare(made, lambda _, weight: group_values(weight, bits, size, symmetric))


def test_int_quantized(source, tmp_path, registry):
    layout = CompressedTensors(format="int-quantized")
    made = round_trip(source, tmp_path, registry, Int8(group_size=64), layout)
    compare(made, lambda _, weight: group_values(weight, 8, 64, True))


def test_a_part_that_is_missing_is_named(source, tmp_path, registry):
    packed = tmp_path / "packed"
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int4(), layout=KtAmx(), writer=KtFolderWriter(path=packed)).run()
    lost = next(packed.glob("_layer_1/_numa_1/INT4_up_2_*scale_.kt"))
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up_exps.2.numa.1.scale is missing from .*packed"):
        dequantize_pipeline(packed, tmp_path / "back", registry).plan()


def test_a_kt_file_of_another_size_is_named(source, tmp_path, registry):
    packed = tmp_path / "packed"
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int4(), layout=KtAmx(), writer=KtFolderWriter(path=packed)).run()
    cut = next(packed.glob("_layer_0/_numa_0/*quant_.kt"))
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{cut.name} has .* bytes, its name says otherwise"):
        dequantize_pipeline(packed, tmp_path / "back", registry).plan()


@pytest.mark.parametrize("manifest", [True, False])
def test_an_unknown_model_type_gets_its_names_back_from_the_manifest_alone(source, tmp_path, registry, manifest):
    packed = tmp_path / "packed"
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int4(), layout=KtAmx(), writer=SafetensorsWriter(path=packed)).run()
    (packed / "config.json").write_text(json.dumps(checkpoints.config(model_type="brand_new")))
    if manifest:
        dequantize_pipeline(packed, tmp_path / "back", registry).run()
        compare(checkpoints.load_output(tmp_path / "back"), lambda p, weight: kt_values(weight, p, 4, 2))
        return
    (packed / "ktforge_manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest says what .* were called, .* 'brand_new'\) is not a known"):
        dequantize_pipeline(packed, tmp_path / "back", registry).plan()


def test_a_family_that_no_file_knows_comes_back_under_its_own_names(tmp_path, registry):
    """Names, count and size of its experts are in neither a file of architectures nor its config.json."""
    data = {n.replace(".mlp.", ".sparse."): a for n, a in checkpoints.tensors().items()}
    lacking = ("num_experts", "moe_intermediate_size")
    config = {k: v for k, v in checkpoints.config(model_type="brand_new").items() if k not in lacking}
    packed, back = tmp_path / "packed", tmp_path / "back"
    loader = SafetensorsLoader(path=checkpoints.write(tmp_path / "new", data, config))
    Pipeline(loader=loader, quantize=Int8(), layout=KtAmx(), writer=SafetensorsWriter(path=packed)).run()
    dequantize_pipeline(packed, back, registry).run()
    assert json.loads((back / "config.json").read_text()) == config
    made = {n.replace(".sparse.", ".mlp."): a for n, a in checkpoints.load_output(back).items()}
    compare(made, lambda projection, weight: kt_values(weight, projection, 8, 2))


@pytest.mark.parametrize("layout", [KtAmx(), CompressedTensors()])
@pytest.mark.parametrize("family", ["granitemoe", "step3p5"])
def test_experts_that_were_fused_come_back_fused(tmp_path, registry, family, layout):
    data = checkpoints.fuse(checkpoints.tensors(), stem="block_sparse_moe" if family == "granitemoe" else "moe")
    if family == "granitemoe":
        names = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
        data = {_renamed(n, names): a for n, a in data.items()}
    else:
        for name in [n for n in data if n.endswith("gate_up_proj")]:
            for half, array in zip(("gate_proj", "up_proj"), np.split(data.pop(name), 2, axis=1), strict=True):
                data[name.replace("gate_up_proj", f"{half}.weight")] = np.ascontiguousarray(array)
        data = {_renamed(n, {"moe.down_proj": "moe.down_proj.weight"}): a for n, a in data.items()}
    source = checkpoints.write(tmp_path / "source", data, checkpoints.config(model_type=family))
    Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[SplitExperts()], quantize=Int8(), layout=layout,
        writer=SafetensorsWriter(path=tmp_path / "packed"),
    ).run()  # fmt: skip
    dequantize_pipeline(tmp_path / "packed", tmp_path / "back", registry).run()
    made = checkpoints.load_output(tmp_path / "back")
    assert made.keys() == data.keys()
    for name, array in data.items():
        assert made[name].shape == array.shape, name
        assert np.abs(made[name].astype(np.float32) - array.astype(np.float32)).max() < 0.002, name


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_experts_come_back_as_they_lay_and_one_at_a_time(tmp_path, registry, transposed, interleaved):
    data = checkpoints.fuse(checkpoints.tensors(), transposed=transposed, interleaved=interleaved)
    source = checkpoints.write(tmp_path / "source", data, checkpoints.config(model_type="qwen3_vl_moe_text"))
    split = SplitExperts(gate_up="interleaved" if interleaved else "halves")
    Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[split], quantize=Int8(), layout=KtAmx(),
        writer=SafetensorsWriter(path=tmp_path / "packed"),
    ).run()  # fmt: skip
    pipeline = dequantize_pipeline(tmp_path / "packed", tmp_path / "back", registry)
    plan = pipeline.plan()
    fused = [u for u in plan.units if u.source.fused]
    assert len(fused) == checkpoints.LAYERS and all(u.shares == checkpoints.EXPERTS for u in fused)
    assert all(u.working_bytes < u.source.nbytes for u in fused)
    pipeline.run()
    made = checkpoints.load_output(tmp_path / "back")
    assert made.keys() == data.keys()
    for name, array in data.items():
        assert np.abs(made[name].astype(np.float32) - array.astype(np.float32)).max() < 0.002, name


@pytest.mark.parametrize("damage", ["no list", "no projections", "another expert", "gone"])
def test_a_manifest_that_says_nothing_usable_of_fused_experts(tmp_path, registry, damage):
    data = checkpoints.fuse(checkpoints.tensors())
    source = checkpoints.write(tmp_path / "source", data, checkpoints.config(model_type="qwen3_vl_moe_text"))
    packed = tmp_path / "packed"
    Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[SplitExperts()], quantize=Int8(), layout=KtAmx(),
        writer=SafetensorsWriter(path=packed),
    ).run()  # fmt: skip
    manifest = json.loads((packed / "ktforge_manifest.json").read_text())
    damaged = {"no list": [1], "no projections": {"0": {"x": {"projections": 3}}, "1": 5}, "gone": {},
               "another expert": {"0": {"x": {"projections": ["side"]}}}}[damage]  # fmt: skip
    (packed / "ktforge_manifest.json").write_text(json.dumps({**manifest, "fused": damaged}))
    dequantize_pipeline(packed, tmp_path / "back", registry).run()
    made = checkpoints.load_output(tmp_path / "back")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in made and len(made) == len(checkpoints.tensors())


def _renamed(name, names):
    found = next((old for old in names if name.endswith(old)), None)
    return name if found is None else name.removesuffix(found) + names[found]


def test_what_ktforge_did_not_write_is_for_moe_to_bf16(source, tmp_path, registry):
    with pytest.raises(CheckpointError, match=r"was not packed by ktforge, .* `ktforge moe-to-bf16` makes BF16 of it"):
        round_trip(source, tmp_path, registry, Int4(group_size=32), CompressedTensors(), manifest=False)


def test_the_config_of_the_source_beside_packed_experts_misleads_nobody(source, tmp_path, registry):
    """Upstream's script copies config.json with the quantization_config of the FP8 weights that it was made from."""
    packed = tmp_path / "packed"
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int8(), layout=KtAmx(), writer=SafetensorsWriter(path=packed)).run()
    (packed / "ktforge_manifest.json").unlink()
    model = checkpoints.config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    (packed / "config.json").write_text(json.dumps(model))
    dequantize_pipeline(packed, tmp_path / "back", registry).run()
    assert checkpoints.load_output(tmp_path / "back").keys() == checkpoints.tensors().keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == checkpoints.config()


@pytest.mark.parametrize(
    "layout", ["kt-amx", {}, {"use": "kt-amx", "newer": 1}, {"use": "kt-amx", "threadpool_count": 0}]
)
def test_a_manifest_that_makes_no_sense_is_named(source, tmp_path, registry, layout):
    packed = tmp_path / "packed"
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int4(), layout=KtAmx(), writer=SafetensorsWriter(path=packed)).run()
    (packed / "ktforge_manifest.json").write_text(json.dumps({"pipeline": {"layout": layout}}))
    with pytest.raises(CheckpointError, match="names a layout that cannot be built"):
        dequantize_pipeline(packed, tmp_path / "back", registry)


def test_names_that_the_layout_changed_for_good_come_back(tmp_path, registry):
    """A multimodal wrapper: ``language_model.`` is gone from the output's names, and ``visual.`` has no ``model.``."""
    data = {n.replace("model.", "model.language_model.", 1): a for n, a in checkpoints.tensors().items()}
    data["visual.blocks.0.weight"] = np.ones((4, 4), checkpoints.BF16)
    model = {"model_type": "qwen3_vl_moe", "text_config": checkpoints.config(model_type="qwen3_vl_moe_text")}
    source = checkpoints.write(tmp_path / "wrapped", data, model)
    packed, back = tmp_path / "packed", tmp_path / "back"
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int8(), layout=KtAmx(), writer=SafetensorsWriter(path=packed)).run()
    assert "visual.blocks.0.weight" in checkpoints.load_output(packed)
    dequantize_pipeline(packed, back, registry).run()
    assert checkpoints.load_output(back).keys() == data.keys()


TOLD: list = []


class TellingLoader(SafetensorsLoader):
    def bind(self, config):
        TOLD.append(("loader", config["model_type"]))
        return super().bind(config)


class TellingLayout(KtAmx):
    def bind(self, config):
        TOLD.append(("layout", config["model_type"]))
        return super().bind(config)


def test_loader_and_layout_of_a_packed_folder_are_bound(source, tmp_path):
    packed, loader = tmp_path / "packed", SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int4(), layout=KtAmx(), writer=SafetensorsWriter(path=packed)).run()
    TOLD.clear()
    inner = PackedLoader(inner=TellingLoader(path=packed), layout=TellingLayout())
    Pipeline(loader=inner, writer=SafetensorsWriter(path=tmp_path / "back")).run()
    assert TOLD == [("loader", "qwen3_moe"), ("layout", "qwen3_moe")]
    assert checkpoints.load_output(tmp_path / "back").keys() == checkpoints.tensors().keys()


class Releases(SafetensorsLoader):
    """Notes what is read and what is let go of."""

    def read(self, spec):
        TOLD.append(("read", spec.name))
        return super().read(spec)

    def release(self, spec):
        TOLD.append(("release", spec.name))
        super().release(spec)


def test_what_a_weight_is_made_of_is_released_a_part_at_a_time(source, tmp_path):
    packed, loader = tmp_path / "packed", SafetensorsLoader(path=source)
    Pipeline(loader=loader, quantize=Int4(), layout=KtAmx(), writer=SafetensorsWriter(path=packed)).run()
    inner = PackedLoader(inner=Releases(path=packed), layout=KtAmx())
    specs = {s.name: s for s in inner.scan()}
    TOLD.clear()
    name = checkpoints.expert_name(1, 2, "up")
    inner.read(specs[name])
    stems = [f"blk.1.ffn_up_exps.2.numa.{part}" for part in range(2)]
    wanted = [(done, f"{s}.{p}") for s in stems for done in ("read", "release") for p in ("weight", "scale")]
    assert wanted == TOLD
    TOLD.clear()
    inner.release(specs[name])
    assert TOLD == [], "nothing is left of it"
    inner.read(specs["model.norm.weight"])
    inner.release(specs["model.norm.weight"])
    assert TOLD == [("read", "norm.weight"), ("release", "norm.weight")]


def test_zero_points_count_in_the_memory_that_is_planned(source, tmp_path, registry):
    """Two bytes each, beside what is stored of them, the codes and the band that is restored at a time."""
    needed = {}
    for symmetric in (True, False):
        folder = tmp_path / str(symmetric)
        Pipeline(
            loader=SafetensorsLoader(path=source), quantize=Int4(group_size=32, symmetric=symmetric),
            layout=CompressedTensors(), writer=SafetensorsWriter(path=folder),
        ).run()  # fmt: skip
        inner = SafetensorsLoader(path=folder)
        loader = packed_loader(inner, find_packed(inner, registry, ()), one_by_one=True)
        spec = next(s for s in loader.scan() if s.name == checkpoints.expert_name(0, 0, "up"))
        stored = [t for t in inner.scan() if t.name.startswith(spec.name.removesuffix("weight"))]
        needed[symmetric] = loader.scratch_bytes(spec) - sum(t.nbytes for t in stored if "shape" not in t.name)
    assert needed[False] - needed[True] == 2 * checkpoints.SIZE * checkpoints.HIDDEN // 32
