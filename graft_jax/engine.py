"""The decoder that people use: prompts in, text and statistics out."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax import auto, kit, methods
from graft_jax.calibration import read_calibration
from graft_jax.config import ModelConfig
from graft_jax.decode import DecodeSpec
from graft_jax.drafters.base import Drafter, Params
from graft_jax.io.block_drafter import KINDS, load_drafter
from graft_jax.io.checkpoint import load_target
from graft_jax.models.transformer import TargetParams
from graft_jax.programs import Programs
from graft_jax.prompts import Prompt, encode_prompt, split_prompts
from graft_jax.results import Chunk
from graft_jax.retrieval import stored
from graft_jax.session import Request, Session, interruptible
from graft_jax.tokenizer import Tokenizer
from graft_jax.tree.templates import Template

ROUNDS_A_SLICE = 32  # between two looks at Ctrl-C and at the clock
ROUNDS_A_CHUNK = 4  # the same while streaming
CPU_ATTENTION_BLOCK = 256  # cache entries (see `layers.attend`)


class SpeculativeDecoder:
    """Generates text from a target with one drafting method.

    The drafter's memory (the retrieval table) lives on from call to call; see `reset_memory`,
    `save_memory` and `load_memory`. Calls on one decoder must not overlap.

    Args:
        config, params: the target.
        tokenizer: None works with token ids alone.
        drafter: proposes trees; `methods` builds the named ones.
        max_length: most tokens of a row, prompt and new ones together.
        method: the name that results carry.
        row_buckets: see `DecodeSpec`; only those below the drafter's capacity matter.
        name: what the model is called in results.
        head: the draft head's configuration and weights, for methods that need one.
        thresholds: of the drafter's gates.
        table: a retrieval table filled beforehand, for decoders made of this one.
        memory: what the drafter starts with, also after `reset_memory`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: TargetParams,
        tokenizer: Tokenizer | None,
        drafter: Drafter,
        *,
        max_length: int = 2048,
        method: str = "custom",
        row_buckets: tuple[int, ...] = (),
        name: str = "custom",
        head: tuple[Any, Any] | None = None,
        thresholds: Sequence[float] = (),
        table: Any = None,
        memory: Any = None,
    ):
        self.config, self.tokenizer, self.head = config, tokenizer, head
        self.params = Params(params, head and head[1], jnp.asarray(thresholds, jnp.float32))
        self.method, self.name = method, name
        block, cache_dtype = _cache_settings(self.dtype)
        self.spec = DecodeSpec(config, drafter, max_length, row_buckets, block, cache_dtype)
        self.programs = Programs(self.spec)
        self.table, self._start = table, memory
        self.memory: Any = None  # what the drafter learned; donated by every call, and set again after it
        self.reset_memory()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "smollm2-135m",
        *,
        method: str = "auto",
        dtype: str = "bfloat16",
        max_length: int = 2048,
        strict_config: bool = False,
        drafter: str | Path | None = None,
        draft_rope: str | int | float = "auto",
        calibration: str | Path | None = None,
        table: str | Path | None = "auto",
        on_status: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> "SpeculativeDecoder":
        """Loads a target, and what drafts for it.

        Args:
            model: a packaged name, a GGUF file, a Hugging Face folder or a hub id.
            method: a name from `methods.METHODS`; or "auto": of the ways to draft that the kit records, the one with
                the most tokens a second here. Rounds are timed once on a machine, and the times are kept in the
                user's cache. A model without a kit is decoded by "recycling", which needs nothing.
            dtype: "bfloat16" or "float32".
            max_length: most tokens of a row, prompt and new ones together.
            strict_config: unknown keys of the model's config are errors.
            drafter: the draft head: a Hugging Face folder or a hub id, whose `config.json` says what it is; or a kit
                (see `graft_jax.kit`). If None, a packaged model takes what its own kit has.
            draft_rope: base of an EAGLE-3 head's rotary frequencies (see `Eagle3Config.from_hf`).
            calibration: a file of `graft-jax calibrate`: gates, thresholds and tree sizes, unless `options` say
                otherwise.
            table: what methods that retrieve start with: a file of `graft-jax fill`; "auto" takes the kit's, if its
                contexts are of `table_order` tokens; None starts empty.
            on_status: is told what takes long.
            options: fields of `methods.Options`, e.g. `budget=7`; with "auto" only `kernels`.

        Raises:
            ValueError: an argument or a file is wrong; names it.
        """
        unknown = set(options) - methods.OPTION_NAMES
        if unknown:
            raise ValueError(f"unknown options {sorted(unknown)}")
        found = kit.find(str(model), drafter)
        record = None
        if method == "auto":
            if found is None and drafter is not None:
                raise ValueError(f"method 'auto' chooses from a kit; drafter={str(drafter)!r} is none: name a method")
            method = "recycling" if found is None else "ar"
            record = None if found is None else kit.read_record(found)
        if record is not None:
            _refuse_for_auto(options, calibration, table)
        chosen = methods.get(method)
        if calibration is not None:
            options = {**read_calibration(calibration, method), **options}
        settings = methods.Options(**options)
        if max_length < 2:
            raise ValueError(f"max_length={max_length} must be at least 2 tokens")
        folder = drafter if found is None else kit.head_for(found, chosen.heads)
        if chosen.heads and folder is None:
            where = "" if found is None else f" ({found} has none)"
            raise ValueError(f"method {method!r} needs {chosen.needs}: give drafter={where}")
        if not chosen.heads and folder is not None:
            raise ValueError(f"method {method!r} takes no drafter, got {drafter!r}")
        config, params, tokenizer = load_target(model, dtype=dtype, strict_config=strict_config)

        def load_head(folder, kinds):
            return load_drafter(
                folder, config, dtype=dtype, kinds=kinds, rope=draft_rope, target_embed=params.embed
            )  # fmt: skip

        head = load_head(folder, chosen.heads) if folder is not None else None
        held = _read_table(table, found or kit.find(str(model), None), config, settings)
        decoder = _build(method, settings, config, params, tokenizer, max_length, str(model), head, held)
        if record is None:
            return decoder
        return auto.pick(
            decoder, record, lambda kinds: load_head(kit.head_for(found, kinds), kinds),
            {"kernels": settings.kernels}, on_status,
        )  # fmt: skip

    def with_method(self, method: str, **options: Any) -> "SpeculativeDecoder":
        """A decoder over the same weights with another method, e.g. "ar" as the baseline."""
        settings, length = methods.Options(**options), self.spec.max_length
        chosen = methods.get(method)
        head = self.head if chosen.heads else None
        if chosen.heads and (head is None or head[0].kind not in chosen.heads):
            loaded = "nothing" if head is None else KINDS[head[0].kind]
            raise ValueError(f"method {method!r} needs {chosen.needs}; this decoder was loaded with {loaded}")
        parts = (self.config, self.params.target, self.tokenizer, length, self.name, head)
        return _build(method, settings, *parts, self.table)

    def with_drafter(self, method: str, config: Any, params: Any, **options: Any) -> "SpeculativeDecoder":
        """A decoder over the same target with a draft head that is at hand, e.g. one in training.

        Args:
            config, params: the head's, in the decoder's dtype.
        """
        parts = (self.config, self.params.target, self.tokenizer, self.spec.max_length, self.name, (config, params))
        return _build(method, methods.Options(**options), *parts, self.table)

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Other thresholds for the drafter's gates; compiles nothing.

        Raises:
            ValueError: their number is not that of the gates.
        """
        count = self.params.thresholds.shape[0]
        if len(thresholds) != count:
            raise ValueError(f"thresholds={list(thresholds)} must hold {count} values, one a gate")
        self.params = self.params.replace(thresholds=jnp.asarray(thresholds, jnp.float32))

    @property
    def dtype(self) -> str:
        return jnp.dtype(self.params.target.dtype).name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        system: str | None = None,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
        on_progress: Callable[[int], None] | None = None,
        **settings: Any,
    ) -> Any:
        """Continues one prompt or a list of them.

        Args:
            prompts: a text, a list of token ids, or a list of messages is one prompt; a list of such is
                several, decoded as one batch.
            system: a system message before text prompts.
            raw: texts are encoded as they are, without the chat template.
            template_args: variables of the chat template, e.g. `{"enable_thinking": False}`.
            on_progress: is called with the number of new tokens of the batch so far.
            settings: `max_new_tokens` (128), `temperature` (0: greedy), `top_k`, `top_p`, `min_p`, `seed`
                (an int: row i uses seed + i; or one a prompt), `ignore_eos`, `budget` (tree nodes a round
                may verify, at most the decoder's), `stop` (texts that end the answer, and are not part of it;
                they may span tokens).

        Returns:
            A `Generation` for one prompt, a list of them for several. After Ctrl-C the partial text, with
            finish_reason "interrupted".

        Raises:
            ValueError: an argument is wrong; names it.
        """
        request = Request(**settings)
        single, several = split_prompts(prompts)
        encoding: Any = {"system": system, "raw": raw, "template_args": template_args}
        ids = [encode_prompt(prompt, self.tokenizer, self.config, **encoding) for prompt in several]
        session = Session(self, ids, request)
        with interruptible() as interrupted:
            for _ in session.slices(ROUNDS_A_SLICE):
                if on_progress is not None:
                    on_progress(int((session.lengths - session.prompt_lengths).sum()))
                if interrupted():
                    break
        results = session.results()
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[Chunk]:
        """Continues one prompt and yields the text as it comes; the last chunk carries the result.

        Arguments as for `generate`. The chunks' texts, put together, are the result's text.
        """
        request = Request(**settings)
        single, several = split_prompts(prompt)
        if not single:
            raise ValueError("stream takes one prompt; got a list of prompts")
        ids = encode_prompt(
            several[0], self.tokenizer, self.config, system=system, raw=raw, template_args=template_args
        )
        return self._stream(Session(self, [ids], request))

    def _stream(self, session: "Session") -> Iterator[Chunk]:
        with interruptible() as interrupted:
            for _ in session.slices(ROUNDS_A_CHUNK):
                if session.running and not interrupted():
                    yield Chunk(text=session.new_text[0], token_ids=session.new_ids[0])
                    continue
                tail = session.new_text[0] + session.flush()[0]
                yield Chunk(text=tail, token_ids=session.new_ids[0], result=session.results()[0])
                return

    def margin(
        self, tokens: Sequence[int], first: int, second: int, request: Request, row: int = 0, batch: int = 1
    ) -> float:
        """How far plain decoding preferred `first` to `second` after `tokens`, noise included."""
        plain = self if self.method == "ar" else self.with_method("ar")
        request = dataclasses.replace(request, seed=[request.seeds(batch)[row]], budget=None)
        session = Session(plain, [list(tokens)], request)
        session.prefill()
        scores = plain.programs.next_scores(plain.params, session.state)
        return float(scores[0, first] - scores[0, second])

    @property
    def policy(self) -> dict[str, Any]:
        """What results say of how tokens were drafted."""
        spec = self.spec
        return {
            "method": self.method,
            "budget": spec.drafter.capacity,
            "row_buckets": list(spec.buckets),
            "thresholds": [round(float(value), 6) for value in self.params.thresholds],
            "kernels": dict(self.programs.kernels),
            "settings": _plain(spec.drafter),
        }

    def reset_memory(self) -> None:
        """Forgets what the drafter learned from earlier prompts; a table that it started with is there again."""
        # A copy: the next call writes over it.
        self.memory = None if self._start is None else jax.tree.map(lambda x: jnp.array(x, copy=True), self._start)

    def save_memory(self, path: str | Path) -> None:
        """Writes the drafter's memory to a .npz file."""
        leaves = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.memory))}
        with open(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **leaves)

    def load_memory(self, path: str | Path) -> None:
        """Reads what `save_memory` wrote with the same method and options.

        Raises:
            ValueError: the file fits another vocabulary or other options.
        """
        fresh = jax.eval_shape(
            lambda params: self.spec.drafter.memory(self.spec.drafter.init(params, 1, self.spec.cache_size, None)),
            self.params,
        )
        wanted, tree = jax.tree.flatten(fresh)
        with np.load(path) as file:
            found = [file[name] for name in sorted(file.files, key=lambda name: int(name.split("_")[1]))]
        shapes = [(leaf.shape, leaf.dtype) for leaf in wanted]
        if [(leaf.shape, leaf.dtype) for leaf in found] != shapes:
            raise ValueError(
                f"{path}: holds arrays of shapes {[leaf.shape for leaf in found]}; "
                f"method {self.method!r} with these options needs {[shape for shape, _ in shapes]}"
            )
        self.memory = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in found])


