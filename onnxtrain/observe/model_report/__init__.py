"""The page of `onnxtrain report`: one HTML file with everything in it."""
