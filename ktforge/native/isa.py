"""Which instruction set the kernels use."""

from __future__ import annotations

import os

from ktforge._native import ffi, lib
from ktforge.errors import ConfigError

ISA_VARIABLE = "KTFORGE_ISA"


def isas() -> dict[str, bool]:
    """Instruction sets of this build, worst first, and whether this CPU has them."""
    return {
        ffi.string(lib.ktq_isa_name(i)).decode(): bool(lib.ktq_isa_supported(i)) for i in range(lib.ktq_isa_count())
    }


def current_isa() -> str:
    """The instruction set in use."""
    return ffi.string(lib.ktq_isa_current()).decode()


def use_isa(name: str) -> None:
    """Uses another instruction set, in all threads. Raises ConfigError if there is none of that name here."""
    if lib.ktq_isa_use(name.encode()) != lib.KTQ_OK:
        usable = ", ".join(isa for isa, supported in isas().items() if supported)
        raise ConfigError(f"this CPU or this build has no instruction set {name!r}; usable: {usable}")


if os.environ.get(ISA_VARIABLE):
    try:
        use_isa(os.environ[ISA_VARIABLE])
    except ConfigError as error:
        raise ConfigError(f"{ISA_VARIABLE}: {error}") from None
