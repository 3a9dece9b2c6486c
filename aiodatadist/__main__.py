"""``python -m aiodatadist``: the same as the console script ``aiodatadist``."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
