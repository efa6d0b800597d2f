"""What the kernels' tests share."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

INTERPRETED = ("pallas-triton-interpret", "pallas-tpu-interpret")


def jitted(function, **static):
    return jax.jit(functools.partial(function, **static))


class CheckedLoads:
    """Stands in for `triton.load` and notes whether every entry that is read lies inside its array."""

    def __init__(self, monkeypatch):
        self.good: list[bool] = []
        self._load = triton.load
        monkeypatch.setattr(triton, "load", self)

    def __call__(self, ref, *, mask=None, other=None):
        good = jnp.bool_(True)
        for index, size in zip(ref.transforms[-1].indices, ref.ref.shape, strict=True):
            index = jnp.asarray(index, jnp.int32)
            inside = (index >= 0) & (index < size)
            good &= (inside if mask is None else inside | ~mask).all()
        jax.debug.callback(lambda good: self.good.append(bool(good)), good)
        return self._load(ref, mask=mask, other=other)

    def assert_all_inside(self):
        jax.effects_barrier()
        assert self.good and all(self.good)
