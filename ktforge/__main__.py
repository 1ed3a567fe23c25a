"""The door of the command line: what it needs is imported within, so that Ctrl-C is answered from the first moment."""

import sys


def main() -> None:
    """Runs ``ktforge``; :func:`ktforge.cli.main` says how it ends."""
    try:
        from ktforge.cli import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
