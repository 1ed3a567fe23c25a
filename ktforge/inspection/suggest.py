"""A pipeline file to begin with, for a checkpoint that is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ktforge.contract.presets import SAFETENSORS, Preset
from ktforge.contract.registry import Registry
from ktforge.errors import ConfigError
from ktforge.inspection.description import Inspection, describe
from ktforge.inspection.look import DEQUANTIZE, TO_BF16, Look
from ktforge.pipeline.pipeline import Pipeline
from ktforge.text import counted, printable

#: The lines of a pipeline file between loader and writer.
Lines = list[str]


def starter(folder: Path, registry: Registry, *, follow_links: bool = False) -> str:
    """A commented pipeline file for the checkpoint in ``folder``, or comments that say why there is none.

    It is for the first of these that can be made of it: the presets of plugins in their order, then BF16.
    Raises CheckpointError if the checkpoint cannot be read.
    """
    look = Look.at(folder, registry, follow_links=follow_links)
    seen = describe(look)
    lines = [*_heading(seen), *(f"# To correct first: {problem}" for problem in seen.problems)]
    middle = next((made for pipeline, made in _candidates(look, seen) if not _refused(look, pipeline)), None)
    if middle is None:
        reasons = dict.fromkeys(r for t, reasons in seen.targets.items() if t != DEQUANTIZE for r in reasons)
        lines += [f"# There is no pipeline for it: {reason}" for reason in reasons]
        if not seen.targets[DEQUANTIZE]:
            more = " --follow-links" if follow_links else ""
            command = f"ktforge dequantize --input-path {_quoted(folder)} --output out{more}"
            lines += ["# The command is:", f"#     {command}"]
        return _text(lines)
    lines += [
        "version: 1",
        f"loader: {{use: auto, path: {_quoted(folder)}{', follow_links: true' * follow_links}}}",
        *middle,
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
    why_not: dict[str, Lines] = {}
    for preset in look.registry.presets():
        name = preset.layout["use"]
        reasons = [line for layout, lines in why_not.items() if layout != name for line in lines]
        why_not.setdefault(name, [f"# Not {name}: {reason}" for reason in seen.targets[preset.command]])
        layout = next((e.cls for e in look.registry.entries() if (e.cls.stage, e.cls.name) == ("layout", name)), None)
        if layout is None or (layout.experts_only and not seen.experts):
            continue
        for options in preset.tries:
            lines = [
                "preprocess:", *split, *bf16, _line(preset, "quantize", preset.quantize),
                _line(preset, "layout", {**preset.layout, **options}), _writer(preset.writer),
            ]  # fmt: skip
            with suppress(ConfigError):  # a stage that is not installed, which the targets say
                yield look.conversion(preset, options), [*reasons, *lines]
    reasons = [line for lines in why_not.values() for line in lines]
    if seen.experts:
        yield look.bf16(TO_BF16), [*reasons, "preprocess:", *bf16, _writer(SAFETENSORS)]
    for name in look.formats():
        made = f"  - {{use: {name}}}  # BF16 from this format"
        yield look.bf16(name), [*reasons, "preprocess:", made, _writer(SAFETENSORS)]


def _line(preset: Preset, key: Literal["quantize", "layout"], stage: Mapping[str, Any]) -> str:
    note = preset.notes.get(key)
    return f"{key}: {_flow(stage)}" + (f"  # {note}" if note else "")


def _writer(writer: Mapping[str, Any]) -> str:
    size = {"max_shard_size": "5GB"} if writer == SAFETENSORS else {}
    return f"writer: {_flow({**writer, 'path': 'out', **size})}"


def _flow(stage: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{option}: {_scalar(value)}" for option, value in stage.items()) + "}"


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refused(look: Look, pipeline: Pipeline) -> bool:
    """Whether more speaks against a pipeline than what is to be mended anyway."""
    return bool(set(look.whole.refusals(pipeline)) - set(look.unreadable))


def _quoted(path: Path) -> str:
    """A path as YAML takes it within braces; one that begins with ``~`` is no home directory here."""
    text = f"./{path}" if str(path).startswith("~") else str(path)
    return "'" + text.replace("'", "''") + "'"
