"""The last number that is let through and the first that is not, the first and the last of a list, one and two of a
kind: what a test in the middle does not see."""

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16, F8
from conversions import convert, model, pipeline, tree
from faults import Disk, dies, run_in_child
from ktforge_plugins import AutoLoader, Fp8, Int8, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.layouts.kt_amx import MOST_PARTS, KtAmx
from ktforge_plugins.preprocess import scales
from ktforge_plugins.preprocess.compressed_tensors import Targets
from preprocess.units import weight

from ktforge import (
    CheckpointError,
    ConfigError,
    OutputError,
    Pipeline,
    PlanError,
    PluginError,
    Registry,
    TensorSpec,
    Unsupported,
)
from ktforge.contract import checks
from ktforge.contract.plan import PlannedUnit
from ktforge.contract.tensors import F32, QuantPart, UnitSpec
from ktforge.disk import reading
from ktforge.disk.journal import Journal
from ktforge.disk.marks import JOURNAL, PARTIAL, UNFINISHED
from ktforge.inspection.description import describe
from ktforge.inspection.look import Look
from ktforge.model import config as model_config
from ktforge.model.mtp import COUNTS, PER_LAYER, without_extra
from ktforge.pipeline import file as pipeline_file
from ktforge.pipeline.file import load_pipeline
from ktforge.planning.shares import Share
from ktforge.running.workers import Workers
from ktforge.testing import MemoryLoader, MemoryWriter


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return model(tmp_path_factory.mktemp("tiny") / "model", 1, 2, 128, 128)


# Shards


