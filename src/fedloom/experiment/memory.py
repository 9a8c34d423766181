"""The most memory that a process has held."""

from __future__ import annotations

import sys

import torch


def most_memory(device: str) -> int:
    """Bytes: of the GPU where it trains there, else of the process as far as the system says."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # no Unix
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
