"""Tensors in files, read a few rows at a time.

Files are read with `pread`, not mapped: pages of a mapped file count as resident memory, and a checkpoint
would be held twice while it is loaded.
"""

import dataclasses
import math
import os
import weakref
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PLAIN_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
# What a drafter's vocabulary maps may be stored as.
ALL_DTYPES = PLAIN_DTYPES | {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}


class SourceTensor(Protocol):
    """A named tensor that can hand out blocks of rows. A vector's rows are its numbers."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str:
        """The file, for messages."""
        ...

    @property
    def kind(self) -> str:
        """The stored type, as its format spells it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start ... stop - 1` as float32, float16 or bfloat16."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainTensor:
    """Numbers stored row after row, little-endian, at `offset` of an open file."""

    name: str
    where: str
    kind: str
    shape: tuple[int, ...]
    descriptor: "Descriptor"
    offset: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        dtype, width = ALL_DTYPES[self.kind], math.prod(self.shape[1:])
        raw = self.descriptor.read(
            self.offset + start * width * dtype.itemsize, (stop - start) * width * dtype.itemsize
        )
        return raw.view(dtype).reshape(stop - start, *self.shape[1:])


class Descriptor:
    """A file opened for reading at positions, by several threads at once."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._number = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._number)
        self.size = os.fstat(self._number).st_size

    def read(self, offset: int, count: int) -> np.ndarray:
        """`count` bytes at `offset` as uint8."""
        out = np.empty(count, np.uint8)
        done = 0
        while done < count:  # one call hands over at most 2 GiB
            got = os.preadv(self._number, [out.data[done:]], offset + done)
            if not got:
                raise ValueError(f"{self.path}: ends at byte {offset + done}; {count - done} more were expected")
            done += got
        return out


def to_float32(x: np.ndarray) -> np.ndarray:
    """float16, bfloat16 or float32 as float32 (bfloat16 by shifting bits: ten times faster than a cast)."""
    if x.dtype == BFLOAT16:
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Finite numbers rounded to the nearest bfloat16, ties to even."""
    if x.dtype == BFLOAT16:
        return x
    bits = to_float32(x).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    return rounded.astype(np.uint16).view(BFLOAT16)


def is_finite(x: np.ndarray) -> bool:
    """Whether no number is NaN or infinite."""
    if x.dtype == BFLOAT16:
        return not ((x.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(x).all())


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, which JAX on a CPU takes over without a copy."""
    count = math.prod(shape) * dtype.itemsize
    memory = np.empty(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count].view(dtype).reshape(shape)
