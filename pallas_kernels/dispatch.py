"""Which implementation of a kernel runs.

The choice hangs on the platform that is lowered for, not on the host's: a CPU host that lowers for a GPU gets the
GPU's kernel. A named implementation runs or raises; without a name a shape that a platform's kernel does not take
warns and uses XLA. What was chosen is on record (see `recording`).
"""

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

XLA, TRITON, TPU = "xla", "pallas-triton", "pallas-tpu"
INTERPRET = "-interpret"  # after a name: the kernel runs as Python on any platform, slowly; for tests
IMPLEMENTATIONS = (XLA, TRITON, TPU, TRITON + INTERPRET, TPU + INTERPRET)
PLATFORMS = {"cuda": TRITON, "tpu": TPU}  # all others use XLA

_record: contextvars.ContextVar[dict[str, dict[str, str]] | None] = contextvars.ContextVar("record", default=None)


@dataclasses.dataclass(frozen=True)
class Version:
    """One implementation of a kernel.

    Attributes:
        run: takes the kernel's arrays; Pallas ones also `interpret`.
        unsupported: why it does not take these shapes or dtypes; None where it does.
    """

    run: Callable[..., Any]
    unsupported: str | None = None


@contextlib.contextmanager
def recording() -> Iterator[dict[str, dict[str, str]]]:
    """Collects, while programs are traced, kernel -> platform ("default" for the rest) -> implementation."""
    record: dict[str, dict[str, str]] = {}
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def chosen_for(platform: str, record: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Kernel -> implementation on one platform, of what `recording` collected."""
    return {kernel: chosen.get(platform, chosen["default"]) for kernel, chosen in record.items()}


def platform_name() -> str:
    """The platform that programs are compiled for by default, as `PLATFORMS` names it."""
    backend = jax.default_backend()
    if backend == "gpu":
        return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
    return backend


def call(kernel: str, implementation: str | None, xla: Callable[..., Any], versions: Mapping[str, Version], *args: Any):
    """Runs the chosen implementation on `args`.

    Args:
        kernel: name, for messages and for the record.
        implementation: one of `IMPLEMENTATIONS`; None chooses by platform.
        xla: the implementation that runs anywhere.
        versions: the others by name.

    Raises:
        ValueError: the named implementation is unknown.
        NotImplementedError: it does not take these shapes or dtypes; says why.
    """
    if implementation is not None:
        check(implementation)
        _note(kernel, {"default": implementation})
        if implementation == XLA:
            return xla(*args)
        name = implementation.removesuffix(INTERPRET)
        version = versions[name]
        if version.unsupported is not None:
            raise NotImplementedError(f"{kernel}: implementation={implementation!r} {version.unsupported}")
        return version.run(*args, interpret=implementation != name)
    chosen, branches = {"default": XLA}, {}
    for platform, name in PLATFORMS.items():
        reason = versions[name].unsupported
        if reason is None:
            branches[platform] = functools.partial(versions[name].run, interpret=False)
        elif platform == platform_name():
            warnings.warn(f"{kernel}: XLA instead of {name}, which {reason}", stacklevel=3)
        chosen[platform] = name if reason is None else XLA
    _note(kernel, chosen)
    return jax.lax.platform_dependent(*args, default=xla, **branches)


def check(implementation: str | None) -> None:
    """Raises ValueError for a name that is none of `IMPLEMENTATIONS`; None passes."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{implementation=} must be one of {IMPLEMENTATIONS}, or None for the platform's own")


def _note(kernel: str, chosen: dict[str, str]) -> None:
    record = _record.get()
    if record is not None:
        record[kernel] = chosen
