"""The scenario of `target_run` on transformers models."""

import numpy as np
import torch
from target_run import paths

from graft_jax.config import ModelConfig

torch.set_num_threads(1)  # the models are tiny, and waiting threads slow down whatever else runs


def randomize(model: torch.nn.Module, seed: int = 0, std: float = 0.2) -> None:
    """Random weights; norms and biases too, so that a mixed-up one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, std, generator=generator)


def run(model, config: ModelConfig, prompt: np.ndarray, tree: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [P + N, V] and taps [3, P + N, M]; each node of the tree by a forward pass over a whole path."""
    size = len(prompt)
    logits = np.empty((size + len(tree), config.vocab_size), np.float32)
    taps = np.empty((3, len(logits), config.hidden_size), np.float32)
    inner = {node for path in paths() for node in path[:-1]}
    for path in paths():
        if path[-1] not in inner:  # a leaf's pass holds the rows of all nodes before it
            rows = [*range(size), *(size + node for node in path)]
            logits[rows], taps[:, rows] = _forward(model, config, np.concatenate([prompt, tree[path]]))
    return logits, taps


def _forward(model, config: ModelConfig, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    last = []  # transformers' last hidden state is normed; ours is what goes into that norm
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    with torch.no_grad():
        out = model(torch.tensor(tokens)[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    taps = [out.hidden_states[0], out.hidden_states[1], last[0]]
    return out.logits[0].numpy(), torch.stack([tap[0] for tap in taps]).numpy()
