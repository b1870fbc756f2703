"""Tensors between a device, host memory and the processes of an engine.

These modules import torch, numpy and each other, and no other module of this package: `tests/gpu`
runs them on machines with PyTorch alone.
"""
