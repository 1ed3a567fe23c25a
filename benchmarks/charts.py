"""Draws the charts of the documentation from results.md: ``python benchmarks/charts.py``, or at the end of run.py.

SVG by hand, since its text must be text and its colours the reader's choice: light or dark, as the page is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, CHARTS = HERE / "results.md", HERE.parent / "docs" / "charts"
#: In CSS pixels: as wide as a page on a small telephone, and half a page elsewhere.
WIDTH, HEAD, ROW, BAR = 340, 30, 38, 10
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1a202c; } .title { font-weight: bold; }
rect { fill: #a0aec0; } .ours { fill: #2b6cb0; }
@media (prefers-color-scheme: dark) { text { fill: #e2e8f0; } rect { fill: #718096; } .ours { fill: #63b3ed; } }
"""


def charts(results: str) -> dict[str, str]:
    """The SVG of each chart by file name, from the text of results.md."""
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|", results, re.MULTILINE))
    kernels = {what.removesuffix(", one thread"): _number(value) for what, value in rows.items() if "GB/s" in value}
    ((copied, size),) = ((what, what.split()[3]) for what in rows if what.startswith("cp -r of"))
    seconds = {"cp -r": _number(rows[copied])}
    for method in ("int4", "int8"):
        seconds[f"ktforge convert, {method}"] = seconds["cp -r"] * _number(rows[f"ktforge convert to {method}"])
    peaks = {
        f"ktforge convert, {match[1]} of weights": _number(value)
        for what, value in rows.items()
        if (match := re.fullmatch(r"peak memory, (.+ GB) checkpoint", what))
    }
    return {
        "kernels.svg": bars("GB of bf16 weights a second, one thread", kernels, "{:.2f}"),
        "conversion.svg": bars(f"Time for {size} GB of weights", seconds, "{:.1f} s"),
        "memory.svg": bars("Peak memory", peaks, "{:.0f} MB"),
    }


def bars(title: str, values: Mapping[str, float], form: str) -> str:
    """A chart with a bar for each value below its label; ktforge's own stand out."""
    height, widest = HEAD + ROW * len(values), max(values.values())
    said = "; ".join(f"{label}: {form.format(value)}" for label, value in values.items())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">',
        f"<title>{escape(f'{title}: {said}')}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" y="14">{escape(title)}</text>',
    ]
    for number, (label, value) in enumerate(values.items()):
        top = HEAD + ROW * number
        kind = ' class="ours"' if re.search("kt-amx|ktforge", label) else ""
        lines += [
            f'<text y="{top + 13}">{escape(label)}</text>',
            f'<text x="{WIDTH}" y="{top + 13}" text-anchor="end">{form.format(value)}</text>',
            f'<rect{kind} y="{top + 18}" width="{WIDTH * value / widest:.1f}" height="{BAR}" rx="2"/>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def _number(text: str) -> float:
    return float(text.split()[0])


def draw() -> None:
    """Writes all of them."""
    CHARTS.mkdir(exist_ok=True)
    for name, svg in charts(RESULTS.read_text("utf-8")).items():
        (CHARTS / name).write_text(svg, "utf-8")


if __name__ == "__main__":
    draw()
