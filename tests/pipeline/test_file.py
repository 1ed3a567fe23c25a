import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ktforge_plugins import AutoLoader, Int8, KtAmx, MoeToBf16, SafetensorsWriter

from ktforge import ConfigError, Pipeline, Registry
from ktforge.pipeline.file import build_pipeline, dump_pipeline, load_pipeline
from ktforge.pipeline.schema import json_schema

GOOD = """\
version: 1
loader:     {use: auto, path: models/Qwen3-30B-A3B}
preprocess: [{use: moe-to-bf16}]
quantize:   {use: int4}
layout:     {use: kt-amx, threadpool_count: 2}
writer:     {use: safetensors, path: out, max_shard_size: 5GB}
runtime:    {cpuinfer_threads: 60}
"""


@pytest.fixture(scope="module")
def registry():
    return Registry.installed()


def load(tmp_path, registry, text, *sets) -> Pipeline:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    return load_pipeline(path, registry, sets)


def errors(tmp_path, registry, text, *sets) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, registry, text, *sets)
    return [p.replace(str(tmp_path) + "/", "") for p in caught.value.problems]


def test_the_design_example(tmp_path, registry):
    pipeline = load(tmp_path, registry, GOOD)
    assert pipeline.layout == KtAmx(threadpool_count=2)
    assert pipeline.writer.max_shard_size == 5_000_000_000
    assert pipeline.runtime.cpuinfer_threads == 60


def test_set_changes_values(tmp_path, registry):
    changes = ["layout.threadpool_count=4", "preprocess.0.input_type=fp8", "quantize.use=int8", "writer.path=/x"]
    pipeline = load(tmp_path, registry, GOOD, *changes)
    assert pipeline.layout == KtAmx(threadpool_count=4)
    assert pipeline.preprocess == (MoeToBf16(input_type="fp8"),)
    assert pipeline.quantize == Int8()
    assert str(pipeline.writer.path) == "/x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("layout", "--set layout: write it as key.path=value"),
        ("layot.x=1", "--set layot.x=1: the pipeline has no 'layot' there (did you mean layout?); it has version"),
        ("preprocess.7.use=x", "the list has no entry '7' there; it has the entries 0 to 0"),
        (
            "layout.threadpool.count=1",
            "the pipeline has no 'threadpool' there (did you mean threadpool_count?)",
        ),
        ("verison=1", "the pipeline has no 'verison' there (did you mean version?); it has version, loader"),
        ("layout.5=x", "layout.5: no such option; the options of layout kt-amx are: "),
        ("preprocess.use=x", "preprocess is a list; name the entry by its number from 0"),
        ("layout.threadpool_count=[1", "--set layout.threadpool_count=[1"),
        ("layout.threadpool_count=0", "layout.threadpool_count: must be at least 1, not 0"),
    ],
)
def test_a_wrong_set(tmp_path, registry, change, message):
    assert message in "\n".join(errors(tmp_path, registry, GOOD, change))


def test_an_entry_of_a_list_that_the_file_has_not(tmp_path, registry):
    (said,) = errors(tmp_path, registry, GOOD.replace("preprocess: [{use: moe-to-bf16}]\n", ""), "preprocess.0.use=x")
    assert said.endswith("the list has no entry '0' there; it has no entry")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "use: kt-amx",
            "use: kt-amxx",
            "pipeline.yaml:5: layout.use: there is no layout called 'kt-amxx' (did you mean kt-amx?); installed: ",
        ),
        ("threadpool_count", "threadpools", "pipeline.yaml:5: layout.threadpools: no such option (did you mean thr"),
        (
            "threadpool_count: 2",
            "threadpool_count: two",
            "pipeline.yaml:5: layout.threadpool_count: must be a whole number, not 'two'",
        ),
        ("5GB", "5 potatoes", "pipeline.yaml:6: writer.max_shard_size: '5 potatoes' is not a size such as 5GB"),
        ("loader: ", "laoder: ", "pipeline.yaml:2: laoder: no such key (did you mean loader?)"),
        ("loader: ", "laoder: ", "pipeline.yaml: there is no loader"),
        ("version: 1", "version: 2", "pipeline.yaml:1: version: is 2; this ktforge knows version 1"),
        ("[{use: moe-to-bf16}]", "{use: moe-to-bf16}", "pipeline.yaml:3: preprocess: must be a list of stages"),
        ("{use: int4}", "int4", "pipeline.yaml:4: quantize: must say which plugin to use"),
        ("path: models/Qwen3-30B-A3B", "", "pipeline.yaml:2: loader.path: is missing"),
        ("quantize:   {use: int4}\n", "", "quantize and layout go together"),
        (
            "{use: int4}",
            "{use: int4",
            "pipeline.yaml:4: a bracket { or [ that begins here is not closed, or a comma",
        ),
        ("60}", "sixty}", "pipeline.yaml:7: runtime.cpuinfer_threads: must be a whole number, not 'sixty'"),
        ("version: 1", "mtp: half", "pipeline.yaml:1: mtp: must be omit or keep, not 'half'"),
        ("int4}", "int4, symmetric: perhaps}", "quantize.symmetric: must be true or false, not 'perhaps'"),
        ("{use: int4}", "{use: kt-amx}", "there is no quantize called 'kt-amx' (it goes under layout); installed: "),
        ("path: out", "path: 7", "pipeline.yaml:6: writer.path: must be a path, not 7"),
        (
            "path: out",
            "path: ~nobody-at-all/x",
            "writer.path: ~nobody-at-all/x names a home directory that is not known",
        ),
        ("{cpuinfer_threads: 60}", "60", "pipeline.yaml:7: runtime: must be {key: value, …}, not 60"),
        ("version: 1", "version: 1\nversion: 1", "pipeline.yaml:2: found duplicate key"),
        ("{use: int4}", "&a {use: *a}", "anchors and aliases (& and *) are not used in pipeline files"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path, registry, old, new, message):
    assert old in GOOD
    assert any(p.startswith(message) or message in p for p in errors(tmp_path, registry, GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "must be channel or a number above 0, not 0"),
        ("wide", "must be channel or a whole number, not 'wide'"),
        ("1.5", "must be channel or a whole number, not 1.5"),
        ("[32]", "must be channel or a whole number, not [32]"),
        (f"{'x' * 99}", f"must be channel or a whole number, not '{'x' * 56}..."),
    ],
)
def test_a_value_of_several_kinds_gets_one_sentence(tmp_path, registry, value, message):
    text = GOOD.replace("{use: int4}", f"{{use: int4, group_size: {value}}}")
    assert errors(tmp_path, registry, text) == [f"pipeline.yaml:4: quantize.group_size: {message}"]


