"""`python -m onnxruntime.training.ortmodule.torch_cpp_extensions.install`: says that nothing is to be built."""

from onnxtrain.dropin.legacy import say_that_nothing_is_built

if __name__ == "__main__":
    say_that_nothing_is_built()
