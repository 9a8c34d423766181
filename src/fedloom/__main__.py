"""``python -m fedloom`` is ``fedloom``; Ctrl-C is quiet from the first moment on."""

import sys


def main() -> None:
    """Start the command, whose import takes a moment."""
    try:
        from fedloom.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)


if __name__ == "__main__":  # worker processes import this module again and must not start the command again
    main()
