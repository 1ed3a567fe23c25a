"""The one-pass route gives the bytes of the stages one by one, and what nobody asks for is never made."""

from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Fp8, Int4, Int8, KtAmx, MoeToBf16, SafetensorsLoader

from ktforge import CheckpointError, Pipeline, PluginError, native
from ktforge.contract.pending import LazyTensors, pending
from ktforge.testing import MemoryLoader, MemoryWriter


class TwoSteps(KtAmx):
    name: ClassVar[str] = "two-steps"

    def fused(self, quantizer, spec):
        return None


class OtherPacking(KtAmx):
    name: ClassVar[str] = "other-packing"

    def pack(self, unit, out):
        for array in out.values():
            array[:] = 1


class OtherCodes(Int4):
    name: ClassVar[str] = "other-codes"

    def quantize(self, unit, spec):
        made = super().quantize(unit, spec)
        for part in made.parts:
            part.codes[:] = 0
        return made


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    # Blocks that no NUMA part begins with.
    return checkpoints.fp8_checkpoint(tmp_path_factory.mktemp("fp8"), (96, 80))


def converted(folder, **stages):
    writer = MemoryWriter()
    defaults = {"preprocess": [MoeToBf16()], "quantize": Int4(), "layout": KtAmx()}
    Pipeline(loader=SafetensorsLoader(path=folder), writer=writer, **{**defaults, **stages}).run(workers=2)
    return {name: array.tobytes() for name, array in writer.tensors.items()}


def long_way(*arguments):
    raise AssertionError("this is the long way")


@pytest.mark.parametrize("quantizer", [Int4(), Int8()])
def test_one_pass_equals_two_steps(source, fp8, quantizer, monkeypatch):
    for folder in (source, fp8):
        want = converted(folder, quantize=quantizer, layout=TwoSteps(threadpool_count=4))
        with monkeypatch.context() as patched:
            patched.setattr(native, "kt_amx_pack", long_way)
            patched.setattr(native.Fp8Blocks, "make", long_way)
            assert converted(folder, quantize=quantizer, layout=KtAmx(threadpool_count=4)) == want


def test_a_subclass_that_packs_or_quantises_in_another_way_is_not_passed_by(source):
    packed = converted(source, layout=OtherPacking())
    assert set(packed["blk.0.ffn_up_exps.0.numa.0.weight"]) == {1}
    zeros = converted(source, quantize=OtherCodes())
    assert set(zeros["blk.0.ffn_up_exps.0.numa.0.weight"]) == {0}


class HalfFp8(Fp8):
    name: ClassVar[str] = "half-fp8"

    def dequantize(self, arrays, parameters):
        return (super().dequantize(arrays, parameters).astype(np.float32) / 2).astype(checkpoints.BF16)


def test_a_subclass_that_dequantises_in_another_way_is_not_passed_by(fp8):
    got, want = (converted(fp8, preprocess=[HalfFp8()], layout=layout) for layout in (KtAmx(), TwoSteps()))
    whole = converted(fp8, preprocess=[Fp8()])
    scale = "blk.0.ffn_gate_exps.0.numa.0.scale"
    assert got == want and (np.frombuffer(got[scale], "f4") * 2 == np.frombuffer(whole[scale], "f4")).all()


def test_an_fp8_weight_that_is_not_finite_is_named(tmp_path):
    folder = checkpoints.fp8_checkpoint(tmp_path, (128, 128))
    loader = SafetensorsLoader(path=folder)
    data = {spec.name: loader.read(spec).copy() for spec in loader.scan()}
    name = checkpoints.expert_name(1, 2, "down")
    data[name].view(np.uint8)[200, 300] = 0x7F
    memory = MemoryLoader(tensors=data, model=dict(loader.config()))
    run = Pipeline(
        loader=memory, preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(), writer=MemoryWriter()
    ).run  # fmt: skip
    with pytest.raises(CheckpointError, match=f"{name} is NaN or infinite at row 200, column 300"):
        run()


class Announced:
    """A pending tensor that may turn out to be another one."""

    def __init__(self, array, dtype=np.float32, shape=(2, 3)):
        self.array, self.dtype, self.shape, self.made = array, np.dtype(dtype), shape, 0

    def make(self):
        self.made += 1
        return self.array


def test_lazy_tensors_are_made_once_and_only_if_asked_for():
    first, second = Announced(np.zeros((2, 3), np.float32)), Announced(np.ones((2, 3), np.float32))
    tensors = LazyTensors({"bias": np.zeros(2)}, {"a": first, "b": second})
    assert set(tensors) == {"bias", "a", "b"} and len(tensors) == 3 and "a" in tensors
    assert pending(tensors, "a") is first and pending(tensors, "bias") is None and pending({}, "a") is None
    assert tensors["a"] is first.array and tensors["a"] is first.array
    assert (first.made, second.made) == (1, 0)
    assert pending(tensors, "a") is None
    with pytest.raises(KeyError):
        tensors["c"]


def test_a_tensor_must_be_what_was_announced():
    tensors = LazyTensors({}, {"a": Announced(np.zeros((3, 2), np.float32))})
    with pytest.raises(ValueError, match=r"a was announced as float32 \(2, 3\), and is not"):
        tensors["a"]


def test_what_was_announced_is_held_against_the_plan(source):
    class Wrong(MoeToBf16):
        name: ClassVar[str] = "wrong"

        def apply(self, unit):
            for made in super().apply(unit):
                roles = {r: Announced(a, np.float32, a.shape) for r, a in made.tensors.items()}
                yield type(made)(made.spec, LazyTensors({}, roles))

    with pytest.raises(PluginError, match=r"^plugin wrong .* delivered .* as float32 .*; BF16 .* was planned"):
        converted(source, preprocess=[Wrong()])
