"""What the parser of the command line says, in words of ktforge's own."""

from __future__ import annotations

import re

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from ktforge.text import nearest

#: What the parser calls every mistake in a command line; it has no name of its own in typer.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
#: What pydantic, which typer reads values with, says of them → what a value has to be.
_WANTED = (
    (r"Input should be a valid integer.*", "it must be a whole number"),
    (r"Input should be a valid number.*", "it must be a number"),
    (r"Input should be greater than or equal to (\S+)", r"it must be at least \1"),
    (r"Input should be less than or equal to (\S+)", r"it must be at most \1"),
)


class Command(TyperCommand):
    """A command whose mistakes are said in plain words, all missing options at once."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            if type(error).__name__ == "MissingParameter" and (missing := self._missing(given)):
                raise UsageError(f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} missing", ctx) from None
            if type(error).__name__ == "NoSuchOption":
                known = [name for p in self.params for name in (*p.opts, *p.secondary_opts)]
                word = vars(error)["option_name"]
                raise UsageError(f"there is no option {word}{nearest(word, known)}", ctx) from None
            vars(error)["message"] = plain(str(vars(error)["message"]))
            raise

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def _missing(self, args: list[str]) -> list[str]:
        """What has to be given and is not, as the user would write it."""
        words = {word.partition("=")[0] for word in args}
        return [
            p.opts[0] if isinstance(p, TyperOption) else str(p.metavar)
            for p in self.params
            if p.required and (isinstance(p, TyperArgument) or not words & set(p.opts))
        ]


class Group(TyperGroup):
    """The list of commands, each with its whole summary on as many lines as it takes."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            if type(error).__name__ == "NoSuchOption":
                word = vars(error)["option_name"]
                near = nearest(word, [name for p in self.params for name in p.opts])
                more = near or "; options of a command go after it"
                raise UsageError(f"there is no option {word} before the command{more}", ctx) from None
            raise

    def format_commands(self, ctx: typer.Context, formatter: typer.core._click.HelpFormatter) -> None:  # type: ignore[override]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(command.help or "")) for name, command in self.commands.items()])


def plain(message: str) -> str:
    """A sentence about a value, without the library's own words."""
    message = message.removeprefix("Value error, ")
    for pattern, words in _WANTED:
        message = re.sub(pattern, words, message)
    match = re.fullmatch(r"'(.*)' is not one of (.*?)\.?", message)
    if match is None:
        return message
    known = [word.strip(" '") for word in match[2].split(",")]
    return f"there is no {match[1]!r}{nearest(match[1].lower(), known)}; there are {', '.join(known)}"


def _summary(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())
