"""The kit must catch what it is there to catch."""

from typing import ClassVar

import numpy as np
import pytest
from ktforge_plugins import Int4, Int8, KtAmx

from ktforge import QuantPart, QuantUnit
from ktforge.testing import check_layout, check_quantizer, expert


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(("quantizer", "error"), [(Int4(), 0.2), (Int8(), 0.011)])
def test_the_builtins_pass(isa, quantizer, error, parts):
    unit = expert((512, 256), seed=parts)
    check_quantizer(quantizer, KtAmx(threadpool_count=parts), unit, max_error=error)
    check_layout(KtAmx(threadpool_count=parts), quantizer, unit)


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


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (LeavesBytes(), "some bytes are not written"),
        (WritesOutside(), "bytes outside the buffer were written"),
        (NoVersion(), "has no version"),
    ],
)
def test_check_layout_catches(layout, message):
    with pytest.raises(AssertionError, match=message):
        check_layout(layout, Int8())


class Changed(Int8):
    """Delivers what the class attribute ``change`` makes of each part."""

    name: ClassVar[str] = "changed"
    change: ClassVar = staticmethod(lambda part: part)

    def quantize(self, unit, spec):
        return QuantUnit(spec, tuple(self.change(p) for p in super().quantize(unit, spec).parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: QuantPart(p.codes.astype(np.int16), p.scales), "codes are not int8"),
        (lambda p: QuantPart(p.codes, p.scales[:, 0]), "scales are not"),
        (lambda p: QuantPart(p.codes, p.scales * 2), "relative error"),
        (lambda p: QuantPart(p.codes, p.scales, p.codes[:, :1]), "zero points do not fit"),
        (lambda p: QuantPart(p.codes ^ np.random.default_rng().integers(0, 2, p.codes.shape, np.int8), p.scales),
         "a second call gives other codes"),
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

    with pytest.raises(AssertionError, match="codes exceed 4 bits"):
        check_quantizer(Wide(), KtAmx())
