"""Kernels for GPU and TPU behind functions that run anywhere; one folder each.

`api.py` is the function, `reference.py` plain JAX, `pallas_<backend>.py` a kernel, `specs.py` real shapes.
"""

from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.retrieval_lookup.api import retrieval_lookup
from pallas_kernels.topk_rows.api import topk_rows
from pallas_kernels.topm_score.api import topm_score

__all__ = ["IMPLEMENTATIONS", "retrieval_lookup", "topk_rows", "topm_score"]
