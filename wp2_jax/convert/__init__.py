"""Weights in and out: files of PyTorch programs to and from our checkpoints."""
