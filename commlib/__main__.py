"""`python -m commlib`: the same as the command `commlib`."""

import sys

from commlib.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
