"""The C kernels on numpy arrays, which instruction set they use, and mapped pages that are gone."""

from ktforge.native.isa import ISA_VARIABLE, current_isa, isas, use_isa  # first: it reads KTFORGE_ISA
from ktforge.native.kernels import (
    Difference,
    Fp8Blocks,
    NotFinite,
    absmax,
    absmax_kt_amx,
    difference,
    fp8_to_bf16,
    group,
    kt_amx_pack,
    kt_amx_unpack,
    nibbles_pack,
    nibbles_to_bf16,
    nibbles_unpack,
    search,
    to_bf16,
)
from ktforge.native.pages import UNREADABLE, MappedFile, WatchedRanges, lost_pages, lost_pages_caught

__all__ = [
    "ISA_VARIABLE",
    "UNREADABLE",
    "Difference",
    "Fp8Blocks",
    "MappedFile",
    "NotFinite",
    "WatchedRanges",
    "absmax",
    "absmax_kt_amx",
    "current_isa",
    "difference",
    "fp8_to_bf16",
    "group",
    "isas",
    "kt_amx_pack",
    "kt_amx_unpack",
    "lost_pages",
    "lost_pages_caught",
    "nibbles_pack",
    "nibbles_to_bf16",
    "nibbles_unpack",
    "search",
    "to_bf16",
    "use_isa",
]
