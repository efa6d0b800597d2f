"""Strict JAX for every test: no silent promotion of dtypes or ranks; shapes of annotations are checked."""

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Not those modules whose pytrees also hold abstract shapes (models.transformer, models.cache).
CHECKED = ("models.layers", "models.rope", "tree", "retrieval", "drafters", "sampling", "verify", "decode")
jaxtyping.install_import_hook([f"graft_jax.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture
def key():
    return jax.random.key(0)
