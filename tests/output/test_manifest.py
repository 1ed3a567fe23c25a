"""Every entry of ktforge_manifest.json, spelled out."""

import importlib.metadata
import json

import checkpoints
import pytest
import xxhash
from checkpoints import BF16
from ktforge_plugins import CompressedTensors, Int4, Int8, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter

from ktforge import Pipeline, Rule
from ktforge.contract.plan import Runtime


def manifest_of(source, out, **stages):
    Pipeline(loader=SafetensorsLoader(path=source), writer=SafetensorsWriter(path=out), **stages).run()
    return json.loads((out / "ktforge_manifest.json").read_text())


@pytest.fixture
def source(tmp_path):
    """With a file in a folder of its own, and a layer beyond the model's."""
    data = checkpoints.tensors()
    data |= {n.replace("layers.1.", "layers.2."): a.copy() for n, a in data.items() if "layers.1." in n}
    return checkpoints.write(tmp_path / "source", data, checkpoints.config(num_nextn_predict_layers=1), 2)


def test_what_a_layout_made(source, out):
    made = manifest_of(
        source, out, preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(threadpool_count=4),
        runtime=Runtime(cpuinfer_threads=60),
    )  # fmt: skip
    headers = {}
    for path in sorted(source.glob("*.safetensors")):
        content = path.read_bytes()
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        headers[path.name] = (len(content), xxhash.xxh3_128_hexdigest(header))
    told = {key: made[key] for key in ("format", "ktforge", "formats", "methods", "numa_nodes", "cpuinfer_threads")}
    assert told == {
        "format": "ktforge-manifest/1", "ktforge": importlib.metadata.version("ktforge"),
        "formats": ["kt-amx-int4/1"], "methods": ["absmax-int4/2"], "numa_nodes": 4, "cpuinfer_threads": 60,
    }  # fmt: skip
    assert {s["file"]: (s["bytes"], s["header_xxh3_128"]) for s in made["source"]} == headers
    assert made["inputs"] == [] and sorted(made["side_files"]) == sorted(checkpoints.SIDE_FILES)
    assert made["pipeline"]["loader"]["path"] == str(source) and made["pipeline"]["writer"]["path"] == str(out)
    assert [s["use"] for s in made["pipeline"]["preprocess"]] == ["moe-to-bf16"]
    assert made["pipeline"]["quantize"]["use"] == "int4" and made["pipeline"]["layout"]["threadpool_count"] == 4
    assert made["left_out"] and all(".layers.2." in name for name in made["left_out"])
    assert len(made["left_out"]) == sum(".layers.1." in name for name in checkpoints.tensors())
    names = {
        f"{p}.weight": checkpoints.expert_name(0, 7, p).replace(".7.", ".{expert}.") for p in ("gate", "up", "down")
    }
    assert made["experts"]["0"] == names and made["experts"].keys() == {"0", "1"}
    assert made["renamed"] == {} and made["settled"] == {}


def test_methods_and_formats_of_rules(source, out):
    made = manifest_of(
        source, out, quantize=Int4(group_size=32, narrow_range=True), layout=CompressedTensors(),
        rules=[Rule(match="*.down_proj.weight", quantizer=Int8(group_size=64))],
    )  # fmt: skip
    assert made["formats"] == ["compressed-tensors-pack-quantized-int4/1", "compressed-tensors-pack-quantized-int8/1"]
    assert made["methods"] == ["minmax-int8/1", "minmax-narrow-int4/1"]
    assert made["numa_nodes"] is None and made["cpuinfer_threads"] is None


def test_a_checkpoint_that_is_only_converted(source, out):
    made = manifest_of(source, out)
    assert made["formats"] == made["methods"] == made["left_out"] == [] and made["numa_nodes"] is None
    assert not {"renamed", "experts", "settled"} & made.keys()
    assert checkpoints.load_output(out)["model.norm.weight"].dtype == BF16


def test_fields_that_the_tensors_settled(tmp_path, out):
    config = {k: v for k, v in checkpoints.config().items() if k != "moe_intermediate_size"}
    folder = checkpoints.write(tmp_path / "lacking", checkpoints.tensors(), config)
    made = manifest_of(folder, out, quantize=Int8(), layout=KtAmx())
    assert made["settled"] == {"moe_intermediate_size": checkpoints.SIZE}
