"""Tensors between a device, host memory and the processes of an engine.

These modules import torch, numpy and each other, and nothing else of this package: `tests/gpu` runs
them on machines that have no more than PyTorch.
"""
