"""The command ``tensorwire``; also ``python -m tensorwire``."""

import signal
import sys

from tensorwire._native import main as run


def main() -> None:
    """Ends the process as the native command would end."""
    # What the interpreter does with signals is not for the command nor for what it starts: Ctrl-C ends it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
