"""Strict JAX for every test: no silent promotion of dtypes or ranks; shapes of annotations are checked."""

import flax.struct
import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
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
