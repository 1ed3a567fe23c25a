"""The kit must catch what it is there to catch, in the words of the run that would fail."""

from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import CompressedTensors, Int4, Int8, KtAmx

from ktforge import QuantPart, QuantUnit, Unit
from ktforge.contract.stages import alike
from ktforge.testing import check_layout, check_quantizer, expert


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(("quantizer", "error"), [(Int4(), 0.2), (Int8(), 0.011)])
def test_the_builtins_pass(isa, quantizer, error, parts):
    unit = expert((512, 256), seed=parts)
    check_quantizer(quantizer, KtAmx(threadpool_count=parts), unit, max_error=error)
    check_layout(KtAmx(threadpool_count=parts), quantizer, unit, config=checkpoints.config())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
def test_what_is_read_back_is_found_and_unpacked(form, symmetric):
    quantizer = Int8(group_size=32, symmetric=symmetric)
    check_layout(CompressedTensors(format=form), quantizer, config=checkpoints.config())


class LeavesBytes(KtAmx):
    name: ClassVar[str] = "leaves-bytes"

    def pack(self, unit, out):
        for name, buffer in out.items():
            if name.endswith("weight"):
                buffer[:-1] = 0
            else:
                buffer[:] = 0


class WritesOutside(KtAmx):
    name: ClassVar[str] = "writes-outside"

    def pack(self, unit, out):
        super().pack(unit, out)
        buffer = next(iter(out.values()))
        np.lib.stride_tricks.as_strided(buffer, (buffer.size + 8,))[-1] = 1


class NoVersion(KtAmx):
    name: ClassVar[str] = "no-version"

    def plan(self, spec):
        return super().plan(spec)._replace(format="kt")


class OtherFused(KtAmx):
    name: ClassVar[str] = "other-fused"

    def fused(self, quantizer, spec):
        return lambda unit, out: [buffer.view(np.uint8).fill(0) for buffer in out.values()]


class OtherCodes(CompressedTensors):
    name: ClassVar[str] = "other-codes"

    def unpack(self, packed, spec):
        made = super().unpack(packed, spec)
        return QuantUnit(spec, tuple(QuantPart(-p.codes, p.scales) for p in made.parts))


class FindsNothing(CompressedTensors):
    name: ClassVar[str] = "finds-nothing"

    def find(self, tensors, config, read):
        return iter(())


class NeedsMemory(KtAmx):
    name: ClassVar[str] = "needs-memory"

    def pack(self, unit, out):
        codes = [np.concatenate([p.codes] * 8) for p in unit.parts]
        super().pack(unit, out)
        del codes


class FormatOfTheLayer(KtAmx):
    name: ClassVar[str] = "format-of-the-layer"

    def plan(self, spec):
        return super().plan(spec)._replace(format=f"kt-{spec.unit.layer % 5}/1")

    def plan_key(self):
        return alike


class ChangesConfig(KtAmx):
    name: ClassVar[str] = "changes-config"

    def edit_config(self, config, results):
        config["quantized"] = True
        return config


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (OtherFused(), "fused\\(\\) fills it with other bytes than pack"),
        (OtherCodes(), "gate 0: unpack\\(\\) gives other codes than were packed"),
        (FindsNothing(), r"find\(\) finds weights of \[\] where"),
        (NeedsMemory(), r"scratch_bytes\(\) of needs-memory says 0, and \d\d\d,\d+ bytes were needed"),
        (FormatOfTheLayer(), r"plan_key\(\) of format-of-the-layer calls units alike"),
        (ChangesConfig(), r"edit_config\(\) of changes-config changes the config"),
        (LeavesBytes(), "some bytes are not written"),
        (WritesOutside(), "bytes outside the buffer were written"),
        (NoVersion(), "has no version"),
    ],
)
def test_check_layout_catches(layout, message):
    with pytest.raises(AssertionError, match=message):
        check_layout(layout, Int8(), config=checkpoints.config())


