"""check_preprocessor passes ktforge's own preprocessors, and catches what it is there to catch."""

from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Fp8, Int8, MoeToBf16, SplitExperts

from ktforge import Preprocessor, Unit
from ktforge.contract.pending import LazyTensors
from ktforge.contract.stages import alike
from ktforge.contract.tensors import BF16
from ktforge.testing import check_preprocessor, expert, fused_experts, weight_unit

MODEL = checkpoints.config(hidden_size=128, moe_intermediate_size=256, num_experts=3)
PLAIN = weight_unit({"weight": np.linspace(-1, 1, 512 * 256, dtype=np.float32).reshape(512, 256)})


@pytest.mark.parametrize("gate_up", ["halves", "interleaved"])
def test_split_experts(gate_up):
    fused = fused_experts()
    made = check_preprocessor(SplitExperts(gate_up=gate_up), fused, config=MODEL)
    assert [unit.spec.expert for unit in made] == [0, 1, 2]
    rows = slice(256) if gate_up == "halves" else slice(0, None, 2)
    assert made[1].tensors["gate.weight"].tobytes() == fused.tensors["gate_up.weight"][1, rows].tobytes()


def test_fp8():
    weight, scale = checkpoints.to_fp8(np.random.default_rng(0).standard_normal((512, 384), np.float32), (128, 128))
    (made,) = check_preprocessor(Fp8(), weight_unit({"weight": weight, "weight_scale_inv": scale}))
    assert made.spec.tensors["weight"].dtype == BF16


@pytest.mark.parametrize("unit", [PLAIN, expert(), fused_experts()], ids=["weight", "expert", "fused"])
def test_moe_to_bf16(unit):
    check_preprocessor(MoeToBf16(), unit)


class Scales(Preprocessor):
    """Doubles float weights of two axes or more; right as it is."""

    name: ClassVar[str] = "scales"
    rowwise: ClassVar[bool] = True

    def plan(self, unit):
        return [unit]

    def plan_key(self):
        return alike

    def apply(self, unit):
        yield Unit(unit.spec, {role: self.scaled(array) for role, array in unit.tensors.items()})

    def scratch_bytes(self, unit):
        return unit.nbytes

    def scaled(self, array):
        return array * np.asarray(2, array.dtype) if array.ndim > 1 and array.dtype != np.int64 else array


@pytest.mark.parametrize("unit", [PLAIN, expert(), fused_experts()], ids=["weight", "expert", "fused"])
def test_one_that_makes_arrays_anew(unit):
    check_preprocessor(Scales(), unit)


class AllAtOnce(Scales):
    """Says that it treats experts one by one, and looks at all."""

    name: ClassVar[str] = "all-at-once"
    rowwise: ClassVar[bool] = True

    def scaled(self, array):
        return (array / np.abs(array).max()).astype(array.dtype) if array.ndim == 3 else array

    def scratch_bytes(self, unit):
        return 10**9


class InPlace(Scales):
    name: ClassVar[str] = "in-place"

    def scaled(self, array):
        array *= 2
        return array


class Random(Scales):
    name: ClassVar[str] = "random"

    def scaled(self, array):
        return np.random.default_rng().standard_normal(array.shape).astype(array.dtype)

    def scratch_bytes(self, unit):
        return 10**9


class SaysNoScratch(Scales):
    name: ClassVar[str] = "says-no-scratch"

    def scratch_bytes(self, unit):
        return 0


class Planned(Scales):
    """Delivers what another plan than its own says."""

    name: ClassVar[str] = "planned"

    def plan(self, unit):
        return [unit.with_tensors({r: t._replace(dtype=BF16) for r, t in unit.tensors.items()})]


class Drops(Scales):
    name: ClassVar[str] = "drops"

    def apply(self, unit):
        return iter(())


class ByLayer(Scales):
    name: ClassVar[str] = "by-layer"

    def plan(self, unit):
        return [unit] if (unit.layer or 0) % 2 == 0 else []

    def plan_key(self):
        return alike


class Greedy(Scales):
    """Works on whatever it gets."""

    name: ClassVar[str] = "greedy"

    def plan(self, unit):
        return [unit.with_tensors({r: t._replace(name=f"x.{t.name}") for r, t in unit.tensors.items()})]


class SameName(Scales):
    name: ClassVar[str] = "same-name"

    def plan(self, unit):
        return [unit, unit]


class SaysUnmade(Scales):
    name: ClassVar[str] = "says-unmade"

    def unmade(self, unit):
        return ["weight"]


class ChangesConfig(Scales):
    name: ClassVar[str] = "changes-config"

    def bind(self, config):
        config["seen"] = True
        return self


class AnotherStage(Scales):
    name: ClassVar[str] = "another-stage"

    def bind(self, config):
        return Int8()


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (Random(), "random gives other bytes for weight of model.layers.0.self_attn.q_proj"),
        (SaysNoScratch(), r"scratch_bytes\(\) of says-no-scratch says 0, and \d\d\d,\d+ bytes were needed"),
        (Planned(), r"plugin planned .* delivered .* as float32 .*; BF16 \[512, 256\] was planned"),
        (Drops(), "plugin drops .* made fewer units than it planned"),
        (ByLayer(), r"plan_key\(\) of by-layer calls units alike"),
        (Greedy(), "greedy does not leave model.layers.0.input_layernorm alone"),
        (SameName(), "same-name plans a tensor name twice"),
        (SaysUnmade(), r"unmade\(\) of says-unmade names \['weight'\], which it delivers made"),
        (ChangesConfig(), r"bind\(\) of changes-config changes the config"),
        (AnotherStage(), "plugin another-stage .* planned Int8 for config.json; Preprocessor was expected"),
    ],
)
def test_check_preprocessor_catches(stage, message):
    with pytest.raises(AssertionError, match=message):
        check_preprocessor(stage, PLAIN, config={"model_type": "x"})


def test_check_preprocessor_catches_experts_that_are_not_treated_by_themselves():
    with pytest.raises(AssertionError, match=r"row 0 of model.layers.0.mlp.experts, which rowwise says it treats by"):
        check_preprocessor(AllAtOnce(), fused_experts())


def test_check_preprocessor_gives_what_nobody_may_write_to():
    with pytest.raises(AssertionError, match=r"plugin in-place .* failed on .*: ValueError: .*read-only"):
        check_preprocessor(InPlace(), PLAIN)


def test_units_that_it_does_not_know_may_be_others():
    made = check_preprocessor(Greedy(), PLAIN, unknown=())
    assert made[0].spec.tensors["weight"].name == "x.model.layers.0.self_attn.q_proj.weight"


def test_tensors_that_are_made_later():
    class Later(Scales):
        name: ClassVar[str] = "later"

        def apply(self, unit):
            yield Unit(unit.spec, LazyTensors({}, {role: Doubled(array) for role, array in unit.tensors.items()}))

        def unmade(self, unit):
            return ["weight"]

    class Doubled:
        def __init__(self, array):
            self.array, self.dtype, self.shape = array, array.dtype, array.shape

        def make(self):
            return self.array * 2

    (made,) = check_preprocessor(Later(), PLAIN, unknown=())
    assert np.array_equal(made.tensors["weight"], PLAIN.tensors["weight"] * 2)