@pytest.mark.parametrize("lost", [(1,), (3,), (1, 3), (1, 2), (2, 3)])
@pytest.mark.parametrize("index", [True, False])
def test_any_shard_that_is_missing_is_named(tmp_path, lost, index):
    folder = checkpoints.write(tmp_path / "model", checkpoints.tensors(), checkpoints.config(), 3, index=index)
    for i in lost:
        (folder / f"model-{i:05}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        list(AutoLoader(path=folder).scan())
    assert len(caught.value.problems) == len(lost)
    for i, problem in zip(lost, caught.value.problems, strict=True):
        assert f"model-{i:05}-of-00003.safetensors" in problem and problem.endswith("is missing: download it again")


# Memory


def planned_of(nbytes, rows=1):
    """A unit that takes so many bytes."""
    unit = UnitSpec("x", {"weight": TensorSpec("x.weight", BF16, (rows, 4))})
    return PlannedUnit(unit, (), (), 0, nbytes)


def test_a_limit_is_what_a_unit_may_take(source, out):
    made = pipeline(source, SafetensorsWriter(path=out))
    most = max(u.working_bytes for u in made.plan().units)
    with pytest.raises(PlanError, match="more than the memory limit of"):
        made.run(memory_limit=most - 1)
    assert not out.exists()
    made.run(memory_limit=most)
    assert (out / "config.json").exists()


@pytest.mark.parametrize(("limit", "together"), [(299, 2), (300, 3), (399, 3), (400, 4), (100, 1)])
def test_as_many_units_are_in_flight_as_fit(limit, together):
    unit = planned_of(100)
    lock, meet, seen = threading.Lock(), threading.Event(), []
    at_once = most = 0

    def work(share):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            seen.append(share)
            if at_once == together:
                meet.set()
        assert meet.wait(30), "fewer units were let in than fit"
        with lock:
            at_once -= 1

    Workers(5, limit).run([Share(unit, unit) for _ in range(8)], work)
    assert most == together and len(seen) == 8


@pytest.mark.parametrize(("workers", "limit", "peak"), [(1, None, 100), (2, None, 200), (3, None, 250), (2, 199, 199)])
def test_the_peak_is_that_of_the_largest_in_flight(source, out, workers, limit, peak):
    plan = pipeline(source, SafetensorsWriter(path=out)).plan()
    plan = replace(plan, units=tuple(planned_of(n) for n in (50, 100, 20, 100)))
    assert plan.peak_memory(workers, limit) == peak


def test_the_peak_counts_shares_of_one_unit(source, out):
    plan = pipeline(source, SafetensorsWriter(path=out)).plan()
    shared = planned_of(100, rows=10)._replace(share_rows=4)
    assert shared.shares == 3
    plan = replace(plan, units=(shared, planned_of(30)))
    assert [plan.peak_memory(n) for n in (1, 2, 3, 4, 5)] == [100, 200, 300, 330, 330]


# Scales


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((48, 160), (3, 5), (16, 32)),
        ((48, 160), (1, 1), None),  # one block of a grid of 15: the rest is missing
        ((48, 160), (1,), (48, 160)),
        ((48, 160), (), (48, 160)),
        ((48, 160), (48, 1), (1, 160)),
        ((48, 160), (48,), (1, 160)),
        ((48, 160), (48, 5), (1, 32)),
        ((48, 160), (6, 5), None),
        ((49, 161), (4, 6), (16, 32)),
        ((49, 161), (3, 5), None),
        ((16, 32), (1, 1), (16, 32)),
        ((15, 31), (1, 1), (15, 31)),
        ((17, 32), (1, 1), None),
        ((17, 32), (2, 1), (16, 32)),
        ((16, 33), (1, 2), (16, 32)),
    ],
)
def test_an_announced_grid_is_the_only_one(shape, scale, block):
    spec, stored = TensorSpec("w", F8, shape), TensorSpec("s", F32, scale)
    if block is None:
        with pytest.raises(Unsupported, match=r"no scale for all, for rows or for blocks of \[16, 32\]"):
            scales.block_of(spec, shape, stored, (16, 32))
    else:
        assert scales.block_of(spec, shape, stored, (16, 32)) == block
        random = np.random.default_rng(0)
        arrays = {"weight": random.standard_normal(shape).astype(F8), "weight_scale": random.random(scale, np.float32)}
        grid = arrays["weight_scale"].reshape([-(-n // b) for n, b in zip(shape, block, strict=True)])
        wanted = (arrays["weight"].astype(np.float32) * checkpoints.spread(grid, block, shape)).astype(BF16)
        config = {"quantization_config": {"weight_block_size": [16, 32]}}
        assert weight(Fp8(), arrays, config).tobytes() == wanted.tobytes()


# Multi-token prediction

COUNTING = ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "n_mtp_layers"]
LISTED = [
    "layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "layers_block_type", "layer_rope_theta",
    "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared", "use_rope_layers",
    "hybrid_layer_pattern", "moe_layer_freq", "attn_type_list", "compress_ratios",
]  # fmt: skip


def with_heads(count, **config):
    """A model with so many whole layers of these behind its own, as tensors and config.json."""
    data = checkpoints.tensors()
    for i in range(count):
        data |= {n.replace("layers.1.", f"layers.{2 + i}."): a.copy() for n, a in data.items() if "layers.1." in n}
    return data, checkpoints.config(**config)


def test_no_field_is_forgotten_here():
    assert set(COUNTING) == set(COUNTS) and set(LISTED) == PER_LAYER


@pytest.mark.parametrize("field", COUNTING)
@pytest.mark.parametrize("nested", [False, True])
def test_each_field_that_counts_these_layers_does(field, nested):
    data, config = with_heads(1, **({"text_config": {field: 2}} if nested else {field: 2}))
    plan = Pipeline(loader=MemoryLoader(tensors=data, model=config), writer=MemoryWriter()).plan()
    (problem,) = plan.problems
    assert problem.startswith("layer 3, for multi-token prediction: is missing, while layer 2 is there and config.json")
    omitted = Pipeline(loader=MemoryLoader(tensors=data, model=config), writer=MemoryWriter(), mtp="omit").plan()
    made = json.loads(omitted.config_json)
    assert (made["text_config"] if nested else made)[field] == 0


@pytest.mark.parametrize("field", LISTED)
@pytest.mark.parametrize(("length", "left"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 5)])
def test_each_list_of_layers_is_cut_where_it_counts_them_all(field, length, left):
    plan = SimpleNamespace(layers=2)
    config = {field: list(range(length)), "num_nextn_predict_layers": 2}
    assert without_extra(config, plan) == {field: list(range(left)), "num_nextn_predict_layers": 0}


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_bytes_of_equal_layers_are_added(tmp_path, count):
    data, config = with_heads(count, num_nextn_predict_layers=count)
    folder = checkpoints.write(tmp_path / "model", data, config)
    seen = describe(Look.at(folder, Registry.installed()))
    assert seen.mtp_bytes == count * sum(a.nbytes for n, a in data.items() if "layers.1." in n)


# Fields of config.json, spelled out: a name that is lost from a table would be lost from a test that reads the table.


@pytest.mark.parametrize(
    "name", ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "moe_num_primary_experts"]
)
def test_names_of_the_number_of_experts(name):
    config = checkpoints.config()
    config[name] = config.pop("num_experts")
    assert model_config.read_model_config(config).experts == checkpoints.EXPERTS


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("moe_intermediate_size", "expert_ffn_hidden_size"),
        ("hidden_size", "d_model"),
        ("num_hidden_layers", "num_layers"),
    ],
)
def test_names_of_sizes(ours, theirs):
    config = checkpoints.config()
    config[theirs] = config.pop(ours)
    assert model_config.read_model_config(config) == model_config.read_model_config(checkpoints.config())


