"""Options that several commands share."""

from __future__ import annotations

import inspect
import logging
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ktforge.errors import ConfigError, PluginError
from ktforge.text import printable, shortened

if TYPE_CHECKING:
    from ktforge.contract.registry import Registry

logger = logging.getLogger("ktforge")

PipelineFile = Annotated[Path, typer.Argument(metavar="PIPELINE.YAML", help="The pipeline file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value of the pipeline file, such as layout.threadpool_count=4."
    ),
]
InputPath = Annotated[Path, typer.Option("--input-path", "-i", metavar="DIR", help="The checkpoint's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint's folder.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write.")]
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
            "--workers",
            metavar="N",
            min=1,
            max=1024,
            help="Threads that convert.  [default: the cores this process may use]",
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
    verify_output: Annotated[
        bool,
        typer.Option("--verify-output", help="Read the output back from the disk, and look at it as `verify` does."),
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False
    as_json: AsJson = False


@dataclass(frozen=True)
class CommonOptions:
    """What every command takes; see :func:`takes_common_options`."""

    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what is done on the way, and by which code.")
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing on the way: no progress, no warnings, no summary.")
    ] = False
    log_file: Annotated[
        Path | None,
        typer.Option("--log-file", metavar="FILE", help="Add all that -v says, and every error, to a file with times."),
    ] = None


def takes_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`RunOptions`, which reach it as its parameter ``options``."""

    def called(given: dict[str, Any]) -> None:
        run = {field.name: given.pop(field.name) for field in fields(RunOptions)}
        command(**given, options=RunOptions(**run))

    return _taking(command, RunOptions, called)


def takes_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`CommonOptions`, which are carried out before it begins."""

    def called(given: dict[str, Any]) -> None:
        log(**{field.name: given.pop(field.name) for field in fields(CommonOptions)})
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


def log(*, verbose: bool = False, quiet: bool = False, log_file: Path | None = None) -> None:
    """Shows what ktforge and its plugins log under ``ktforge`` on stderr: warnings, all else if ``verbose``, only
    errors if ``quiet``; and adds all of it to ``log_file``. Raises ConfigError if that cannot be written."""
    if verbose and quiet:
        raise typer.BadParameter("--verbose and --quiet contradict each other: give one of them")
    for handler in list(logger.handlers):
        if isinstance(handler, _Sentences | logging.FileHandler):
            logger.removeHandler(handler)
            handler.close()
    shown = logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING
    logger.addHandler(_Sentences(shown))
    logger.setLevel(shown)
    if log_file is not None:
        try:
            kept = _LogFile(log_file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the log file {log_file} cannot be written: {error.strerror}") from error
        kept.setFormatter(_Line("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(kept)
        logger.setLevel(logging.DEBUG)
        logger.debug("%s", shlex.join(["ktforge", *sys.argv[1:]]))


def is_quiet() -> bool:
    """Whether ``--quiet`` was given."""
    return any(isinstance(handler, _Sentences) and handler.level > logging.WARNING for handler in logger.handlers)


class _LogFile(logging.FileHandler):
    """Gives up, with a warning, where the file cannot be written any more, such as on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        logger.removeHandler(self)
        with suppress(OSError):  # what it could not write before
            self.close()
        logger.warning("the log file %s ends here, as it cannot be written: %s", self.baseFilename, error.strerror)


class _Line(logging.Formatter):
    """A line of a log file, with nothing in it that would begin another; a traceback keeps its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class _Sentences(logging.Handler):
    """``warning: …`` on stderr, with nothing in it that would steer a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(shortened(printable(f"{record.levelname.lower()}: {record.getMessage()}")), file=sys.stderr)
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
