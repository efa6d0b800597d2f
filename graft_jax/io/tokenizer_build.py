"""Tokenizers from the token lists of GGUF metadata and SentencePiece models."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Token types, the same numbers in GGUF and SentencePiece.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_CONTRACTIONS + r"\p{N}{1,3}" + _REST)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_CONTRACTIONS + r"\p{N}" + _REST)


# tokenizer.ggml.pre -> (how text is cut before merging, NFC first, whole words skip the merges, first token)
_PRE = {
    "default": (_gpt2, False, False, False),
    "gpt-2": (_gpt2, False, False, False),
    "smollm": (_smollm, False, False, False),
    "llama-bpe": (_llama3, False, True, True),
    "llama3": (_llama3, False, True, True),
    "qwen2": (_qwen2, True, False, False),
    "deepseek-r1-qwen": (_qwen2, True, False, False),
}


def from_gguf(metadata: Mapping[str, Any], where: str) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer in GGUF metadata and its special tokens' texts by role.

    Raises:
        ValueError: the kind of tokenizer is not supported, or a key is missing or broken.
    """
    model = metadata["tokenizer.ggml.model"]
    tokens = _list(metadata, "tokens", str, where)
    types = _list(metadata, "token_type", int, where, len(tokens))
    special = {}
    for role, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise ValueError(f"{where}: tokenizer.ggml.{key}_token_id={token!r} is none of the {len(tokens)} tokens")
        special[role] = tokens[token]
    if model == "llama":
        scores = _list(metadata, "scores", float, where, len(tokens))
        prefix = _flag(metadata, "add_space_prefix", True, where)
        backend, first = sentencepiece_bpe(tokens, scores, types, prefix), True
    elif model == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        if pre not in _PRE:
            raise ValueError(f"{where}: tokenizer.ggml.pre {pre!r} is not supported; use one of {', '.join(_PRE)}")
        make_pre, nfc, ignore_merges, first = _PRE[pre]
        merges = _merges(metadata, where)
        backend = byte_level_bpe(tokens, merges, types, ignore_merges, where)
        backend.pre_tokenizer = make_pre()
        if nfc:
            backend.normalizer = normalizers.NFC()
    else:
        raise ValueError(f"{where}: tokenizer.ggml.model {model!r} is not supported; 'gpt2' and 'llama' are")
    surround(
        backend,
        special.get("bos_token") if _flag(metadata, "add_bos_token", first, where) else None,
        special.get("eos_token") if _flag(metadata, "add_eos_token", False, where) else None,
    )
    return backend, special


def _list(metadata: Mapping[str, Any], name: str, kind: type, where: str, length: int | None = None) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise ValueError(f"{where}: {key} must be a list of {kind.__name__}, got {str(values)[:60]}")
    if length is not None and len(values) != length:
        raise ValueError(f"{where}: {key} has {len(values)} entries for {length} tokens")
    return values


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    merges = []
    for merge in _list(metadata, "merges", str, where):
        left, space, right = merge.partition(" ")
        if not space:
            raise ValueError(f"{where}: tokenizer.ggml.merges holds {merge!r}, which is no pair of tokens")
        merges.append((left, right))
    return merges


def _flag(metadata: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: tokenizer.ggml.{name}={value!r} must be true or false")
    return value


def byte_level_bpe(
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    types: Sequence[int],
    ignore_merges: bool,
    where: str,
) -> Tokenizer:
    """GPT-2's scheme: bytes as printable characters, merged in the order of `merges`."""
    # Entries of the type "unused" only pad the embedding; they are no tokens.
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind != UNUSED}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{where}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    backend = Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, tokens, types)
    return backend


def _add_special(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    control = [token for token, kind in zip(tokens, types) if kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    defined = [token for token, kind in zip(tokens, types) if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])


def sentencepiece_bpe(
    tokens: list[str], scores: Sequence[float], types: Sequence[int], add_prefix: bool, legacy: bool = True
) -> Tokenizer:
    """SentencePiece's BPE with byte fallback, as Llama 2 and Vicuna use it.

    SentencePiece merges the neighbours whose union has the best score; as a list of merges that is every
    split of every piece into two others, ordered by the piece's score.

    Args:
        tokens: by id.
        scores: by id; merging prefers high ones.
        types: by id, see above.
        add_prefix: a space is put before a text.
        legacy: and also before each piece of text that follows a special token, as SentencePiece does.
    """
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind != UNUSED}
    ranked = []
    for piece, i in vocabulary.items():
        if types[i] not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right))
    ranked.sort()
    merges = [(tokens[left], tokens[right]) for _, left, right in ranked]
    unknown = next((token for token, kind in zip(tokens, types) if kind == UNKNOWN), None)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    if add_prefix and not legacy:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepend = [normalizers.Prepend("▁")] if add_prefix else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    _add_special(backend, tokens, types)
    return backend


def surround(backend: Tokenizer, first: str | None, last: str | None) -> None:
    """Has `encode` put a first and a last token around a text."""
    found = [token for token in (first, last) if token is not None]
    if found:
        pattern = [*([first] if first else []), "$A", *([last] if last else [])]
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(found)]
        backend.post_processor = processors.TemplateProcessing(single=" ".join(pattern), pair=None, special_tokens=ids)
