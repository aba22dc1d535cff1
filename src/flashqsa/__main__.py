"""`python -m flashqsa`: the command line."""

import sys

from flashqsa.commands.app import main

if __name__ == "__main__":
    sys.exit(main())
