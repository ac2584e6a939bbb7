"""Makes `onnxruntime.training` importable beside the stock onnxruntime package, so that old scripts run unchanged.

    import onnxtrain.dropin
    from onnxruntime.training.ortmodule import ORTModule

or, without touching the script, `python -m onnxtrain run script.py ...`. `import onnxruntime` stays the stock package.
The modules stand in `training/`, under the names that they had.
"""

from onnxtrain.dropin.finder import install

install()
