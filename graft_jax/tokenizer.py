"""Text to token ids and back, over the `tokenizers` library: no torch, no transformers."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from graft_jax.chat import NAMED_TEMPLATES, ChatTemplate
from graft_jax.io import sentencepiece, tokenizer_build
from graft_jax.io.safetensors import parse_json

# Tokens that end a turn or a text in some chat format; a tokenizer that has one stops at it.
END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
)  # fmt: skip
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A tokenizer with the chat template and the stop tokens of its checkpoint.

    Args:
        backend: the tokenizer proper.
        special: texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, as far as they exist.
        chat_template: Jinja source or a name from `chat.NAMED_TEMPLATES`; None if there is none.
        where: the file it comes from, for messages.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[str, str], chat_template: str | None,
                 where: str):  # fmt: skip
        backend.no_padding()
        backend.no_truncation()
        self.backend, self.special, self.where = backend, dict(special), where
        self._source, self._template = chat_template, None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.num_tokens: int = max(vocabulary.values(), default=-1) + 1
        ends = [special["eos_token"]] if "eos_token" in special else []
        added = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(added.values())
        ends += [token for token in END_TOKENS if token in added]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(vocabulary[end] for end in ends if end in vocabulary))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str) -> "Tokenizer | None":
        """The tokenizer in GGUF metadata; None if there is none.

        Raises:
            ValueError: its kind is not supported, or its keys are broken.
        """
        if "tokenizer.ggml.model" not in metadata:
            return None
        backend, special = tokenizer_build.from_gguf(metadata, where)
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise ValueError(f"{where}: tokenizer.chat_template must be a text, got a {type(template).__name__}")
        return cls(backend, special, template, where)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face folder: tokenizer.json, else tokenizer.model; None without either.

        Raises:
            ValueError: a file is broken; names it.
        """
        source, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
        settings = _read_json(folder / "tokenizer_config.json")
        special = {}
        for name in _SPECIAL_NAMES:
            value = settings.get(name, _read_json(folder / "special_tokens_map.json").get(name))
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                special[name] = value
        if source.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(source))
            except Exception as error:  # the library raises plain Exception
                raise ValueError(f"{source}: is no valid tokenizer: {_first_line(error)}") from None
        elif pieces.is_file():
            backend, found = sentencepiece.open_file(pieces, settings)
            special = found | special
        else:
            return None
        return cls(backend, special, _folder_template(folder, settings), str(folder))

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which `from_folder` and transformers read."""
        self.backend.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        if self._source is not None:
            settings["chat_template"] = NAMED_TEMPLATES.get(self._source, self._source)
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same tokenizer with another chat template: Jinja source or a name such as "vicuna"."""
        return Tokenizer(self.backend, self.special, template, self.where)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. `add_special_tokens` adds what the tokenizer puts around a text, e.g. a first token.

        Raises:
            ValueError: `text` is no text, or holds half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={text!r} must be a str, got a {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text holds the lone surrogate {text[error.start]!r} at position {error.start}, which is no character"
            ) from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._source is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_args: Any
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: objects with "role" and "content".
            add_generation_prompt: end with the header of the assistant's turn.
            template_args: variables of the template, e.g. `enable_thinking=False`.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt, **template_args)
        return self.encode(text, add_special_tokens=False)  # the template writes them out

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_args: Any
    ) -> str:
        """The text that `apply_chat_template` encodes."""
        if self._source is None:
            raise ValueError(
                f"{self.where}: the checkpoint has no chat template; give a plain text as prompt, or name a "
                f"template ({', '.join(NAMED_TEMPLATES)})"
            )
        if self._template is None:
            self._template = ChatTemplate(self._source, self.where)
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            **({"bos_token": ""} | self.special),
            **template_args,
        )

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """An incremental decoder, for one generation."""
        return TextStream(self, skip_special_tokens)


class TextStream:
    """Turns ids into text as they come; what it gives, put together, equals `decode` of all ids.

    Text is held back while it may still change: at an incomplete UTF-8 sequence, and within a run of
    SentencePiece byte tokens, of which all become U+FFFD if the run turns out invalid.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Ids of the last emitted piece, as context, then those not emitted yet. Decoding starts at the
        # context, for a decoder treats the very first token differently (it drops a leading space).
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that is now certain (often "")."""
        return "".join(self._push_one(int(token)) for token in ids)

    def flush(self) -> str:
        """Returns what was held back. The stream is then at its end."""
        return self._take()

    def _push_one(self, token: int) -> str:
        if token in self._skipped:  # as if it were not there: it does not even end a run of byte tokens
            return ""
        self._ids.append(token)
        text = self._tokenizer.backend.id_to_token(token) or ""
        if re.fullmatch("<0x[0-9A-F]{2}>", text):
            return ""
        return self._take(hold_back=True)

    def _take(self, hold_back: bool = False) -> str:
        decode = self._tokenizer.decode
        before, after = decode(self._ids[: self._emitted], False), decode(self._ids, False)
        if len(after) <= len(before) or (hold_back and after.endswith(_REPLACEMENT)):
            return ""
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return after[len(before) :]


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template (of several, the default one)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: is not UTF-8: {error.reason}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str | None):
        raise ValueError(f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of named ones")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json(path.read_bytes(), str(path)) if path.is_file() else {}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
