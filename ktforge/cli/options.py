"""Options that several commands share."""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ktforge.errors import PluginError
from ktforge.text import printable

if TYPE_CHECKING:
    from ktforge.contract.registry import Registry

PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the file, such as layout.threadpool_count=4."),
]
InputPath = Annotated[Path, typer.Option("--input-path", metavar="DIR", help="The checkpoint's folder.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's folder.")]
Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="The folder to write.")]
FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links", help="Follow symbolic links of any file out of the checkpoint; those of weights always are."
    ),
]
Block = Annotated[
    list[str] | None,
    typer.Option(
        "--block", metavar="NAME", help="Turn a plugin off (its name in ktforge plugins); also KTFORGE_BLOCK=NAME,NAME."
    ),
]
PluginFiles = Annotated[
    list[Path] | None, typer.Option("--plugin", metavar="FILE.PY", help="Add a plugin that is not installed.")
]


@dataclass(frozen=True)
class RunOptions:
    """What every command that writes an output takes, beside what it converts; see :func:`takes_run_options`."""

    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the weights in an output folder that has some.")
    ] = False
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, max=1024, help="Threads that convert.  [default: the cores this process may use]"
        ),
    ] = None
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory to work on at once, such as 2GB.")
    ] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an unfinished output instead of going on with it.")
    ] = False
    verify: Annotated[bool, typer.Option("--verify", help="Compare the hashes of what an unfinished output holds.")] = (
        False
    )


@dataclass(frozen=True)
class CommonOptions:
    """What every command takes; see :func:`takes_common_options`."""

    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what is done on the way, and by which code.")
    ] = False


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`RunOptions`, which reach it as its parameter ``options``."""

    def called(given: dict[str, Any]) -> None:
        run = {field.name: given.pop(field.name) for field in fields(RunOptions)}
        command(**given, options=RunOptions(**run))

    return _taking(command, RunOptions, called)


def takes_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`CommonOptions`, which are carried out before it begins."""

    def called(given: dict[str, Any]) -> None:
        log(verbose=given.pop("verbose"))
        try:
            command(**given)
        except SystemExit as error:  # typer's own exits are other exceptions
            raise PluginError(f"code of a plugin ended the command with sys.exit({error.code!r})") from error

    return _taking(command, CommonOptions, called)


def _taking(
    command: Callable[..., None], shared: type[Any], called: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """``called`` with all that is given on the command line, whose signature is that of ``command`` with the fields of
    ``shared`` behind it."""

    def with_options(**given: Any) -> None:
        called(given)

    # typer reads the command line from a signature.
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[n]) for n, p in inspect.signature(command).parameters.items() if n != "options"]
    hints = get_type_hints(shared, include_extras=True)
    more = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(shared)
    ]
    with_options.__doc__ = command.__doc__
    with_options.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
    return with_options


def log(*, verbose: bool) -> None:
    """Shows what ktforge and its plugins log under ``ktforge`` on stderr: warnings, and all else if ``verbose``."""
    logger = logging.getLogger("ktforge")
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    if not any(isinstance(handler, _Sentences) for handler in logger.handlers):
        logger.addHandler(_Sentences())


class _Sentences(logging.Handler):
    """``warning: …`` on stderr, with nothing in it that would steer a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(printable(f"{record.levelname.lower()}: {record.getMessage()}"), file=sys.stderr)
            if record.exc_info:
                traceback.print_exception(record.exc_info[1])
        except Exception:  # a message that does not fit its arguments must not end a conversion
            self.handleError(record)


def installed(block: list[str] | None, plugins: list[Path] | None) -> Registry:
    """The registry that ``--block`` and ``--plugin`` ask for. Raises PluginError, ConfigError."""
    from ktforge.contract.registry import Registry, load_file

    registry = Registry.installed(blocked=block or ())
    for path in plugins or ():
        registry.add(load_file(path), name=str(path))
    return registry
