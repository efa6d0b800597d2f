"""SentencePiece's `tokenizer.model`, read without that library.

The file is a protocol buffer:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from graft_jax.io.tokenizer_build import NORMAL, sentencepiece_bpe, surround

_BPE = 2


def open_file(path: Path, settings: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a Llama 2 or Vicuna checkpoint and its special tokens by role.

    Args:
        settings: tokenizer_config.json, for add_bos_token (default true), add_eos_token (default false) and
            legacy (default true: a space also goes before text that follows a special token).

    Raises:
        ValueError: the file is broken, or no SentencePiece BPE model without normalisation.
    """
    pieces, trainer, normalizer = _read(path)
    if trainer.get(3) != _BPE:
        raise ValueError(f"{path}: model_type {trainer.get(3, 1)} is not supported; {_BPE} (BPE) is")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise ValueError(f"{path}: normalisation rules and remove_extra_whitespaces are not supported")
    tokens = [token for token, _, _ in pieces]
    backend = sentencepiece_bpe(
        tokens,
        [score for _, score, _ in pieces],
        [kind for _, _, kind in pieces],
        add_prefix=bool(normalizer.get(3, 1)),
        legacy=settings.get("legacy") is not False,
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special = {role: token for role, token in roles.items() if token in tokens}
    surround(
        backend,
        special.get("bos_token") if settings.get("add_bos_token", True) else None,
        special.get("eos_token") if settings.get("add_eos_token", False) else None,
    )
    return backend, special


def _read(path: Path) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """(token, score, type) of each piece, and the trainer's and the normalizer's settings by field number."""
    pieces, trainer, normalizer = [], {}, {}
    try:
        for field, value in _fields(path.read_bytes()):
            if field == 1:
                piece = dict(_fields(value))
                score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
                pieces.append((piece[1].decode(), score, int(piece.get(3, NORMAL))))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                normalizer = dict(_fields(value))
    except (LookupError, TypeError, AttributeError, ValueError, struct.error) as error:
        raise ValueError(f"{path}: is no valid SentencePiece model ({error})") from None
    if not pieces:
        raise ValueError(f"{path}: is no valid SentencePiece model (it has no pieces)")
    return pieces, trainer, normalizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: an int, or the bytes of every other wire type."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        if at + size > len(data):
            raise ValueError("cut off")
        yield key >> 3, data[at : at + size]
        at += size
