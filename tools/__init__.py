"""Programs for those who change onnxtrain."""
