"""The bare matrix products of a program: which they are, and a program that does them and nothing else."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from graft_jax.bench.timing import looped

_LOOPS = ("while", "cond")  # how often their products run is not known before they do


@dataclasses.dataclass(frozen=True)
class Product:
    """A `dot_general`: shapes and dtypes of both arguments, contracting and batch axes, dtype of the result."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    axes: Any
    precision: Any
    out: str

    @property
    def flops(self) -> int:
        (left, right), (_, (_, batch)) = self.shapes, self.axes
        free = [size for axis, size in enumerate(right) if axis not in (*self.axes[0][1], *batch)]
        return 2 * math.prod(left) * math.prod(free)

    def run(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            a, b, self.axes, precision=self.precision, preferred_element_type=jnp.dtype(self.out)
        )


def of(function: Callable[..., Any], *args: Any) -> collections.Counter[Product]:
    """How often a program does each product; sums written as products with a vector are none.

    What `jax.checkpoint` makes a second time in the backward pass counts too.

    Args:
        args: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: a product stands in a loop or branch of which nobody can say how often it runs.
    """
    found: collections.Counter[Product] = collections.Counter()
    _collect(jax.make_jaxpr(function)(*args).jaxpr, 1, found)
    return found


def _collect(jaxpr: Any, times: int, found: collections.Counter[Product]) -> None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            a, b = (var.aval for var in eqn.invars)
            axes = jax.tree.map(tuple, eqn.params["dimension_numbers"], is_leaf=lambda x: _flat(x))
            key = Product(
                (a.shape, b.shape), (str(a.dtype), str(b.dtype)), axes, eqn.params["precision"],
                str(eqn.outvars[0].aval.dtype),
            )  # fmt: skip
            if not _is_sum(key):
                found[key] += times
            continue
        inner: collections.Counter[Product] = collections.Counter()
        for part in _jaxprs(eqn.params):
            _collect(part, times * (eqn.params["length"] if name == "scan" else 1), inner)
        if name in _LOOPS and inner:
            raise ValueError(f"a {name} holds products: how often they run is not known")
        found.update(inner)


def _is_sum(product: Product) -> bool:
    """Whether one argument has nothing but contracted and batch axes."""
    pairs = zip(product.shapes, *product.axes)
    return any(len(shape) == len(contracted) + len(batch) for shape, contracted, batch in pairs)


def _flat(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all(isinstance(i, int) for i in x)


def _jaxprs(value: Any) -> Iterator[Any]:
    """Programs among an equation's parameters."""
    if isinstance(value, (jax.extend.core.ClosedJaxpr,)):
        yield value.jaxpr
    elif isinstance(value, jax.extend.core.Jaxpr):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _jaxprs(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _jaxprs(part)


def program(products: collections.Counter[Product]) -> Callable[[], jax.Array]:
    """Runs each product as often as counted, on random arguments, row by row in memory."""
    shapes = sorted({pair for product in products for pair in zip(product.shapes, product.dtypes)})
    held = {
        (shape, dtype): jax.random.normal(jax.random.key(i), shape, jnp.dtype(dtype))
        for i, (shape, dtype) in enumerate(shapes)
    }

    @jax.jit
    def run(held):
        seen = [
            looped(product.run, count)(*(held[pair] for pair in zip(product.shapes, product.dtypes)))
            for product, count in products.items()
        ]
        return jnp.stack(seen).sum()

    # Pairs cannot be keys of a pytree that JAX sorts by.
    return lambda: run(held)
