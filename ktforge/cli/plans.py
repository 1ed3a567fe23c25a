"""What a plan looks like: as a table, and as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ktforge.cli.table import show_json, show_rows

if TYPE_CHECKING:
    from ktforge.contract.plan import Plan


def show(plan: Plan, *, as_json: bool, workers: int | None = None, memory_limit: int | None = None) -> None:
    """Prints the plan for so many ``workers`` (default: one a core) within a memory limit in bytes, then raises
    PlanError if it has refusals."""
    if as_json:
        show_json(_data(plan, workers, memory_limit))
    else:
        show_rows(_rows(plan, workers, memory_limit))
    plan.check()
    plan.check_memory(memory_limit)


def _data(plan: Plan, workers: int | None, memory_limit: int | None) -> dict[str, Any]:
    from ktforge.native.cores import available_cores
    from ktforge.output.folder import outlook
    from ktforge.output.space import free_space

    workers, folder = workers or available_cores(), plan.pipeline.writer.folder()
    return {
        "model_type": plan.model.model_type,
        "experts": plan.model.experts,
        "moe_layers": sorted(plan.model.moe_layers),
        "units": len(plan.units),
        "expert_units": plan.expert_units,
        "files": [{"path": f.path, "bytes": f.nbytes, "tensors": len(f.tensors)} for f in plan.files],
        "formats": list(plan.formats),
        "methods": list(plan.methods),
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "folder": str(folder) if folder else None,
        "free_bytes": free_space(folder)[0] if folder else None,
        "workers": workers,
        "peak_memory_bytes": plan.peak_memory(workers, memory_limit),
        "left_out": [t.name for t in plan.left_out],
        "pipeline": plan.pipeline.to_dict(),
        "notes": list(plan.notes),
        "output_folder": outlook(plan),
        "serve": plan.serving,
        "problems": list(plan.problems),
    }


def _rows(plan: Plan, workers: int | None, memory_limit: int | None) -> list[tuple[str, str]]:
    from ktforge.contract.tensors import total_bytes
    from ktforge.native.cores import available_cores
    from ktforge.output.folder import outlook
    from ktforge.output.space import free_space
    from ktforge.pipeline.file import stage_lines
    from ktforge.text import counted, size_text

    model, workers = plan.model, workers or available_cores()
    experts = f"{counted(model.experts, 'expert')} in {counted(len(model.moe_layers), 'layer')}"
    rows = [("model", f"{model.model_type or 'unknown type'}, {experts if model.experts else 'dense'}")]
    if not plan.files:  # what refuses a unit leaves no output to count
        rows.append(("source", size_text(sum(f.nbytes for f in plan.sources) or plan.source_bytes)))
    else:
        of_them = f", {plan.expert_units:,} of them {'expert' if plan.expert_units == 1 else 'experts'}"
        rows += [
            ("units", f"{len(plan.units):,}{of_them if model.experts else ''}"),
            ("source", size_text(plan.source_bytes)),
        ]
        ratio = plan.source_bytes / plan.output_bytes if plan.output_bytes else 0
        files = counted(len(plan.files), "file")
        peak = _peak(plan, workers, memory_limit)
        rows += [
            ("output", f"{size_text(plan.output_bytes)} in {files} ({', '.join(plan.formats) or 'no layout'})"),
            ("compression", f"{ratio:.2f} : 1"),
            ("peak memory", f"{peak}, beside Python's own"),
        ]
    names = {t.name for t in plan.extra}
    for what, tensors in (
        (" of multi-token prediction", plan.extra), ("", [t for t in plan.left_out if t.name not in names]),
    ):  # fmt: skip
        if tensors:
            such = f"such as {tensors[0].name}" if tensors[1:] else tensors[0].name
            rows.append(
                ("left out", f"{counted(len(tensors), 'tensor')}{what}, {size_text(total_bytes(tensors))}, {such}")
            )
    if folder := plan.pipeline.writer.folder():
        free, where = free_space(folder)
        rows += [("writes to", str(folder)), ("free disk", f"{size_text(free)} at {where}")]
    rows += [(key, text) for key, text in stage_lines(plan.pipeline) if key != "writer"]
    rows += [("config.json", note.removeprefix("config.json ")) for note in plan.notes]
    if foreseen := outlook(plan):
        rows.append(("output folder", foreseen))
    if serving := plan.serving:
        rows.append(("serve with", serving))
    return rows


def _peak(plan: Plan, workers: int, memory_limit: int | None) -> str:
    from ktforge.text import counted, size_text

    free, bound = plan.peak_memory(workers), plan.peak_memory(workers, memory_limit)
    at_once = f"{counted(workers, 'unit')} at once"
    if bound == free:
        return f"{size_text(free)} for {at_once}"
    return f"{size_text(bound)}, the limit; {at_once} would take {size_text(free)}, so workers wait for each other"
