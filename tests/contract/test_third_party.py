"""What other people's plugins offer reaches every command: presets, loaders, number formats, weights that go stale."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from conversions import tree
from ktforge_plugins import AutoLoader, Int4, Int8, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter
from pydantic import Field
from typer.testing import CliRunner

from ktforge import (
    AlreadyDone,
    CheckpointError,
    ConfigError,
    FileSpec,
    NumberFormat,
    OutputError,
    Pipeline,
    PluginError,
    Preset,
    Registry,
    Writer,
    hookimpl,
    open_folder,
)
from ktforge.cli import app
from ktforge.contract.stages import alike
from ktforge.contract.tensors import BF16
from ktforge.inspection.description import describe
from ktforge.inspection.look import Look
from ktforge.inspection.suggest import starter
from ktforge.model.number_format import Stored
from ktforge.output.provenance import unversioned
from ktforge.testing import MemoryLoader, MemoryWriter


def plugin(**hooks):
    """An object whose hooks give these things."""
    made = {name: hookimpl(lambda found=found: found) for name, found in hooks.items()}
    return SimpleNamespace(__name__="theirs", **made)


def installed(**hooks):
    return Registry.installed(plugin(**hooks))


class Halves(KtAmx):
    """A layout of its own, which packs as kt-amx does."""

    name: ClassVar[str] = "halves"


HALVES = Preset(
    "halves4", {"use": "int4"}, {"use": "halves"}, "INT4 for halves", tries=({"threadpool_count": 4},), order=-1,
    notes={"layout": "as halves reads it"}, options={"threadpool_count": "layout.threadpool_count"},
)  # fmt: skip


def test_a_preset_shows_in_inspect_and_init(source):
    registry = installed(ktforge_layouts=[Halves], ktforge_presets=[HALVES])
    seen = describe(Look.at(source, registry))
    assert seen.targets["convert --quant-method halves4"] == ()
    lines = starter(source, registry).splitlines()
    assert "layout: {use: halves, threadpool_count: 4}  # as halves reads it" in lines


@pytest.fixture
def theirs(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(
        "from ktforge import Preset, hookimpl\n"
        "@hookimpl\ndef ktforge_presets():\n"
        "    layout = {'use': 'kt-amx', 'threadpool_count': 1}\n"
        "    return [Preset('Halves4', {'use': 'int4'}, layout, 'INT4 for one node')]\n"
    )
    return file


def ktforge(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def convert(source, out, *arguments):
    return ktforge("convert", "--input-path", source, "--output", out, "--quant-method", *arguments)


def test_a_preset_is_a_quant_method(source, out, theirs):
    done = convert(source, out, "HALVES4", "--plugin", theirs)
    assert done.exit_code == 0, done.output
    assert json.loads((out / "ktforge_manifest.json").read_text())["numa_nodes"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["halfs4"],
         "there is no --quant-method halfs4 (did you mean Halves4?); there are int4, int8, rawint4, Halves4"),
        (["halves4", "--group-size", "32"],
         "--group-size does not go with `convert --quant-method Halves4`: leave it out; it is for `convert "
         "--quant-method int8 --layout compressed-tensors`, `convert --quant-method int4 --layout compressed-tensors`"),
        (["halves4", "--layout", "kt-amz"],
         "halves4 is for the layout kt-amx (did you mean kt-amx?): leave --layout out"),
    ],
)  # fmt: skip
def test_words_that_are_no_preset(source, out, theirs, arguments, said):
    done = convert(source, out, *arguments, "--plugin", theirs)
    assert done.exit_code == 2 and said in " ".join(done.output.replace("│", " ").split()) and not out.exists()


def test_presets_of_one_command_are_a_collision():
    again = Preset("int4", {"use": "int8"}, {"use": "kt-amx"}, "")
    with pytest.raises(PluginError, match=r"two plugins offer `ktforge convert --quant-method int4`: plugin layout-kt"):
        installed(ktforge_presets=[again])
    with pytest.raises(PluginError, match="plugin theirs offers 'int4', which is not a Preset: correct it"):
        installed(ktforge_presets=["int4"])


class NpzLoader(MemoryLoader):
    """One .npz file of float32, and a tokenizer that is in no folder."""

    name: ClassVar[str] = "npz"
    tensors: dict[str, np.ndarray] = Field(default_factory=dict, exclude=True)
    model: dict = Field(default_factory=dict, exclude=True)
    path: Path

    @classmethod
    def reads(cls, folder):
        return (folder / "weights.npz").exists()

    def config(self):
        return checkpoints.config()

    def scan(self):
        self.tensors.update(np.load(self.path / "weights.npz"))
        return super().scan()

    def side_files(self):
        return [Path("made/tokenizer.json")]

    def open_side_file(self, path):
        return io.BytesIO(b"made of " + path.name.encode())


class OtherNpz(NpzLoader):
    name: ClassVar[str] = "other-npz"


@pytest.fixture
def npz(tmp_path):
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "weights.npz", **{n: a.astype(np.float32) for n, a in checkpoints.tensors().items()})
    return tmp_path / "npz"


def test_a_loader_that_reads_a_folder_is_found(npz, out):
    registry = installed(ktforge_loaders=[NpzLoader])
    seen = describe(Look.at(npz, registry))
    assert seen.experts == checkpoints.EXPERTS and seen.targets["convert --quant-method int4"] == ()
    assert "layout: {use: kt-amx, threadpool_count: 2}" in starter(npz, registry)
    made = Pipeline(
        loader=AutoLoader(path=npz), preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(),
        writer=SafetensorsWriter(path=out),
    )  # fmt: skip
    made.run(registry=registry)
    assert (out / "made" / "tokenizer.json").read_bytes() == b"made of tokenizer.json"
    names = {Path(__file__).stem, Path(__file__).name}
    equipped = made.equipped(registry.classes())
    assert names & unversioned(equipped).keys(), "the code that reads the files counts as the loader's own"


def test_two_loaders_that_read_a_folder_are_a_question(npz):
    registry = installed(ktforge_loaders=[NpzLoader, OtherNpz])
    with pytest.raises(CheckpointError, match=r"several loaders: choose with loader {use: npz} or {use: other-npz}$"):
        Look.at(npz, registry)


def test_what_no_loader_reads_is_said(npz):
    with pytest.raises(
        CheckpointError, match=r"has no weights: neither \*\.safetensors nor pytorch_model\*\.bin, but weights\.npz"
    ):
        Look.at(npz, Registry.installed())
    with pytest.raises(
        CheckpointError, match=r"is read by the loader npz, and io is for safetensors: leave out io: pread"
    ):
        list(AutoLoader(path=npz, io="pread").equip([NpzLoader]).scan())


def test_a_loader_that_fails_at_looking_is_named(npz):
    class Fails(NpzLoader):
        name: ClassVar[str] = "fails"

        @classmethod
        def reads(cls, folder):
            raise SystemExit(0)

    with pytest.raises(PluginError, match=r"^plugin fails .*, loader\) failed on .*npz: SystemExit: 0"):
        Look.at(npz, installed(ktforge_loaders=[Fails]))


def test_own_loaders_come_first(source):
    class Greedy(NpzLoader):
        name: ClassVar[str] = "greedy"

        @classmethod
        def reads(cls, folder):
            return True

    (chosen,) = AutoLoader(path=source).equip([Greedy]).delegates()
    assert type(chosen) is SafetensorsLoader


class Doubled(NumberFormat):
    """Stored as int16, in quarters."""

    name: ClassVar[str] = "quarters"
    rowwise: ClassVar[bool] = True

    def plan_key(self):
        return alike

    def stored(self, parameters):
        weight = parameters.get("weight")
        return Stored(weight.shape, frozenset(["weight"])) if weight is not None and weight.dtype == np.int16 else None

    def dequantize(self, arrays, parameters):
        return (arrays["weight"] / 4).astype(BF16)


class Needy(Doubled):
    name: ClassVar[str] = "needy"
    factor: int


def test_moe_to_bf16_knows_every_installed_format():
    random = np.random.default_rng(0)
    data = {
        n: random.integers(-99, 99, a.shape, np.int16) if ".experts." in n else a
        for n, a in checkpoints.tensors().items()
    }
    loader, writer = MemoryLoader(tensors=data, model=checkpoints.config()), MemoryWriter()
    made = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=writer)
    (problem,) = made.plan(Registry.installed()).problems
    assert (
        "which moe-to-bf16 does not read; it knows BF16, FP16, FP32, fp8, fp4, compressed-tensors, gptq, awq" in problem
    )
    made.run(registry=installed(ktforge_preprocessors=[Doubled, Needy]))
    for name, array in data.items():
        want = (array / 4).astype(BF16) if ".experts." in name else array
        assert writer.tensors[name].tobytes() == want.tobytes(), name


class RawWriter(Writer):
    """A file for each tensor, in a folder of its own."""

    name: ClassVar[str] = "raw"
    weights: ClassVar[tuple[str, ...]] = ("raw/*.raw",)
    path: Path

    def folder(self):
        return self.path

    def plan(self, tensors, formats):
        return [FileSpec(f"raw/{t.name}.raw", b"", (t,)) for t in tensors]

    def open(self, plan, **options):
        return open_folder(self.path, plan, {}, **options)


@pytest.mark.parametrize("known", [True, False])
def test_weights_of_a_writer_go_with_the_output_that_had_them(source, out, known):
    """A file that no writer makes, and a folder that was empty before, are the user's."""
    loader = SafetensorsLoader(path=source)
    Pipeline(loader=loader, writer=RawWriter(path=out)).run()
    (out / "raw" / "mine.txt").touch()
    (out / "_layer_notes").mkdir()
    assert len(tree(out / "raw")) > 20
    registry = installed(ktforge_writers=[RawWriter]) if known else None
    Pipeline(loader=loader, writer=SafetensorsWriter(path=out)).run(overwrite=True, registry=registry)
    assert (tree(out / "raw").keys() == {"mine.txt"}) == known and (out / "_layer_notes").is_dir()
    (out / "raw" / "mine.txt").unlink()
    Pipeline(loader=loader, writer=RawWriter(path=out)).run(overwrite=True)
    Pipeline(loader=loader, writer=SafetensorsWriter(path=out)).run(
        overwrite=True, registry=installed(ktforge_writers=[RawWriter])
    )
    assert not (out / "raw").exists(), "the last file that goes takes its folder with it"


