"""A pipeline file to begin with, for a checkpoint that is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ktforge.contract.registry import Registry
from ktforge.inspection.description import Inspection, describe
from ktforge.inspection.look import DEQUANTIZE, TO_BF16, Look
from ktforge.pipeline.pipeline import Pipeline
from ktforge.pipeline.presets import RAWINT4, RAWINT4_GROUP
from ktforge.text import counted, printable

#: Numbers of NUMA nodes that kt-amx is tried with, the usual one first.
NODES = (2, 1, 4, 8)
#: The lines of a pipeline file between loader and writer.
Lines = list[str]


def starter(folder: Path, registry: Registry) -> str:
    """A commented pipeline file for the checkpoint in ``folder``, or comments that say why there is none.

    The first of these that can be made of it: kt-amx in INT4 or INT8, compressed-tensors in INT4 or INT8, BF16.
    Raises CheckpointError if the checkpoint cannot be read.
    """
    look = Look.at(folder, registry)
    seen = describe(look)
    lines = [*_heading(seen), *(f"# To mend first: {problem}" for problem in seen.problems)]
    middle = next((made for pipeline, made in _candidates(look, seen) if not _refused(look, pipeline)), None)
    if middle is None:
        reasons = dict.fromkeys(r for t, reasons in seen.targets.items() if t != DEQUANTIZE for r in reasons)
        lines += [f"# There is no pipeline for it: {reason}" for reason in reasons]
        if not seen.targets[DEQUANTIZE]:
            lines += ["# The command is:", f"#     ktforge dequantize --input-path {_quoted(folder)} --output out"]
        return _text(lines)
    lines += [
        "version: 1",
        f"loader: {{use: auto, path: {_quoted(folder)}}}",
        *middle,
        "writer: {use: safetensors, path: out, max_shard_size: 5GB}",
    ]
    if seen.mtp_bytes:
        lines.append("# mtp: keep  # multi-token-prediction layers too; by default a layout leaves them out")
    return _text(lines)


def _text(lines: Lines) -> str:
    """A file of these lines: what comes from config.json cannot begin one."""
    return "".join(printable(line) + "\n" for line in lines)


def _heading(seen: Inspection) -> Lines:
    layers = counted(seen.layers, "layer")
    what = f"a dense model of {layers}"
    if seen.experts:
        experts = f"{counted(seen.experts, 'expert')} of {seen.expert_size} x {seen.hidden_size}"
        what = f"{experts} in {len(seen.moe_layers)} of {layers}"
    stored = ", ".join(seen.expert_storage if seen.experts else seen.other_storage)
    return [
        f"# {seen.model_type or 'unknown type'}, {what}.",
        f"# {'Experts' if seen.experts else 'Weights'} are stored as {stored or 'nothing'}.",
    ]


def _candidates(look: Look, seen: Inspection) -> Iterator[tuple[Pipeline, Lines]]:
    """What may be made of the checkpoint, the best first; a pipeline to ask, and the lines for one that is accepted."""
    if look.packed:
        return
    split = ["  - {use: split-experts}  # all experts of a layer are in one tensor"] if seen.fused else []
    bf16 = ["  - {use: moe-to-bf16}  # from any precision; what is BF16 already stays as it is"]
    if seen.experts:
        for bits, other in (("int4", "  # or int8"), ("int8", "")):
            for count in NODES:
                lines = [
                    "preprocess:", *split, *bf16, f"quantize: {{use: {bits}}}{other}",
                    f"layout: {{use: kt-amx, threadpool_count: {count}}}  # NUMA nodes that the engine will run on",
                ]  # fmt: skip
                yield look.conversion(quantize=bits, layout="kt-amx", threadpool_count=count), lines
    reasons = seen.targets["convert --quant-method int4"]
    why_not = [f"# Not kt-amx: {reason}" for reason in reasons]
    for options, quantize in (
        (RAWINT4, f"{{use: int4, group_size: {RAWINT4_GROUP}, narrow_range: true}}  # what RAWINT4 reads"),
        ({"quantize": "int8", "layout": "compressed-tensors"}, "{use: int8}"),
    ):
        lines = [
            "preprocess:", *split, *bf16, f"quantize: {quantize}",
            "layout: {use: compressed-tensors}  # for KTransformers' RAWINT4, vLLM, SGLang, transformers",
        ]  # fmt: skip
        yield look.conversion(**options), [*why_not, *lines]
    why_not += [f"# Not compressed-tensors: {reason}" for reason in seen.targets["convert --quant-method rawint4"]]
    if seen.experts:
        yield look.bf16(TO_BF16), [*why_not, "preprocess:", *bf16]
    for name in look.formats():
        yield look.bf16(name), [*why_not, "preprocess:", f"  - {{use: {name}}}  # BF16 from this format"]


def _refused(look: Look, pipeline: Pipeline) -> bool:
    """Whether more speaks against a pipeline than what is to be mended anyway."""
    return bool(set(look.whole.refusals(pipeline)) - set(look.unreadable))


def _quoted(path: Path) -> str:
    """A path as YAML takes it within braces; one that begins with ``~`` is no home directory here."""
    text = f"./{path}" if str(path).startswith("~") else str(path)
    return "'" + text.replace("'", "''") + "'"
