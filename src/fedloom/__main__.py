"""``python -m fedloom`` is ``fedloom``."""

from fedloom.cli import main

if __name__ == "__main__":  # worker processes import this module again and must not start the command again
    main()
