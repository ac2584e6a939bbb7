"""`python -m onnxtrain`: the command line."""

import sys

from onnxtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
