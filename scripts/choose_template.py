"""Chooses the nested narrow templates by simulation on text that the target wrote itself.

    python scripts/choose_template.py conversations.jsonl.gz --limit 120 --order 3

Each line of the file holds `prompt_ids` and `response_ids`. The target's top successors at every position
are computed once; then each text is replayed: at every position the continuation is traced through the
successor table as a path of ranks, and the table learns the text. A node's worth is how often its whole path
was right; nodes are taken in order of worth, which keeps every prefix a tree and is the best tree of
its size for these counts. Prints the order, the expected acceptance by size, and the compact form that
`graft_jax/tree/templates.py` stores.
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

from graft_jax.io.checkpoint import load_target
from graft_jax.models import cache, transformer

MAX_DEPTH = 12


def loops(tokens: list[int]) -> bool:
    """Whether fewer than half of the 4-grams are new: such text would make every template a chain."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:]))
    return not grams or len(set(grams)) < 0.5 * len(grams)


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
    parser.add_argument("--nodes", type=int, default=31)
    args = parser.parse_args()

    config, params, _ = load_target(args.model, dtype="float32")
    conversations = read(args.conversations, args.limit)
    texts = [(prompt + response)[:512] for prompt, response in conversations]
    tops = top_successors(config, params, texts, 8)

    table: dict[tuple[int, ...], np.ndarray] = {}
    worth: collections.Counter[tuple[int, ...]] = collections.Counter()
    positions = 0
    for (prompt, _), text, top in zip(conversations, texts, tops):

        def learn(i: int, text=text, top=top) -> None:
            for order in range(1, args.order + 1):
                if i + 1 >= order:
                    table[tuple(text[i + 1 - order : i + 1])] = top[i]

        for i in range(min(len(prompt) - 1, len(text))):
            learn(i)
        for i in range(len(prompt), len(text) - 1):
            positions += 1
            path: list[int] = []
            for j in range(i, min(i + MAX_DEPTH, len(text) - 1)):
                row = None
                for order in range(args.order, 0, -1):
                    row = table.get(tuple(text[j + 1 - order : j + 1]))
                    if row is not None:
                        break
                rank = np.flatnonzero(row == text[j + 1]) if row is not None else []
                if not len(rank):
                    break
                path.append(int(rank[0]))
                worth[tuple(path)] += 1
            learn(i)
    chosen = [path for path, _ in worth.most_common(args.nodes * 4)]
    chosen.sort(key=lambda path: (-worth[path], len(path), path))
    chosen = chosen[: args.nodes]
    expected = 1.0
    for n, path in enumerate(chosen, 1):
        expected += worth[path] / positions
        print(f"{n:3d}  {''.join(map(str, path)):12s} {worth[path] / positions:.4f}  acceptance {expected:.3f}")
    print(json.dumps(["".join(map(str, path)) for path in chosen]))


if __name__ == "__main__":
    main()
