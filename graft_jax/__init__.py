"""Lossless speculative decoding in JAX and Pallas.

`SpeculativeDecoder` is what most people need. The functional layer (`decode_step`, `run`, `DraftTree`,
`verify.accept`, `sampling`) works on plain arrays inside your own jit.
"""

from graft_jax import sampling, verify
from graft_jax.config import ModelConfig, RopeConfig
from graft_jax.decode import DecodeSpec, DecodeState, decode_step, init_state, prefill_chunk, run
from graft_jax.drafters.base import Draft, Drafter, Params
from graft_jax.engine import SpeculativeDecoder
from graft_jax.methods import METHODS, Options
from graft_jax.results import Chunk, Generation, Stats
from graft_jax.tree.structure import DraftTree
from graft_jax.verify import Verdict

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Chunk",
    "DecodeSpec",
    "DecodeState",
    "Draft",
    "DraftTree",
    "Drafter",
    "Generation",
    "ModelConfig",
    "Options",
    "Params",
    "RopeConfig",
    "SpeculativeDecoder",
    "Stats",
    "Verdict",
    "decode_step",
    "init_state",
    "prefill_chunk",
    "run",
    "sampling",
    "verify",
]
