"""The door of the command line: what it needs is imported within, so that Ctrl-C is answered from the first moment."""

import sys


def main() -> None:
    """Runs ``ktforge``: :func:`ktforge.cli.main`, and exit code 130 if it is interrupted."""
    try:
        from ktforge.cli import main as command

        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