@pytest.mark.parametrize("wrapper", ["thinker_config", "text_config", "language_config", "llm_config"])
def test_names_of_wrappers(wrapper):
    inner = checkpoints.config()
    outer = {"hidden_size": 1, "model_type": "outer", wrapper: {**inner, "quantization_config": {"bits": 4}}}
    assert model_config.read_model_config(outer) == model_config.read_model_config(inner)
    assert model_config.quantization_config(outer) == {"bits": 4}
    plain = model_config.without_quantization({**outer, "expert_dtype": "fp4"})
    assert plain == {"hidden_size": 1, "model_type": "outer", wrapper: inner}


@pytest.mark.parametrize(
    ("key", "most"), [("hidden_size", 1_000_000), ("num_hidden_layers", 50_000), ("num_experts", 50_000)]
)
def test_the_largest_numbers_of_a_config(key, most):
    model_config.read_model_config(checkpoints.config(**{key: most}))
    with pytest.raises(CheckpointError, match=f"{key} is {most + 1}; it must be a whole number up to {most:,}"):
        model_config.read_model_config(checkpoints.config(**{key: most + 1}))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"first_k_dense_replace": 0}, range(8)),
        ({"first_k_dense_replace": 7}, [7]),
        ({"first_k_dense_replace": 8}, []),
        ({"moe_layer_end_index": 0}, [0]),
        ({"moe_layer_end_index": 7}, range(8)),
        ({"moe_layer_end_index": -1}, range(8)),
        ({"decoder_sparse_step": 8}, [7]),
        ({"mlp_only_layers": [0, 7]}, range(1, 7)),
        ({"moe_layer_frequency": 7}, [0, 7]),
        ({"moe_layer_freq": [0] * 7 + [1]}, [7]),
        ({"moe_layer_freq": [1]}, [0]),
        ({"mlp_layer_types": ["sparse"]}, [0]),
        ({"layers_block_type": ["moe", *["mamba"] * 6, "moe"]}, [0, 7]),
        ({"moe_layers_enum": "7"}, [7]),
        ({"expert_layer_period": 4, "expert_layer_offset": 3}, [3, 7]),
        ({"expert_layer_period": 4}, [0, 4]),
        ({"num_dense_layers": 1, "decoder_sparse_step": 1}, range(1, 8)),
    ],
)
def test_the_first_and_the_last_layer_with_experts(changes, layers):
    found = model_config.read_model_config(checkpoints.config(num_hidden_layers=8, **changes))
    assert found.moe_layers == set(layers)


# Manifests of an output that is to be replaced


@pytest.mark.parametrize(
    "name", ["../victim.txt", "/victim.txt", "sub/../../victim.txt", "..", ".", "", "link/victim.txt"]
)
def test_a_manifest_takes_nothing_from_outside(tiny, tmp_path, name):
    out, victim = tmp_path / "out", tmp_path / "victim.txt"
    victim.write_text("mine")
    convert(tiny, out, Disk())
    manifest = json.loads((out / "ktforge_manifest.json").read_text())
    listed = str(victim) if name.startswith("/") else name
    manifest["side_files"] = [listed, "mine.txt"]
    (out / "ktforge_manifest.json").write_text(json.dumps(manifest))
    (out / "mine.txt").write_text("listed")
    if name.startswith("link"):
        (out / "link").symlink_to(tmp_path)
        with pytest.raises(OutputError, match="would lie outside"):
            convert(tiny, out, Disk(), overwrite=True)
    else:
        convert(tiny, out, Disk(), overwrite=True)
        assert not (out / "mine.txt").exists(), "what lies inside goes"
        assert not (out / UNFINISHED).exists()
    assert victim.read_text() == "mine"


