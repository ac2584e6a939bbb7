"""`python -m onnxruntime.training.utils.hooks.merge_activation_summary`."""

import sys

from onnxtrain.observe.hooks.merge_activation_summary import main

if __name__ == "__main__":
    sys.exit(main())