def test_what_matches_the_pattern_of_a_writer_that_never_wrote_there_is_the_users(source, out):
    class Npz(RawWriter):
        name: ClassVar[str] = "npz"
        weights: ClassVar[tuple[str, ...]] = ("*.npz",)

    out.mkdir()
    (out / "calibration.npz").touch()
    made = Pipeline(loader=SafetensorsLoader(path=source), writer=SafetensorsWriter(path=out))
    for _ in range(2):
        made.run(overwrite=True, registry=installed(ktforge_writers=[Npz]))
    assert (out / "calibration.npz").exists()


@pytest.mark.parametrize("found", ["*.gguf", ("/abs/*.gguf",), ("../*.gguf",), ("**/*.gguf",), ("*",), (".*",), ("",)])
def test_patterns_that_reach_too_far_are_refused(source, out, found):
    class Far(RawWriter):
        name: ClassVar[str] = "far"
        weights: ClassVar[tuple[str, ...]] = found

    with pytest.raises(PluginError, match=r"offers the writer 'far', whose `weights` have "):
        installed(ktforge_writers=[Far])
    with pytest.raises(PluginError, match=r"^plugin far .* has `weights` with "):
        Pipeline(loader=SafetensorsLoader(path=source), writer=Far(path=out)).plan()


def test_a_pipeline_that_was_equipped_stays_so(npz):
    loader = installed(ktforge_loaders=[NpzLoader]).build("loader", "auto", {"path": npz})
    assert Pipeline(loader=loader, writer=MemoryWriter()).plan().problems == ()


