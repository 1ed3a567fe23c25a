"""What a plugin delivers is looked at, values too, and whatever it does instead is said to be its fault."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from ktforge_plugins import Int4, Int8, KtAmx

from ktforge import Layout, PackedSpec, Pipeline, PluginError, Preprocessor, Quantizer, QuantSpec, TensorSpec
from ktforge.contract.checks import delivered_parts, with_delegates
from ktforge.contract.stages import Stage
from ktforge.contract.tensors import QuantPart, QuantUnit
from ktforge.testing import MemoryLoader, MemoryWriter, expert

BF16 = np.dtype(ml_dtypes.bfloat16)
DENSE = {"num_hidden_layers": 1, "hidden_size": 4}


class Given(Quantizer):
    """Delivers what a test wants: codes of 4 bits in groups of 32."""

    name = "given"
    symmetric: bool = True

    def plan(self, unit, demand):
        return QuantSpec(unit, demand.parts, 4, "given/1", 32, self.symmetric, demand.scale_dtype)

    def quantize(self, unit, spec):
        shapes = [((n, k), (n, k // 32)) for n, k in (p.shape for p in spec.parts)]
        zeros = None if self.symmetric else np.int8
        return QuantUnit(spec, tuple(
            QuantPart(np.full(c, 7, np.int8), np.ones(s, spec.scale_dtype), zeros and np.full(s, -8, zeros))
            for c, s in shapes
        ))  # fmt: skip


class Kept(Layout):
    name = "kept"

    def plan(self, spec):
        parts = ((p, f"{spec.unit.name}.{p.projection}") for p in spec.parts)
        return PackedSpec(tuple(TensorSpec(name, np.dtype(np.int8), p.shape) for p, name in parts), "kept/1")

    def pack(self, unit, out):
        for part, quantised in zip(unit.spec.parts, unit.parts, strict=True):
            out[f"{unit.spec.unit.name}.{part.projection}"][:] = quantised.codes


class Signed(Kept):
    name = "signed"
    signed_scales = True


def made(quantizer, layout, change):
    """What is said of a quantised expert in which a test has changed something."""
    unit = expert()
    spec = quantizer.plan(unit.spec, layout.demand(unit.spec))
    quantised = quantizer.quantize(unit, spec)
    change(quantised.parts[1])
    return delivered_parts(quantizer, quantised, spec, layout)


def put(array, value, place=(3, 0)):
    def change(part):
        getattr(part, array)[place] = value

    return change


@pytest.mark.parametrize("place", [(0, 0), (255, 3)])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("codes", 8), "the codes of {} up 0 from 7 to 8; 4 bits hold -8 to 7"),
        (("codes", -9), "the codes of {} up 0 from -9 to 7; 4 bits hold -8 to 7"),
        (("zeros", -128), "the zero points of {} up 0 from -128 to -8; 4 bits hold -8 to 7"),
        (("scales", np.nan), "the scales of {} up 0 with NaN or infinity among them"),
        (("scales", -np.inf), "the scales of {} up 0 with NaN or infinity among them"),
        (("scales", -1), "the scales of {} up 0 with negative ones, which no reader expects"),
    ],
)
def test_a_wrong_value_is_named(change, said, place):
    quantizer = Given(symmetric=change[0] != "zeros")
    with pytest.raises(PluginError) as caught:
        made(quantizer, Kept(), put(*change, place))
    assert str(caught.value).startswith("plugin given (")
    assert str(caught.value).endswith(", quantize) delivered " + said.format(expert().spec.name))


@pytest.mark.parametrize("value", [7, -8, 0])
def test_values_at_the_ends_are_right(value):
    made(Given(), Kept(), put("codes", value))
    made(Given(symmetric=False), Kept(), put("zeros", value))
    made(Given(), Kept(), put("scales", 0))
    made(Given(), Kept(), put("scales", -0.0))
    made(Given(), Signed(), put("scales", -1))


def test_trust_is_not_inherited():
    """ktforge's own kernels have it, and are compared with a statement in NumPy instead."""
    assert vars(Int4)["trusted"] and vars(Int8)["trusted"]

    class Careless(Int4):
        name = "careless"

        def quantize(self, unit, spec):
            quantised = super().quantize(unit, spec)
            quantised.parts[0].codes[0, 0] = 100
            return quantised

    def run(quantizer):
        data = {f"{expert().spec.name}.{r}": a for r, a in expert((256, 128)).tensors.items()}
        names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
        for ours, theirs in names.items():
            data = {n.replace(f".{ours}.", f".{theirs}."): a for n, a in data.items()}
        config = {"model_type": "qwen3_moe", "hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 1,
                  "num_hidden_layers": 1}  # fmt: skip
        loader = MemoryLoader(tensors=data, model=config)
        return Pipeline(
            loader=loader, quantize=quantizer, layout=KtAmx(threadpool_count=1), writer=MemoryWriter()
        ).run()

    assert run(Int4()).units == 1
    with pytest.raises(PluginError, match=r"plugin careless .* from -?\d to 100; 4 bits hold -8 to 7"):
        run(Careless())


