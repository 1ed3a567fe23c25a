"""What generate, eval and calibrate have in common: options, and how far a pass over all layers is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ktforge.cli.options import is_quiet

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds between two lines of progress.
LINE_EVERY = 10.0

Original = Annotated[Path | None, typer.Option("--original", metavar="DIR", help="The checkpoint that was converted.")]
Texts = Annotated[
    list[Path] | None, typer.Option("--text", metavar="FILE", help="A text in UTF-8; can be given several times.")
]
Context = Annotated[
    int, typer.Option("--context", metavar="N", min=16, help="Tokens that the model sees at once, as one sequence.")
]
Activations = Annotated[
    Literal["exact", "int8"],
    typer.Option("--activations", help="exact: with the weights as they are read back; int8: as the engine computes."),
]
Kernels = Annotated[
    Literal["kt-kernel"] | None,
    typer.Option("--kernels", help="Compute with KTransformers' own kernels, where the CPU has AVX-512 or AMX."),
]
MemoryLimit = Annotated[
    str, typer.Option("--memory-limit", metavar="SIZE", help="Most memory for activations, such as 8GB.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, help="Threads that read experts.  [default: the cores this process may use]"
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let transformers run code that the checkpoint's folder brings.")
]


def keep_stdout() -> None:
    """Keeps standard output for what a command says: kt-kernel prints what it does there, which goes to stderr now."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


@contextmanager
def layers_counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """What is called with the number of layers that are done and of all; it says so now and then on stderr."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    began = last = time.monotonic()

    def progress(done: int, steps: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not is_quiet() and (now - last >= LINE_EVERY or done == steps):
            left = (now - began) / done * (steps - done)
            print(f"{what}: {done:,} of {steps:,} layers, {left:,.0f} s left", file=sys.stderr, flush=True)
            last = now

    yield progress