class Changed(Int8):
    """Delivers what the class attribute ``change`` makes of each part."""

    name: ClassVar[str] = "changed"
    change: ClassVar = staticmethod(lambda part: part)

    def quantize(self, unit, spec):
        return QuantUnit(spec, tuple(self.change(p) for p in super().quantize(unit, spec).parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: QuantPart(p.codes.astype(np.int16), p.scales),
         r"plugin changed .* delivered the codes of .* as int16 \[128, 128\]; I8 \[128, 128\] was planned"),
        (lambda p: QuantPart(p.codes, p.scales[:, 0]),
         r"delivered the scales of .* as float32 \[128\]; F32 \[128, 1\] was planned"),
        (lambda p: QuantPart(p.codes, p.scales * 2), "relative error"),
        (lambda p: QuantPart(p.codes, p.scales, p.codes[:, :1]), "zero points of .* do not fit symmetric=True"),
        (lambda p: QuantPart(p.codes ^ np.random.default_rng().integers(0, 2, p.codes.shape, np.int8), p.scales),
         "a second call gives other codes"),
        (lambda p: QuantPart(p.codes, p.scales * np.float32(np.random.default_rng().uniform(0.99, 1.01))),
         "a second call gives other scales"),
        (lambda p: QuantPart(-p.codes, -p.scales), "with negative ones"),
        (lambda p: QuantPart(p.codes, np.where(p.scales > 0, np.float32(np.inf), p.scales)), "NaN or infinity"),
    ],
)  # fmt: skip
def test_check_quantizer_catches(change, message):
    class Case(Changed):
        pass

    Case.change = staticmethod(change)
    with pytest.raises(AssertionError, match=message):
        check_quantizer(Case(), KtAmx())


def test_check_quantizer_catches_codes_of_too_many_bits():
    class Wide(Int4):
        name: ClassVar[str] = "wide"

        def quantize(self, unit, spec):
            made = super().quantize(unit, spec)
            return QuantUnit(spec, tuple(QuantPart(p.codes * 2, p.scales / 2) for p in made.parts))

    with pytest.raises(AssertionError, match=r"the codes of .* gate 0 from -1\d to 1\d; 4 bits hold -8 to 7"):
        check_quantizer(Wide(), KtAmx())


class Trusted(Int4):
    """Says that nobody need look, and is wrong."""

    name: ClassVar[str] = "trusted"
    trusted: ClassVar[bool] = True

    def quantize(self, unit, spec):
        made = super().quantize(unit, spec)
        return QuantUnit(spec, tuple(QuantPart(p.codes * 2, p.scales / 2) for p in made.parts))


class TakesAnything(Int8):
    name: ClassVar[str] = "takes-anything"

    def quantize(self, unit, spec):
        tensors = {r: np.nan_to_num(t.astype(np.float32), posinf=0).astype(t.dtype) for r, t in unit.tensors.items()}
        return super().quantize(Unit(unit.spec, tensors), spec)

    def scratch_bytes(self, unit, spec):
        return 10**9


class WritesInPlace(Int8):
    name: ClassVar[str] = "writes-in-place"

    def quantize(self, unit, spec):
        for tensor in unit.tensors.values():
            tensor *= 1
        return super().quantize(unit, spec)


class OtherParts(Int8):
    name: ClassVar[str] = "other-parts"

    def plan(self, unit, demand):
        return super().plan(unit, demand)._replace(parts=demand.parts[:-1])


@pytest.mark.parametrize(
    ("quantizer", "error", "message"),
    [
        (Trusted(), AssertionError, "4 bits hold -8 to 7"),
        (TakesAnything(), AssertionError, "takes-anything takes a weight with nan"),
        (WritesInPlace(), ValueError, "read-only"),
        (OtherParts(), AssertionError, "plans other parts than the layout kt-amx demands"),
    ],
)
def test_check_quantizer_catches_other_breaches(quantizer, error, message):
    with pytest.raises(error, match=message):
        check_quantizer(quantizer, KtAmx())
