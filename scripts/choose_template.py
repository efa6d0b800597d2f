"""Chooses the nested narrow templates by simulation on text that the target wrote itself.

    python scripts/choose_template.py conversations.jsonl.gz --limit 120 --order 3

Each line of the file holds `prompt_ids` and `response_ids`. The target's top successors at every position
are computed once; then the texts are replayed with a table that learns as it goes. A node's worth is how
often its whole path was right where a round starts, so each size takes the most worthy nodes, and the replay
is repeated until the choice settles. Looping answers are left out. Prints the acceptance by size and the
order that `graft_jax/tree/templates.py` stores.
"""

import argparse
import collections
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from graft_jax.bench.datasets import loops
from graft_jax.io.checkpoint import load_target
from graft_jax.models import cache, transformer

MAX_DEPTH = 12
SIZES = (3, 5, 7, 15, 31)  # nested: each keeps the nodes of the one before


def read(path: str, limit: int) -> list[tuple[list[int], list[int]]]:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    greedy = [row for row in rows if row.get("temperature", 0) == 0 and not loops(row["response_ids"])]
    return [(row["prompt_ids"], row["response_ids"]) for row in greedy[:limit]]


def top_successors(config, params, texts: list[list[int]], width: int) -> list[np.ndarray]:
    """The target's `width` best next tokens after every position of every text."""
    size = 512

    @jax.jit
    def run(params, tokens):
        positions = jnp.arange(size)[None, :]
        empty = cache.init(config, 1, 16, params.dtype)
        mask = jnp.tri(size, dtype=bool)[None]
        out = transformer.forward(config, params, tokens, positions, mask, empty, jnp.zeros(1, jnp.int32))
        return jax.lax.top_k(transformer.logits(config, params, out.hidden), width)[1][0]

    tops = []
    for text in track(texts, "target", console=Console(stderr=True)):
        padded = np.zeros((1, size), np.int32)
        padded[0, : min(size, len(text))] = text[:size]
        tops.append(np.asarray(run(params, padded))[: len(text)])
    return tops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=120)
    parser.add_argument("--order", type=int, default=3, help="longest context of the table, in tokens")
    args = parser.parse_args()

    config, params, _ = load_target(args.model, dtype="float32")
    conversations = read(args.conversations, args.limit)
    texts = [(prompt + response)[:512] for prompt, response in conversations]
    tops = top_successors(config, params, texts, 8)

    traces = [trace(*item, args.order) for item in with_tables(conversations, texts, tops, args.order)]
    chosen: list[tuple[int, ...]] = []
    for size in SIZES:
        template, acceptance = set(chosen), 0.0
        for _ in range(6):  # what is worth taking depends on where rounds start, and so on the template
            worth, acceptance = replay(traces, template)
            rest = [path for path in worth if path not in set(chosen)]
            rest.sort(key=lambda path: (-worth[path], len(path), path))
            template = {*chosen, *rest[: size - len(chosen)]}
        new = sorted(template - set(chosen), key=lambda path: (-worth[path], len(path), path))
        chosen += new
        print(f"{size:3d} nodes  acceptance {acceptance:.3f}  adds {[''.join(map(str, path)) for path in new]}")
    print(json.dumps(["".join(map(str, path)) for path in chosen]))


def with_tables(conversations, texts, tops, order: int):
    """Texts with a table that has learned all that came before each of their positions."""
    table: dict[tuple[int, ...], np.ndarray] = {}
    for (prompt, _), text, top in zip(conversations, texts, tops):

        def learn(i: int, text=text, top=top) -> None:
            for n in range(1, min(order, i + 1) + 1):
                table[tuple(text[i + 1 - n : i + 1])] = top[i]

        yield prompt, text, table, learn


def trace(prompt, text, table, learn, order: int) -> list[tuple[int, ...]]:
    """For every answer position, the path of ranks along which the table predicts what follows."""
    for i in range(min(len(prompt) - 1, len(text))):
        learn(i)
    paths = []
    for i in range(len(prompt), len(text) - 1):
        path: list[int] = []
        for j in range(i, min(i + MAX_DEPTH, len(text) - 1)):
            contexts = (tuple(text[j + 1 - n : j + 1]) for n in range(order, 0, -1))
            row = next((table[context] for context in contexts if context in table), np.zeros(0))
            rank = np.flatnonzero(row == text[j + 1])
            if not len(rank):
                break
            path.append(int(rank[0]))
        paths.append(tuple(path))
        learn(i)
    return paths


def replay(traces, template) -> tuple[collections.Counter, float]:
    """Decodes the texts with a template: how often each path was right at a round's start, and the acceptance."""
    worth: collections.Counter[tuple[int, ...]] = collections.Counter()
    rounds = tokens = 0
    for paths in traces:
        at = 0
        while at < len(paths):
            path = paths[at]
            worth.update(path[:n] for n in range(1, len(path) + 1))
            accepted = 0
            while accepted < len(path) and path[: accepted + 1] in template:
                accepted += 1
            rounds += 1
            tokens += accepted + 1
            at += accepted + 1
    return worth, tokens / rounds


if __name__ == "__main__":
    main()
