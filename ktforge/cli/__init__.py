"""The ``ktforge`` command. One short file a command; each parses its options and calls the library."""

from __future__ import annotations

import gc
import os
import sys

import typer

from ktforge.cli.commands import (
    calibrate,
    compare,
    convert,
    dequantize,
    evaluate,
    generate,
    init,
    inspect,
    isa,
    moe_to_bf16,
    new_plugin,
    plan,
    plugins,
    run,
    schema,
    verify,
)
from ktforge.cli.options import log, logger, takes_common_options
from ktforge.cli.streams import give_up, prepare
from ktforge.cli.wording import Command, Group

app = typer.Typer(
    cls=Group,
    help="Turns Hugging Face MoE checkpoints into the weight files that CPU inference engines read.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS = (
    run, convert, moe_to_bf16, dequantize, inspect, verify, compare, generate, evaluate, calibrate, init, plan, plugins,
    new_plugin, schema, isa,
)  # fmt: skip
for module in COMMANDS:
    app.command(module.NAME, cls=Command)(takes_common_options(module.command))


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"ktforge {installed('ktforge')}")
        raise typer.Exit


def main() -> None:
    """Exit codes: 0 done, 1 refused or failed, 2 the command line is wrong."""
    from ktforge.errors import KtforgeError

    # numpy starts a thread a core, for algebra that ktforge never does and that a plugin does in every worker.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A plan is up to two million objects and nothing of it is garbage; to look through it again and again takes longer
    # than to make it.
    gc.set_threshold(2_000_000, 20, 20)
    prepare()
    log()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KtforgeError as error:
        for problem in error.problems:
            logger.error("%s", problem)
        sys.exit(1)
    except BrokenPipeError:  # such as `ktforge plan … | head`
        give_up()
        sys.exit(1)
    except OSError as error:  # such as standard output on a full disk
        give_up()
        what = error.filename or ("the output of this command" if _has_folder() else "the current directory is gone")
        logger.error("%s: %s", what, error.strerror)
        sys.exit(1)
    except Exception as error:
        if isinstance(error, RuntimeError) and "start new thread" in str(error):  # which has no class of its own
            logger.error("no thread can be started: the system allows this user or container no more (ulimit -u)")
        else:
            _say_unexpected(error)
        sys.exit(1)


def _has_folder() -> bool:
    """Whether the current directory still exists."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _say_unexpected(error: Exception) -> None:
    """A fault of ktforge's own in one sentence; ``-v`` shows where it was."""
    import traceback

    logger.debug("a fault of ktforge's own", exc_info=error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(place.filename)}, line {place.lineno}"
    logger.error(
        "ktforge met what it did not expect, %s: %s (%s): please report it, with what the same command says with -v",
        type(error).__name__, error, where,
    )  # fmt: skip
