"""GGUF files: metadata, tensors and the model configuration in them.

The metadata is parsed here and not by `gguf.GGUFReader`, which makes several objects for every token of the
vocabulary and takes seconds; block formats are decoded by the `gguf` package.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from graft_jax.io.tensors import PLAIN_DTYPES, Descriptor, PlainTensor, SourceTensor

# Value types by number: struct formats of numbers, then the two that are not numbers.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file holds: metadata values by key, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]


@dataclasses.dataclass(frozen=True)
class BlockTensor:
    """A matrix in one of ggml's block formats, decoded row by row."""

    name: str
    where: str
    kind: str
    shape: tuple[int, ...]
    descriptor: Descriptor
    offset: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        kind = GGMLQuantizationType[self.kind]
        numbers, count = GGML_QUANT_SIZES[kind]
        row = math.prod(self.shape[1:]) // numbers * count
        raw = self.descriptor.read(self.offset + start * row, (stop - start) * row)
        decode = _FAST.get(self.kind)
        numbers = decode(raw) if decode else dequantize(raw.reshape(stop - start, row), kind)
        return numbers.reshape(stop - start, *self.shape[1:])


def _halves(raw: np.ndarray) -> np.ndarray:
    """[blocks, 2] bytes as float32 [blocks, 1]."""
    return raw.copy().view(np.float16).astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes as float32 [blocks, 32]: all low halves, then all high ones."""
    out = np.empty((len(raw), 32), np.float32)
    out[:, :16] = raw & 15
    out[:, 16:] = raw >> 4
    return out


def _q4_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 18)
    out = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _halves(blocks[:, :2])
    return out


def _q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 20)
    out = _nibbles(blocks[:, 4:])
    out *= _halves(blocks[:, :2])
    out += _halves(blocks[:, 2:4])
    return out


def _q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].view(np.int8) * _halves(blocks[:, :2])


# The usual formats, for the package goes through them 16 rows at a time: three times faster, the same bits.
_FAST = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def open_file(path: Path) -> GGUFFile:
    """Reads metadata and the tensor list; numbers are read later.

    Raises:
        ValueError: the file is no little-endian GGUF of version 2 or 3, is cut off, or holds a tensor of a
            type that the `gguf` package does not decode.
    """
    descriptor = Descriptor(path)
    if descriptor.size < 24:
        raise ValueError(f"{path}: {descriptor.size} bytes are too few for a GGUF file")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError(f"{path}: is no GGUF file: it starts with {data[:4]!r}")
        parser = _Parser(path, data)
        version, tensor_count, key_count = parser.numbers("I", 1)[0], *parser.numbers("Q", 2)
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} is not supported; 2 and 3 are")
        metadata = {}
        for i in range(key_count):
            parser.reading = f"metadata key number {i + 1} of {key_count}"
            key = parser.string()
            parser.reading = f"metadata key {key!r}"
            if key in metadata:
                raise ValueError(f"{path}: metadata key {key!r} stands twice")
            metadata[key] = parser.value()
        if metadata.get("split.count", 0) not in (0, 1):
            raise ValueError(
                f"{path}: is one of {metadata['split.count']} parts; join them first (llama-gguf-split --merge)"
            )
        infos = {}
        for i in range(tensor_count):
            parser.reading = f"entry {i + 1} of {tensor_count} of the tensor list"
            name = parser.string()
            parser.reading = f"entry of tensor {name!r}"
            dimensions = parser.numbers("I", 1)[0]
            if dimensions > 4 or name in infos:
                raise ValueError(f"{path}: tensor {name!r} has {dimensions} dimensions or stands twice")
            shape = tuple(reversed(parser.numbers("Q", dimensions)))
            infos[name] = shape, parser.numbers("I", 1)[0], parser.numbers("Q", 1)[0]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path}: general.alignment={alignment!r} must be a whole number above 0")
        start = -(-parser.at // alignment) * alignment
    tensors = {name: _tensor(descriptor, start, name, *info) for name, info in infos.items()}
    return GGUFFile(path, metadata, tensors)


def _tensor(descriptor: Descriptor, start: int, name: str, shape: tuple[int, ...], number: int,
            offset: int) -> SourceTensor:  # fmt: skip
    path = descriptor.path
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"{path}: tensor {name!r} has the unknown type number {number}") from None
    numbers, count = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % numbers:
        raise ValueError(
            f"{path}: tensor {name!r} of shape {list(shape)} does not fill {kind.name} blocks of {numbers}"
        )
    size = math.prod(shape) // numbers * count
    if start + offset + size > descriptor.size:
        raise ValueError(
            f"{path}: the file is cut off: tensor {name!r} ends at byte {start + offset + size} of {descriptor.size}"
        )
    if kind.name in PLAIN_DTYPES:
        return PlainTensor(name, str(path), kind.name, shape, descriptor, start + offset)
    if not _can_decode(kind):
        raise ValueError(f"{path}: tensor {name!r} is of the type {kind.name}, which cannot be decoded")
    return BlockTensor(name, str(path), kind.name, shape, descriptor, start + offset)


@functools.cache
def _can_decode(kind: GGMLQuantizationType) -> bool:
    """Whether the `gguf` package can, found out by decoding one block."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Parser:
    """Reads values one after another; `reading` says what, for messages."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at, self.reading = path, data, 4, "the header"

    def _need(self, count: int) -> None:
        if self.at + count > len(self.data):
            raise ValueError(f"{self.path}: the file is cut off or broken in {self.reading}")

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize("<" + form) * count
        self._need(size)
        self.at += size
        return struct.unpack_from(f"<{count}{form}", self.data, self.at - size)

    def string(self) -> str:
        (length,) = self.numbers("Q", 1)
        self._need(length)
        self.at += length
        return self._decode(self.data[self.at - length : self.at])

    def _decode(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {self.reading} is not UTF-8: {error.reason}") from None

    def value(self) -> Any:
        (kind,) = self.numbers("I", 1)
        if kind != _ARRAY:
            return self._scalar(kind)
        kind, count = self.numbers("I", 1)[0], self.numbers("Q", 1)[0]
        if kind in _NUMBERS:
            return list(self.numbers(_NUMBERS[kind], count))
        if kind != _STRING:
            raise ValueError(f"{self.path}: {self.reading} is an array of the unknown value type {kind}")
        return self._strings(count)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _NUMBERS:
            raise ValueError(f"{self.path}: {self.reading} has the unknown value type {kind}")
        return self.numbers(_NUMBERS[kind], 1)[0]

    def _strings(self, count: int) -> list[str]:
        """A token list has 10^5 strings: this loop avoids a call for each."""
        self._need(8 * count)
        data, at, end, out = self.data, self.at, len(self.data), []
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                at += 8 + length
                if at > end:
                    self._need(length + end)
                out.append(data[at - length : at])
        except struct.error:
            self._need(end + 1)
        self.at = at
        try:
            return [raw.decode() for raw in out]
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {self.reading} is not UTF-8: {error.reason}") from None