def test_home_directories_are_spelled_out(tmp_path, registry, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    pipeline = load(tmp_path, registry, GOOD.replace("path: models", "path: ~/models"), "writer.path=~/out")
    assert pipeline.loader.path == tmp_path / "models" / "Qwen3-30B-A3B" and pipeline.writer.path == tmp_path / "out"
    kept = load(tmp_path, registry, GOOD.replace("path: models", "path: ./~/models"))
    assert str(kept.loader.path) == "~/models/Qwen3-30B-A3B"
    assert build_pipeline(kept.to_dict(), registry) == kept, "only files that people write are looked at"


def test_mtp_survives_the_round_trip(tmp_path, registry):
    pipeline = load(tmp_path, registry, GOOD + "mtp: keep\n")
    assert pipeline.mtp == "keep"
    assert load(tmp_path, registry, dump_pipeline(pipeline)) == pipeline


def test_all_errors_come_at_once(tmp_path, registry):
    text = GOOD.replace("use: auto", "use: otto").replace("use: int4", "use: int5").replace("path: out", "pth: out")
    found = errors(tmp_path, registry, text)
    assert [p.split(": ")[0] for p in found] == [
        "pipeline.yaml:2",
        "pipeline.yaml:4",
        "pipeline.yaml:6",
        "pipeline.yaml:6",
    ]


def test_a_checkpoint_in_place_of_a_pipeline_file_is_pointed_to_init(tmp_path):
    with pytest.raises(
        ConfigError, match=r"is a folder: `ktforge init \S+ > pipeline.yaml` writes a file for a checkpoint"
    ):
        load_pipeline(tmp_path, Registry())


def test_files_that_are_no_pipelines(tmp_path, registry):
    assert "does not hold keys" in errors(tmp_path, registry, "- 1\n")[0]
    assert "does not hold keys" in errors(tmp_path, registry, "")[0]
    (tmp_path / "pipeline.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        load_pipeline(tmp_path / "pipeline.yaml", registry)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_pipeline(tmp_path / "absent.yaml", registry)
    bomb = "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]\n"
    assert "anchors and aliases" in errors(tmp_path, registry, bomb)[0]
    assert "nested more than 20 deep" in errors(tmp_path, registry, "[" * 5000)[0]
    assert "it is no pipeline file" in errors(tmp_path, registry, "#" * 100_001)[0]


@given(st.text("ab:-{}[],*&!|>'\"\\ \n#\t%@`?1", max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("yaml") / "pipeline.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_pipeline(path, Registry())


def test_a_dumped_pipeline_loads_as_the_same(tmp_path, registry):
    pipeline = Pipeline(
        loader=AutoLoader(path="a: b"), preprocess=[MoeToBf16()], quantize=Int8(), layout=KtAmx(threadpool_count=3),
        writer=SafetensorsWriter(path="out", max_shard_size="1GiB"),
    )  # fmt: skip
    assert load(tmp_path, registry, dump_pipeline(pipeline)).to_dict() == pipeline.to_dict()
    assert build_pipeline(pipeline.to_dict(), registry).to_dict() == pipeline.to_dict()


def test_the_schema_knows_every_installed_stage(registry):
    schema = json_schema(registry)
    json.dumps(schema)
    definitions = schema["$defs"]
    for entry in registry.entries():
        properties = definitions[f"{entry.cls.stage}-{entry.cls.name}"]["properties"]
        rules = {"rules"} if entry.cls.stage == "quantize" else set()
        assert properties.keys() == {"use", *entry.cls.model_fields} | rules


def test_a_pipeline_in_python_is_checked_too():
    with pytest.raises(ValueError, match="quantize and layout go together"):
        Pipeline(loader=AutoLoader(path="x"), quantize=Int8(), writer=SafetensorsWriter(path="y"))
    with pytest.raises(ValueError, match="instance of Loader"):
        Pipeline(loader={"use": "auto"}, writer=SafetensorsWriter(path="y"))
