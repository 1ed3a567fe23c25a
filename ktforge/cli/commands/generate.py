from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktforge.cli.hf import Activations, Kernels, Original, TrustRemoteCode, Workers
from ktforge.cli.options import Block, FollowLinks, PluginFiles, installed

NAME = "generate"


def command(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="DIR", help="The converted checkpoint.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="TEXT", help="What the model goes on from.")],
    original: Original = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=1, help="Most tokens to say.")] = 200,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave the prompt as it is, even if there is a chat template.")
    ] = False,
    activations: Activations = "exact",
    kernels: Kernels = None,
    cache: Annotated[
        str, typer.Option("--cache", metavar="SIZE", help="Most memory for experts that were read, such as 16GB.")
    ] = "4GB",
    workers: Workers = None,
    trust_remote_code: TrustRemoteCode = False,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Let a converted checkpoint speak: its experts are read as they are needed, and no GPU is.

    The likeliest token is taken each time. What is not an expert's comes from the original, which the output's manifest
    names. Needs the extra ktforge[hf].
    """
    from ktforge.cli.hf import keep_stdout, layers_counted
    from ktforge.cli.progress import size_of
    from ktforge.hf.engine import check_kernels
    from ktforge.hf.speaking import speak

    check_kernels(kernels, activations)
    if kernels:
        keep_stdout()
    limit = size_of("--cache", cache)
    with layers_counted("loading"):
        speak(
            model, prompt, lambda text: typer.echo(text, nl=False), original=original, tokens=tokens, chat=not raw,
            integers=activations == "int8", engine=kernels is not None, cache=limit, workers=workers,
            registry=installed(block, plugins), follow_links=follow_links, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    typer.echo()
