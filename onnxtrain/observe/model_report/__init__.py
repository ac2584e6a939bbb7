"""The page of `onnxtrain report`: one self-contained HTML file."""
