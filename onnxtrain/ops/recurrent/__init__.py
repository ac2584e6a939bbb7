"""Recurrent layers of PyTorch (`torch_layers`, captured by `capture`) and of ONNX (`onnx_layers`).

Both use the definitions in `cells`, and the kernels and bodies of one direction of a layer (`direction_kernels`,
`direction_bodies`).
"""