def pipeline(**stages):
    unit = expert()
    loader = MemoryLoader(
        tensors={"model.norm.weight": np.ones(4, BF16)}, model={"num_hidden_layers": 1, "hidden_size": 4}
    )
    assert unit
    return Pipeline(**{"loader": loader, "writer": MemoryWriter(), **stages})


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError


FAULTS = [SystemExit(0), KeyboardInterrupt(), BaseException("odd"), Wordless(), RecursionError(), ValueError("a\nb")]


@pytest.mark.parametrize("error", FAULTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("when", ["plan", "apply"])
def test_whatever_a_stage_raises_is_its_fault(error, when):
    """In the main thread, Ctrl-C is the user's."""

    class Raises(Preprocessor):
        name = "raises"

        def plan(self, unit):
            if when == "plan":
                raise error
            return [unit]

        def apply(self, unit):
            raise error

    ours = isinstance(error, KeyboardInterrupt) and when == "plan"
    with pytest.raises(KeyboardInterrupt if ours else PluginError) as caught:
        pipeline(preprocess=[Raises()]).run(workers=2)
    if not ours:
        assert str(caught.value).startswith("plugin raises (") and "failed on model.norm.weight: " in str(caught.value)
        assert "\n" not in str(caught.value)


class NoUnits(Preprocessor):
    name = "nothing"

    def plan(self, unit):
        return [unit]

    def apply(self, unit):
        yield "unit"


class NoArray(MemoryLoader):
    name = "nothing"

    def read(self, spec):
        return None


class NoScan(MemoryLoader):
    name = "nothing"

    def scan(self):
        return None


class NoSink(MemoryWriter):
    name = "nothing"

    def open(self, plan, **options):
        return None


class NoFiles(MemoryWriter):
    name = "nothing"

    def plan(self, tensors, formats):
        return None


class NoStage(Preprocessor):
    name = "nothing"

    def bind(self, config):
        return None

    def plan(self, unit):
        return [unit]

    def apply(self, unit):
        yield unit


NOTHING = {
    "apply": {"preprocess": [NoUnits()]},
    "read": {
        "loader": NoArray(tensors={"a.weight": np.ones(4, BF16)}, model={"num_hidden_layers": 1, "hidden_size": 4})
    },
    "scan": {"loader": NoScan(tensors={}, model={"num_hidden_layers": 1, "hidden_size": 4})},
    "open": {"writer": NoSink()},
    "files": {"writer": NoFiles()},
    "bind": {"preprocess": [NoStage()]},
}


@pytest.mark.parametrize("stages", NOTHING.values(), ids=NOTHING.keys())
def test_what_gives_nothing_is_named(stages):
    with pytest.raises(PluginError, match=r"^plugin nothing \("):
        pipeline(**stages).run(workers=1)


@pytest.mark.parametrize("when", ["open", "close"])
def test_a_writer_that_fails_is_named_and_one_that_passes_an_error_on_is_not(when):
    class Opens(MemoryWriter):
        name = "opens"

        def open(self, plan, **options):
            class Manager:
                def __enter__(self):
                    if when == "open":
                        raise KeyError("disk")
                    return manager.__enter__()

                def __exit__(self, *error):
                    manager.__exit__(*error)
                    if error[0] is None:
                        raise KeyError("disk")

            manager = super().open(plan)
            return Manager()

    with pytest.raises(PluginError, match=r"^plugin opens .* failed on the output: KeyError: 'disk'"):
        pipeline(writer=Opens()).run()
    with pytest.raises(PluginError, match=r"^plugin nothing .* delivered"):
        pipeline(**NOTHING["read"], **({"writer": Opens()} if when == "close" else {})).run()


def test_every_stage_is_told_what_config_json_says():
    told = []

    def telling(base):
        class Telling(base):
            name = base.name

            def bind(self, config):
                told.append((self.stage, config["hidden_size"]))
                return self

        return Telling

    loader = telling(MemoryLoader)(
        tensors={"a.weight": np.ones(4, BF16)}, model={"num_hidden_layers": 1, "hidden_size": 4}
    )
    pipeline(
        loader=loader, quantize=telling(Given)(), layout=telling(Kept)(), writer=telling(MemoryWriter)()
    ).plan()  # fmt: skip
    assert sorted(told) == [("layout", 4), ("loader", 4), ("quantize", 4), ("writer", 4)]


def test_stages_that_leave_work_to_others_that_do():
    class Leaving(MemoryLoader):
        name = "leaving"
        to: Sequence[Stage] = ()

        def delegates(self):
            return self.to

    last = Leaving(tensors={}, model={})
    first = Leaving(tensors={}, model={}, to=[Leaving(tensors={}, model={}, to=[last])])
    assert [id(stage) for stage in with_delegates([first])] == [id(first), id(first.to[0]), id(first.to[0].to[0])]
