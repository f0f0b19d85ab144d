"""Triton Inference Server: the model repository's other half, without the server's own module.

Owns tensors, their meaning and the way of a request through the models; leaves
`triton_python_backend_utils` to the `model.py` files, which pass it in. Invariant: nothing in
here imports torch, since a stub's interpreter has none.
"""
