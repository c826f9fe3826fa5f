"""``python -m cufa``: see `cufa.cli`."""

import sys

from cufa.cli import main

if __name__ == "__main__":
    sys.exit(main())