def _refuse_for_auto(options: dict[str, Any], calibration: Any, table: Any) -> None:
    """What "auto" chooses by itself was measured with the kit's own table and options."""
    given = [name for name in options if options[name] != getattr(methods.Options(), name) and name != "kernels"]
    given += ["calibration"] if calibration is not None else []
    given += ["table"] if table != "auto" else []
    if given:
        raise ValueError(f"method 'auto' chooses how to draft by itself; to set {', '.join(given)}, name a method")


def _read_table(table: str | Path | None, folder: Path | None, config: ModelConfig, options: methods.Options) -> Any:
    """Settings and levels of the table to start with."""
    if table is None:
        return None
    if table == "auto":
        path = folder / kit.TABLE if folder is not None else None
        if path is None or not path.is_file():
            return None
    else:
        path = Path(table)
    settings, levels, _ = stored.load(path)
    if settings.num_tokens != config.vocab_size:
        raise ValueError(f"{path}: is for a vocabulary of {settings.num_tokens}; the model has {config.vocab_size}")
    if table != "auto" and settings.order != options.table_order:
        raise ValueError(f"{path}: has contexts of {settings.order} tokens; table_order={options.table_order}")
    return settings, levels


def _build(method, options, config, params, tokenizer, max_length, name, head, table=None) -> SpeculativeDecoder:
    chosen = methods.get(method)
    fitting = table if table is not None and table[0].order == options.table_order else None
    block, cache_dtype = _cache_settings(jnp.dtype(params.dtype).name)
    context = methods.Context(config, head and head[0], jax.default_backend() == "cpu", block, cache_dtype, fitting)
    built = chosen.build(context, options)
    return SpeculativeDecoder(
        config, params, tokenizer, built.drafter, max_length=max_length, method=method,
        row_buckets=chosen.buckets(context), name=name, head=head, thresholds=built.thresholds,
        table=table, memory=built.memory,
    )  # fmt: skip


def _cache_settings(dtype: str) -> tuple[int, str]:
    """Block of attention and dtype of keys and values on this machine."""
    return (CPU_ATTENTION_BLOCK, "float32") if jax.default_backend() == "cpu" else (0, dtype)


def _plain(settings: Any) -> Any:
    """Settings as JSON: dataclasses by their class and fields, templates by their depth counts."""
    if isinstance(settings, Template):
        return list(settings.depth_counts)
    if dataclasses.is_dataclass(settings):
        fields = {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
        return {"kind": type(settings).__name__, **fields}
    if isinstance(settings, tuple | list):
        return [_plain(item) for item in settings]
    return settings
