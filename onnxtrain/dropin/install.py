"""`python -m onnxruntime.training.ortmodule.torch_cpp_extensions.install`: print that there is nothing to build."""

from onnxtrain.dropin.legacy import print_nothing_to_build as build_torch_cpp_extensions

if __name__ == "__main__":
    build_torch_cpp_extensions()
