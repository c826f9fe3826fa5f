"""``python -m cufa``: see `cufa.cli`."""

import signal
import sys

from cufa.cli import interrupt_once, main

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt_once)
    sys.exit(main())