# Pipeline files

BLOCKS = """\
version: 1
loader:
  use: auto
  path: models/x
preprocess:
  - use: split-experts
  - use: moe-to-bf16
    input_type: auto
quantize:
  use: int4
  rules:
    - match: "*.down_proj.weight"
      use: int8
    - match: "*.up_proj.weight"
      use: keep
layout:
  use: kt-amx
writer:
  use: safetensors
  path: out
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("input_type: auto", "input_type: fp9", "pipeline.yaml:8: preprocess.1.input_type: must be"),
        ("use: moe-to-bf16", "use: moe-to-bf17", "pipeline.yaml:7: preprocess.1.use: there is no preprocess"),
        ("- use: split-experts", "- split-experts", "pipeline.yaml:6: preprocess.0: must say which plugin to use"),
        ("use: keep", "use: int9", "pipeline.yaml:15: quantize.rules.1.use: there is no quantize"),
        ('match: "*.up_proj.weight"', 'match: "re:("', "pipeline.yaml:14: quantize.rules.1.match: 're:(' is no"),
        ('match: "*.up_proj.weight"', "mtch: x", "pipeline.yaml:14: quantize.rules.1: must say what it is for"),
        ("path: out", "path: out\n  max_shard_size: 5 potatoes", "pipeline.yaml:21: writer.max_shard_size: '5 potato"),
        ("  path: out\n", "", "pipeline.yaml:18: writer.path: is missing"),
    ],
)
def test_a_mistake_is_on_its_own_line(tmp_path, old, new, said):
    assert BLOCKS.count(old) == 1
    (tmp_path / "pipeline.yaml").write_text(BLOCKS)
    registry = Registry.installed()
    load_pipeline(tmp_path / "pipeline.yaml", registry)
    (tmp_path / "pipeline.yaml").write_text(BLOCKS.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_pipeline(tmp_path / "pipeline.yaml", registry)
    (problem,) = caught.value.problems
    assert problem.replace(f"{tmp_path}/", "").startswith(said)


def pipeline_errors(tmp_path, text):
    (tmp_path / "pipeline.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(tmp_path / "pipeline.yaml", Registry.installed())
    return caught.value.problems


@pytest.mark.parametrize(("count", "told"), [(19, 19), (20, 20), (21, 21), (30, 21)])
def test_so_many_mistakes_are_told(tmp_path, count, told):
    found = pipeline_errors(tmp_path, BLOCKS + "".join(f"wrong{i}: 1\n" for i in range(count)))
    assert len(found) == told
    if count > pipeline_file.PROBLEM_LIMIT:
        assert found[-1].endswith(f"and {count - pipeline_file.PROBLEM_LIMIT} more mistakes")
    else:
        assert "more mistakes" not in "".join(found)


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_largest_and_the_deepest_file(tmp_path, beyond):
    size = pipeline_file.SIZE_LIMIT - len(BLOCKS) - 2 + beyond
    padded = BLOCKS + "#" + "x" * size + "\n"
    assert len(padded) == pipeline_file.SIZE_LIMIT + beyond
    deep = (
        BLOCKS
        + "wrong: "
        + "[" * (pipeline_file.DEPTH_LIMIT - 1 + beyond)
        + "]" * (pipeline_file.DEPTH_LIMIT - 1 + beyond)
    )
    if beyond:
        assert "has over 100,000 bytes" in pipeline_errors(tmp_path, padded)[0]
        assert "nested more than 20 deep" in pipeline_errors(tmp_path, deep)[0]
    else:
        (tmp_path / "pipeline.yaml").write_text(padded)
        load_pipeline(tmp_path / "pipeline.yaml", Registry.installed())
        assert "no such key" in pipeline_errors(tmp_path, deep)[0]


@pytest.mark.parametrize(("number", "is_there"), [(0, True), (1, True), (2, False), (9, False)])
def test_entries_of_a_list_that_can_be_set(tmp_path, number, is_there):
    (tmp_path / "pipeline.yaml").write_text(BLOCKS)
    change = f"preprocess.{number}.use=fp8"
    if is_there:
        text = BLOCKS.replace("    input_type: auto\n", "")
        (tmp_path / "pipeline.yaml").write_text(text)
        made = load_pipeline(tmp_path / "pipeline.yaml", Registry.installed(), [change])
        assert [s.name == "fp8" for s in made.preprocess] == [number == 0, number == 1]
    else:
        with pytest.raises(ConfigError, match=f"the list has no entry '{number}' there; it has the entries 0 to 1"):
            load_pipeline(tmp_path / "pipeline.yaml", Registry.installed(), [change])


# Journals


def test_a_last_record_without_its_line_end_does_not_count(tmp_path):
    """It may be the beginning of a longer number or name, and the next record would be written behind it."""
    path = tmp_path / PARTIAL / JOURNAL
    path.parent.mkdir()
    journal = Journal(path)
    journal.begin({"pipeline": {}}, overwrite=False)
    journal.add({"a": "1"})
    whole = path.read_bytes()
    journal.add({"b": "2"})
    journal.close()
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    again = Journal(path)
    assert again.written == {"a": "1"}
    again.add({"c": "3"})
    again.close()
    assert path.read_bytes() == whole + b'{"written": {"c": "3"}}\n'
    assert Journal(path).written == {"a": "1", "c": "3"}


def test_a_longer_rest_of_a_line_is_cut_off(tmp_path):
    path = tmp_path / PARTIAL / JOURNAL
    path.parent.mkdir()
    journal = Journal(path)
    journal.begin({"pipeline": {}}, overwrite=False)
    journal.close()
    begun = path.read_bytes()
    path.write_bytes(begun + b'{"written": {"' + b"x" * 1000)
    again = Journal(path)
    again.add({"c": "3"})
    again.close()
    assert path.read_bytes() == begun + b'{"written": {"c": "3"}}\n'


def test_a_run_goes_on_behind_a_record_without_its_line_end(tiny, out):
    convert(tiny, out, Disk())
    wanted = {n: h for n, h in tree(out).items()}
    for path in sorted(out.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    number = 60
    run_in_child(lambda: convert(tiny, out, Disk(lambda c: dies(c, after=True) if c.number == number else c.really())))
    path = out / PARTIAL / JOURNAL
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    kept = len(Journal(path).written)
    assert kept > 0
    convert(tiny, out, Disk())
    assert tree(out) == wanted


# Limits of what strangers' files may have


@pytest.mark.parametrize("length", [1, 500, 501])
def test_the_longest_name(length):
    spec = TensorSpec("x" * length, BF16, (1,))
    if length > checks.NAME_LIMIT:
        with pytest.raises(CheckpointError, match="a tensor has a name of 501 characters"):
            checks.check_specs([spec])
    else:
        checks.check_specs([spec])


@pytest.mark.parametrize("beyond", [0, 1])
def test_most_dimensions_and_names_of_which_some_are_wrong(beyond):
    spec = TensorSpec("x", BF16, (1,) * (16 + beyond))
    if beyond:
        long = TensorSpec("y" * 500, BF16, (1,))
        with pytest.raises(CheckpointError, match=r"^x has 17 dimensions: the file is broken$"):
            checks.check_specs([long, spec])
    else:
        checks.check_specs([spec])


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_largest_json_file(tmp_path, beyond):
    text = b'{"a": 1}'
    (tmp_path / "x.json").write_bytes(text)
    if beyond:
        with pytest.raises(CheckpointError, match="has 8 bytes: too many to be what its name says"):
            reading.read_json(tmp_path / "x.json", len(text) - 1)
    else:
        assert reading.read_json(tmp_path / "x.json", len(text)) == {"a": 1}


@pytest.mark.parametrize(("size", "is_one"), [(42, True), (1024, True), (1025, False)])
def test_the_largest_pointer(tmp_path, size, is_one):
    (tmp_path / "x").write_bytes(reading.POINTER.ljust(size, b"\n"))
    assert (reading.pointer_problem(tmp_path / "x") is not None) == is_one


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        ("a*b*c*d*", False), ("a*b*c*d*e*", True), ("(a)(b)(c)(d)", False), ("(a)(b)(c)(d)(e)", True),
        ("x" * 200, False), ("x" * 201, True), ("(a)?", False), ("(a)*", True), ("(a)+", True), ("(a){2}", True),
    ],
)  # fmt: skip
def test_the_hardest_pattern(pattern, refused):
    if refused:
        with pytest.raises(Unsupported, match="may take forever"):
            Targets.of([f"re:{pattern}"])
    else:
        Targets.of([f"re:{pattern}"])


# Codes, groups, parts


class Quantises(Int8):
    """Delivers what a test gives it; a class of its own is not trusted."""


@pytest.mark.parametrize(("bits", "codes", "fits"), [(4, [-8, 7], True), (4, [-9, 0], False), (4, [0, 8], False)])
def test_the_lowest_and_the_highest_code(bits, codes, fits):
    part = QuantPart(np.array([codes], np.int8), np.ones((1, 1), np.float32))

    def check():
        checks._check_values(Quantises(), "x", part, bits, signed=False)

    if fits:
        check()
    else:
        with pytest.raises(PluginError, match="4 bits hold -8 to 7"):
            check()


@pytest.mark.parametrize(("size", "fitting"), [(64 * 64, "1, 2, 4, 8, 16, 32, 64"), (64 * 63, "1, 3, 7, 9, 21, 63")])
def test_the_most_parts(size, fitting):
    shapes = {"gate": (size, 64), "up": (size, 64), "down": (64, size)}
    data = {checkpoints.expert_name(0, 0, p): np.zeros(s, BF16) for p, s in shapes.items()}
    config = checkpoints.config(moe_intermediate_size=size, hidden_size=64, num_experts=1, num_hidden_layers=1)
    loader = MemoryLoader(tensors=data, model=config)
    made = Pipeline(loader=loader, quantize=Int8(), layout=KtAmx(threadpool_count=5), writer=MemoryWriter())
    assert made.plan().problems[0].endswith(f"counts that fit: {fitting}")
    with pytest.raises(ValueError, match="less than or equal to 64"):
        KtAmx(threadpool_count=MOST_PARTS + 1)
    most = max(map(int, fitting.split(", ")))
    assert made.model_copy(update={"layout": KtAmx(threadpool_count=most)}).plan().problems == ()


@pytest.mark.parametrize("size", [100, 199, 200, 201, 300, 301])
def test_a_shard_may_be_exactly_full(tmp_path, size):
    """By the bytes of its tensors; one that is larger alone has a shard of its own."""
    tensors = [TensorSpec(f"t{i}", np.dtype(np.uint8), (100,)) for i in range(6)]
    files = SafetensorsWriter(path=tmp_path, max_shard_size=size).plan(tensors, ())
    assert [len(f.tensors) for f in files] == {1: [1] * 6, 2: [2] * 3, 3: [3] * 2}[size // 100]
    (alone,) = SafetensorsWriter(path=tmp_path, max_shard_size=99).plan(tensors[:1], ())
    assert len(alone.tensors) == 1


def test_a_tensor_may_end_with_its_file(tmp_path):
    folder = model(tmp_path / "model", 1, 1, 128, 128, shards=1)
    loader = SafetensorsLoader(path=folder)
    last = max(loader.scan(), key=lambda s: s.offset)
    assert last.offset + last.nbytes == last.file.stat().st_size
    assert loader.read(last).shape == last.shape
    loader.release(last)
    beyond = last._replace(offset=last.offset + last.dtype.itemsize)
    with pytest.raises(CheckpointError, match=r"ends before .* does"):
        loader.read(beyond)


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("shift", range(8))
def test_a_tensor_may_begin_anywhere(tmp_path, shift, io):
    """The format aligns nothing, and a kernel may count on the alignment of its element type."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    entries = {"pad": {"dtype": "U8", "shape": [8 + shift], "data_offsets": [0, 8 + shift]}}
    entries["w"] = {"dtype": "F32", "shape": [3, 4], "data_offsets": [8 + shift, 56 + shift]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    content = len(header).to_bytes(8, "little") + header + bytes(8 + shift) + values.tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    loader = SafetensorsLoader(path=tmp_path, io=io)
    (spec,) = (s for s in loader.scan() if s.name == "w")
    assert spec.offset % 8 == shift
    for part, wanted in ((spec, values), (loader.rows(spec, 1, 3), values[1:])):
        array = loader.read(part)
        assert array.flags.aligned and array.flags.c_contiguous and np.array_equal(array, wanted)
        loader.release(part)