def test_a_format_that_wants_to_see_every_unit(source):
    class Careful(Doubled):
        name: ClassVar[str] = "careful"

        def plan_key(self):
            return None

    class Inherits(Doubled):
        name: ClassVar[str] = "inherits"

    for found in (Careful, Inherits):
        registry = installed(ktforge_preprocessors=[found])
        made = Pipeline(loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], writer=MemoryWriter())
        assert made.plan(registry).problems == () and made.equipped(registry.classes()).preprocess[0].plan_key() is None


def test_files_of_a_stage_that_works_for_another_count(source, tmp_path):
    (tmp_path / "table").write_bytes(b"1")

    class Tabled(Doubled):
        name: ClassVar[str] = "tabled"

        def input_files(self):
            return [tmp_path / "table"]

    made = Pipeline(loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], writer=MemoryWriter())
    assert made.plan(installed(ktforge_preprocessors=[Tabled])).inputs.keys() == {tmp_path / "table"}


def test_a_preset_that_cannot_be_made_is_no_reason_to_say_nothing(source):
    gone = Preset("gone", {"use": "not-installed"}, {"use": "kt-amx"}, "")
    registry = installed(ktforge_presets=[gone])
    (reason,) = describe(Look.at(source, registry)).targets["convert --quant-method gone"]
    assert "there is no quantize called 'not-installed'" in reason
    assert "layout: {use: kt-amx" in starter(source, registry)
    with pytest.raises(PluginError, match=r"offers the preset 'bare' without `use` of a stage"):
        installed(ktforge_presets=[Preset("bare", {}, {"use": "kt-amx"}, "")])


