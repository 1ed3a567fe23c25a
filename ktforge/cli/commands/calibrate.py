from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktforge.cli.hf import Context, MemoryLimit, TrustRemoteCode, Workers
from ktforge.cli.options import AsJson, Block, FollowLinks, PluginFiles, installed
from ktforge.cli.table import show_json, show_rows

NAME = "calibrate"


def command(
    original: Annotated[
        Path, typer.Option("--original", metavar="DIR", help="The checkpoint that is to be converted.")
    ],
    texts: Annotated[
        list[Path], typer.Option("--text", metavar="FILE", help="A text in UTF-8; can be given several times.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write, such as calibration.safetensors.")
    ],
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=16, help="Read so many tokens of the texts.")
    ] = 100_000,
    context: Context = 512,
    samples: Annotated[
        int,
        typer.Option(
            "--samples", metavar="N", min=0, help="Keep the inputs of each layer for so many tokens, for feedback."
        ),
    ] = 0,
    memory_limit: MemoryLimit = "8GB",
    as_json: AsJson = False,
    workers: Workers = None,
    trust_remote_code: TrustRemoteCode = False,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Collect what flows into the experts on a text of yours, so that INT4 can spare what matters.

    The model computes once through all layers, one in memory at a time. Published imatrix files of llama.cpp do the
    same service without a pass of your own. Needs the extra ktforge[hf].
    """
    from ktforge.cli.hf import layers_counted
    from ktforge.cli.progress import size_of
    from ktforge.hf.calibration import calibrate
    from ktforge.text import counted

    limit = size_of("--memory-limit", memory_limit)
    with layers_counted("calibrating") as progress:
        found = calibrate(
            original, texts, output, tokens=tokens, context=context, samples=samples, memory_limit=limit,
            workers=workers, registry=installed(block, plugins), follow_links=follow_links, progress=progress,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    layers, experts = len(found.routed), sum(map(len, found.routed.values()))
    if as_json:
        show_json(
            {
                "file": str(found.path), "tokens": found.tokens, "layers": layers, "experts": experts,
                "never_routed": found.never, "seldom_routed": found.seldom,
                "routed": {str(layer): counts.tolist() for layer, counts in found.routed.items()},
            }
        )  # fmt: skip
        return
    rows = [
        ("written", str(found.path)),
        ("text", counted(found.tokens, "token")),
        ("experts", f"{counted(experts, 'expert')} in {counted(layers, 'layer')}"),
    ]
    if found.never or found.seldom:
        rows.append(
            ("few tokens", f"{found.never:,} experts got none and {found.seldom:,} fewer than 32: what is known of "
             "their layer stands in for them; more text would tell more")
        )  # fmt: skip
    show_rows(rows)
