"""Strict JAX for every test: no silent promotion of dtypes or ranks; shapes of annotations are checked."""

import os
from pathlib import Path

import flax.struct
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tests share many programs: each is compiled once, also across workers and runs.
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # for what tests start
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_numpy_rank_promotion", "raise")


def _unchecked_struct(cls=None, **options):
    """`flax.struct.dataclass` whose fields are not checked: JAX also fills pytrees with shapes and placeholders."""
    made = _struct(cls, **options)
    made.__no_type_check__ = True
    return made


_struct, flax.struct.dataclass = flax.struct.dataclass, _unchecked_struct
CHECKED = ("models", "tree", "retrieval", "drafters", "sampling", "verify", "decode")
jaxtyping.install_import_hook([f"graft_jax.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture
def key():
    return jax.random.key(0)
