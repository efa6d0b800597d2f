"""Strict JAX for every test: no silent promotion of dtypes or ranks; shapes of annotations are checked."""

import functools
import gc
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
MAPPINGS = 20_000  # Linux gives a process 65,530
CHECKED = ("models", "tree", "retrieval", "drafters", "sampling", "verify", "decode")
jaxtyping.install_import_hook([f"graft_jax.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def few_mappings(request):
    """Frees a module's programs behind it: each holds memory mappings, and a process that runs out of them crashes."""
    yield
    if mappings() > MAPPINGS:
        for value in vars(request.module).values():
            if isinstance(value, functools._lru_cache_wrapper):  # decoders that the module's tests share
                value.cache_clear()
        jax.clear_caches()
        gc.collect()


def mappings() -> int:
    """Memory mappings of this process; 0 where they cannot be counted."""
    maps = Path("/proc/self/maps")
    return len(maps.read_text().splitlines()) if maps.exists() else 0


@pytest.fixture
def key():
    return jax.random.key(0)
