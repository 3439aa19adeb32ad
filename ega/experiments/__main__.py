"`python -m ega.experiments` is `ega-paper`."

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
