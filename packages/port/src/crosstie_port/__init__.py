"""Crosstie for who ports: kernels, graph capture, CUDA source, checkpoints and numbers, from NVIDIA to AMD."""