class Calibrated(Int8):
    """A quantizer that a file decides."""

    name: ClassVar[str] = "calibrated"
    calibration: Path

    def input_files(self):
        return [self.calibration]


def calibrated(source, out, file, **more):
    return Pipeline(
        loader=SafetensorsLoader(path=source), quantize=Calibrated(calibration=file), layout=KtAmx(),
        writer=SafetensorsWriter(path=out), **more,
    )  # fmt: skip


class Stops(KtAmx):
    name: ClassVar[str] = "kt-amx"

    def pack(self, unit, out):
        raise KeyError("stopped")


def test_a_file_that_decides_is_noticed_by_its_content(source, out, tmp_path):
    file = tmp_path / "calibration.bin"
    file.write_bytes(b"one")
    stopped = calibrated(source, out, file).model_copy(update={"layout": Stops()})
    with pytest.raises(PluginError, match="stopped"):
        stopped.run()
    file.write_bytes(b"two")
    with pytest.raises(OutputError, match=r"^calibration\.bin has changed\n.*cannot go on"):
        calibrated(source, out, file).run()
    file.write_bytes(b"one")
    calibrated(source, out, file).run()
    (entry,) = json.loads((out / "ktforge_manifest.json").read_text())["inputs"]
    assert entry["file"] == "calibration.bin" and len(entry["xxh3_128"]) == 32


def test_a_file_that_is_not_there_is_refused(source, out, tmp_path):
    plan = calibrated(source, out, tmp_path / "none").plan()
    assert plan.problems == (
        f"{tmp_path}/none, which quantize calibrated needs, cannot be read: No such file or directory",
    )


def test_a_file_that_changes_while_a_run_reads_it(source, out, tmp_path):
    file = tmp_path / "calibration.bin"
    file.write_bytes(b"one")

    class Changes(KtAmx):
        name: ClassVar[str] = "kt-amx"

        def pack(self, unit, buffers):
            file.write_bytes(b"three")
            super().pack(unit, buffers)

    with pytest.raises(CheckpointError, match=r"calibration\.bin changed while it was read"):
        calibrated(source, out, file).model_copy(update={"layout": Changes()}).run()


class Hungry(Int4):
    name: ClassVar[str] = "int4"

    def scratch_bytes(self, unit, spec):
        return 1_000_000


class HungryLayout(KtAmx):
    name: ClassVar[str] = "hungry"

    def scratch_bytes(self, spec):
        return 3_000_000


