"""``make demo-real``: a small real model converted to INT8, RAWINT4 and INT4 by every rule, heard and measured.

Needs 1.5 GB of disk and a quarter of an hour on two cores. ``make quality`` is the same without the talk, and writes
the table of docs/quality.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics

from real_model import make

HERE = Path(__file__).parent
KTFORGE = Path(sys.executable).with_name("ktforge")
PROMPT = "What is the capital of France?"
INT4 = ["--quant-method", "int4", "--threadpool-count", "1"]
#: Names in the table → what `ktforge convert` is told beside folders.
METHODS = {
    "INT8": ["--quant-method", "int8", "--threadpool-count", "1"],
    "RAWINT4, absmax": ["--quant-method", "rawint4", "--scales", "absmax"],
    "RAWINT4, searched": ["--quant-method", "rawint4", "--scales", "searched"],
    "RAWINT4, calibrated": ["--quant-method", "rawint4", "--scales", "calibrated", "--calibration"],
    "RAWINT4, feedback": ["--quant-method", "rawint4", "--scales", "feedback", "--calibration"],
    "INT4, absmax (upstream's bytes)": [*INT4, "--scales", "absmax"],
    "INT4, searched (the default)": INT4,
    "INT4, calibrated": [*INT4, "--scales", "calibrated", "--calibration"],
    "INT4, feedback": [*INT4, "--scales", "feedback", "--calibration"],
}
#: Bits that a weight of an expert takes, its part of the scales included.
BITS = {"INT8": 8.05, "RAWINT4": 4.5, "INT4": 4.05}
#: Of the calibration text, which has nothing of the one that is measured on.
MODULES = (
    "argparse asyncio collections contextlib csv dataclasses datetime decimal difflib email functools heapq html "
    "inspect itertools json logging os pathlib pickle random re shutil socket sqlite3 statistics string subprocess "
    "textwrap threading time types unittest urllib"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "out" / "real", help="where everything goes")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens to measure on")
    parser.add_argument("--activations", default="exact", choices=["exact", "int8"], help="as ktforge eval has it")
    parser.add_argument("--kernels", choices=["kt-kernel"], help="as ktforge eval has it; of kt-amx outputs alone")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page, and say nothing")
    args = parser.parse_args()
    model, text, calibration = (args.out / name for name in ("model", "calibration.txt", "calibration.safetensors"))
    if not model.exists():
        print("making a mixture of experts of SmolLM2-135M-Instruct", flush=True)
        make(model)
    if not calibration.exists():
        text.write_text(_docstrings())
        how = ["--tokens", 32_768, "--samples", 16_384]
        _ktforge("calibrate", "--original", model, "--text", text, *how, "--output", calibration)
    folders = {}
    for number, (name, words) in enumerate(METHODS.items()):
        folders[name] = args.out / str(number)
        known = [calibration] if words[-1] == "--calibration" else []
        _ktforge("convert", "--input-path", model, "--output", folders[name], *words, *known, "--quiet")
        if args.page is None:
            print(f"\n{name}: {PROMPT}", flush=True)
            _ktforge("generate", "--model", folders[name], "--prompt", PROMPT, "--tokens", 30)
    if args.kernels:
        folders = {name: folder for name, folder in folders.items() if not name.startswith("RAWINT4")}
    converted = [word for folder in folders.values() for word in ("--converted", folder)]
    limits = ["--tokens", args.tokens, "--activations", args.activations]
    limits += ["--kernels", args.kernels] if args.kernels else []
    found = json.loads(_ktforge("eval", "--original", model, *converted, *limits, "--json", said=True))
    table = _table(found, list(folders))
    print(f"\n{table}")
    if args.page is not None:
        _replace(args.page, table, found["tokens"])


def _docstrings() -> str:
    """Pages of Python's language reference and docstrings of its library, in turn."""
    found: dict[str, None] = {}
    for module in map(import_module, MODULES.split()):
        for name in dir(module):
            text = getattr(getattr(module, name), "__doc__", None)
            if isinstance(text, str) and len(text) > 200:
                found[text] = None
    pages = [page for _, page in sorted(topics.items())]
    return "\n\n".join(text for pair in zip(found, itertools.cycle(pages), strict=False) for text in pair)


def _ktforge(*words: object, said: bool = False) -> str:
    done = subprocess.run([KTFORGE, *map(str, words)], check=True, text=True, stdout=subprocess.PIPE if said else None)
    return done.stdout or ""


def _table(found: dict, names: list[str]) -> str:
    rows = ["| | bits a weight | perplexity | divergence | of upstream's INT4 | same first choice |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    rows.append(f"| original, BF16 | 16 | {_figure(found['perplexity'], 1)} | | | |")
    scores = dict(zip(names, found["scores"], strict=True))
    upstream = scores["INT4, absmax (upstream's bytes)"]["divergence"]["value"]
    for name, score in scores.items():
        divergence, bits = score["divergence"], BITS[name.partition(",")[0]]
        digits = 5 if divergence["value"] < 0.01 else 3
        rows.append(
            f"| {name} | {bits} | {_figure(score['perplexity'], 1)} | {_figure(divergence, digits)} | "
            f"{divergence['value'] / upstream:.3g} | {100 * score['agreement']['value']:.1f} % |"
        )
    return "\n".join(rows)


def _figure(figure: dict, digits: int) -> str:
    return f"{figure['value']:.{digits}f} ± {figure['error']:.{digits}f}"


def _replace(page: Path, table: str, tokens: int) -> None:
    before, mark, rest = page.read_text().partition("<!-- table of the real model -->\n")
    _, end, after = rest.partition("<!-- end of the table -->")
    assert mark and end, f"{page} has no place for the table"
    page.write_text(
        f"{before}{mark}\n{table}\n\n{tokens:,} tokens of the sample text that comes with ktforge.\n\n{end}{after}"
    )


if __name__ == "__main__":
    main()
