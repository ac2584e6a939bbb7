"""Make `onnxruntime.training` importable with the stock onnxruntime package, to run existing scripts unchanged.

    import onnxtrain.dropin
    from onnxruntime.training.ortmodule import ORTModule

Without changing the script: `python -m onnxtrain run script.py ...`. `import onnxruntime` still imports the stock
package. `names.py` lists the modules of `onnxruntime.training`.
"""

from onnxtrain.dropin.finder import install

install()
