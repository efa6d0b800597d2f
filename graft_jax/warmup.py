"""Warm-up rounds: what a gate at every depth would have seen and cut, on given prompts, and what rounds cost here.

The target's text does not depend on the drafter, so no verification is needed to know what another tree
would have got: in every round the tree of every gate is drafted beside the open one, and when the text is
there, each is walked along it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.decode import DecodeSpec, DecodeState, decode_step
from graft_jax.drafters.base import Params
from graft_jax.engine import SpeculativeDecoder
from graft_jax.session import Request, Session
from graft_jax.tree import structure
from graft_jax.tree.gates import OPEN
from graft_jax.tree.structure import DraftTree
from graft_jax.types import Array, Float, Int

CLOSED = 1e9  # a threshold that every confidence is below


@dataclasses.dataclass(frozen=True)
class Record:
    """What R warm-up rounds say of n gates.

    Attributes:
        confidence: [R, n], c_d at each gate, with no gate closed.
        accepted: [R, n + 1] accepted nodes where drafting ends at each gate, and, last, where it does not.
    """

    confidence: np.ndarray
    accepted: np.ndarray


class Trees(flax.struct.PyTreeNode):
    """One round's trees, one a forced gate and the open one last, and the confidence at the gates."""

    trees: DraftTree  # its leaves carry a leading axis [n + 1]
    confidence: Float[Array, "B n"]
    length: Int[Array, "B"]


def forced(gates: int) -> np.ndarray:
    """[n + 1, n]: thresholds that close one gate each, and none."""
    return np.where(np.eye(gates + 1, gates, dtype=bool), CLOSED, OPEN).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _round(
    spec: DecodeSpec, depths: tuple[int, ...], params: Params, state: DecodeState, thresholds: Float[Array, "m n"]
) -> tuple[DecodeState, Trees]:
    """A round with open gates, and the trees that the others would have drafted."""
    root = state.tokens[jnp.arange(state.tokens.shape[0]), state.length]

    def draft(row):
        made, _ = spec.drafter.draft(
            params.replace(thresholds=row), state.draft, root, state.length, state.active
        )  # fmt: skip
        return structure.truncate(made.tree, state.budget), made.confidence

    trees, confidence = jax.lax.map(draft, thresholds)
    seen = confidence[-1][:, jnp.array(depths)]
    return decode_step(spec, params.replace(thresholds=thresholds[-1]), state), Trees(trees, seen, state.length)


def record(
    decoder: SpeculativeDecoder,
    depths: tuple[int, ...],
    prompts: Sequence[list[int]],
    request: Request,
    on_round: Callable[[int, int], None] = lambda prompt, tokens: None,
) -> Record:
    """Decodes prompts one by one with open gates; the decoder's memory learns from them as always.

    Args:
        decoder: its drafter has gates at `depths`.
        prompts: token ids; one prompt is one warm-up round of Graft.
        on_round: is told the prompt's number and its new tokens so far.

    Raises:
        ValueError: no round had a whole path of text after it.
    """
    thresholds = jnp.asarray(forced(len(depths)))
    confidence, accepted = [], []
    for number, ids in enumerate(prompts):
        session = Session(decoder, [ids], request)
        session.prefill()
        rounds = []
        try:
            while session.running:
                session.state, trees = _round(decoder.spec, depths, decoder.params, session.state, thresholds)
                rounds.append(jax.device_get(trees))
                session.look()
                on_round(number, int(session.lengths[0]) - len(ids))
        finally:
            session.keep_memory()
        text = session.tokens[0, : session.lengths[0]]
        for trees in rounds:
            rest = text[int(trees.length[0]) + 1 :]
            if len(rest) > decoder.spec.drafter.max_depth:  # else the end of the text, not of the path, would count
                confidence.append(trees.confidence[0])
                accepted.append(_walks(trees.trees, rest))
    if not accepted:
        raise ValueError(
            f"the prompts' answers are all shorter than a path of {decoder.spec.drafter.max_depth + 1} tokens: "
            "nothing to calibrate on"
        )
    return Record(np.array(confidence, np.float64), np.array(accepted))


def walk(tree: DraftTree, text: Sequence[int] | np.ndarray) -> int:
    """Nodes of one tree (no batch axis) that lie on the path that `text` takes from its root."""
    node, count = 0, 0
    for token in text:
        children = tree.valid & (tree.parents == node) & (tree.tokens == token)
        if not children.any():
            break
        node, count = int(np.argmax(children)), count + 1
    return count


def _walks(trees: DraftTree, text: np.ndarray) -> list[int]:
    """`walk` of each tree of a stack [m, 1, ...]."""
    return [walk(jax.tree.map(lambda x, i=i: x[i, 0], trees), text) for i in range(len(trees.tokens))]


def round_seconds(
    decoder: SpeculativeDecoder,
    prompt: list[int],
    settings: dict[str, Any],
    repeats: int = 3,
    new_tokens: int = 48,
    on_run: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """[n + 1] seconds a round takes where drafting ends at each gate, and, last, where it does not.

    Medians over `repeats` runs, interleaved, after one that compiles.
    """
    kept = decoder.params.thresholds
    rows = forced(kept.shape[0])
    seconds: list[list[float]] = [[] for _ in rows]
    try:
        for repeat in range(repeats + 1):
            for times, thresholds in zip(seconds, rows):
                decoder.set_thresholds(thresholds)
                stats = decoder.generate(
                    prompt, **{**settings, "max_new_tokens": new_tokens, "ignore_eos": True}
                ).stats  # fmt: skip
                if repeat:
                    times.append(stats.decode_seconds / stats.rounds)
                on_run()
    finally:
        decoder.set_thresholds(kept)
    return np.median(np.array(seconds), axis=1)