def test_what_a_stage_needs_for_a_moment_counts():
    """Quantizer and layout work one after the other; a layout that does both works as its own."""

    def working(quantizer, layout):
        loader = MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config())
        plan = Pipeline(loader=loader, quantize=quantizer, layout=layout, writer=MemoryWriter()).plan()
        return max(u.working_bytes for u in plan.units)

    class Unfused(KtAmx):
        name: ClassVar[str] = "unfused"

        def fused(self, quantizer, spec):
            return None

    class HungryUnfused(Unfused, HungryLayout):
        name: ClassVar[str] = "hungry-unfused"

    plain, fused = working(Int4(), Unfused()), working(Int4(), KtAmx())
    assert working(Hungry(), Unfused()) == plain + 1_000_000
    assert working(Hungry(), HungryUnfused()) == plain + 3_000_000
    assert working(Hungry(), KtAmx()) == fused
    assert working(Int4(), HungryLayout()) == fused + 3_000_000


class Ending:
    """Hears how runs end."""

    def __init__(self):
        self.heard = []

    @hookimpl
    def ktforge_finished(self, plan, summary):
        self.heard.append((plan, summary))

    @hookimpl
    def ktforge_failed(self, plan, error):
        self.heard.append((plan, error))


def test_an_observer_hears_how_a_run_ended(source, out):
    ending = Ending()
    made = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=Int4(), layout=Stops(), writer=SafetensorsWriter(path=out)
    )
    with pytest.raises(PluginError) as caught:
        made.run(registry=Registry(ending))
    ((plan, error),) = ending.heard
    assert error is caught.value and not plan.problems
    ending.heard.clear()
    summary = made.model_copy(update={"layout": KtAmx()}).run(registry=Registry(ending), overwrite=True, restart=True)
    assert ending.heard == [(summary.plan, summary)]
    assert summary.units == len(summary.plan.units) and summary.folder == out and summary.seconds > 0
    assert summary.source_bytes == summary.plan.source_bytes
    assert summary.output_bytes == sum((out / f.path).stat().st_size for f in summary.plan.files)
    again = made.model_copy(update={"layout": KtAmx()})
    with pytest.raises(AlreadyDone, match="holds this output already") as done:
        again.run(registry=Registry(ending))
    assert ending.heard[-1][1] is done.value


def test_a_log_is_shown_when_it_is_asked_for(source, tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(
        "import logging\nfrom ktforge import hookimpl\n"
        "@hookimpl\ndef ktforge_planned(plan):\n"
        "    logging.getLogger('ktforge.theirs').info('seen\\x1b[31m %s', len(plan.units))\n"
        "    raise ValueError('no')\n"
    )
    quiet = convert(source, tmp_path / "one", "int4", "--plugin", file)
    assert "warning: plugin" in quiet.stderr and "(ValueError: no), and the conversion goes on" in quiet.stderr
    assert "seen" not in quiet.stderr and quiet.exit_code == 0
    loud = convert(source, tmp_path / "two", "int4", "--plugin", file, "-v")
    assert "info: seen\\x1b[31m 29" in loud.stderr and "info: publishing" in loud.stderr


def test_a_plugin_cannot_end_the_command(source, tmp_path):
    file = tmp_path / "ends.py"
    file.write_text(
        "from ktforge import Preprocessor, hookimpl\n"
        "class Ends(Preprocessor):\n"
        "    name = 'ends'\n"
        "    def model_post_init(self, context):\n        raise SystemExit(0)\n"
        "    def plan(self, unit):\n        return [unit]\n"
        "    def apply(self, unit):\n        yield unit\n"
        "@hookimpl\ndef ktforge_preprocessors():\n    return [Ends]\n"
    )
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(
        f"loader: {{use: auto, path: {source}}}\npreprocess: [{{use: ends}}]\n"
        f"writer: {{use: safetensors, path: {tmp_path}/out}}\n"
    )
    done = ktforge("run", pipeline, "--plugin", file)
    assert done.exit_code == 1 and isinstance(done.exception, PluginError) and "ends" in str(done.exception)
    with pytest.raises(ConfigError, match="there is no"):
        Registry.installed().find("preprocess", "ends")
