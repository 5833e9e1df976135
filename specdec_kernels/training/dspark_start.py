"""Where a new `DSparkModel` starts: its first layer reads the states it drafts from.

Slots are an anchor and masks at the same offsets from the context, so what they need first is the state of the last token before
the anchor, and the anchor itself. Random attention takes most of a short training to find either. Keys and queries that are
constants see positions alone: under the rotation q^T R(m - n) k is a sum of cosines of the distance. Such constants exist,
because states and embeddings have a common direction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..decoding.dspark_model import DSparkModel
from .features import FeatureBatches

_BATCHES = 10  # for the statistics
# Rotations (rad a token) of the heads that look at the last token, log-normal: scores fall with distance.
_FREQUENCY, _WIDTH = 0.1, 1.0
_SLOW = 0.2  # fastest rotation of the heads that look at the anchor
_SHARP = 6.0  # of q · k: up to slot 7 the last token has e^3 times the weight of the one before it
_NOISE = 0.1  # of what random weights are left


@torch.no_grad()
def start_attention(model: DSparkModel, batches: FeatureBatches) -> None:
    """Sets fc to the last tap's state and a little of the others; in the first layer most heads to the context's last token,
    a quarter of the key heads (rounded down) to the anchor; their values and outputs to the identity, as far as the heads are wide.

    The queries of a slot are a · w_q, with w_q x = 1 on inputs of slots in the least squares sense, keys b · w_k, with
    w_k g = 1 on the context, -1 on slots; of the heads for the anchor w_k = 1 on tokens, -1 on masks and context.
    """
    layer, size, last = model.layers[0], model.fc.out_features, model.config.target_hidden_size
    attention = layer.self_attn
    depth, device = attention.head_dim, model.fc.weight.device
    keys, queries = (p.out_features // depth for p in (attention.k_proj, attention.q_proj))
    group, anchors = queries // keys, keys // 4

    model.fc.weight.mul_(0.3)[:, -last:].add_(torch.eye(size, last, device=device))
    count = min(_BATCHES, len(batches))
    chosen = [batches[i * len(batches) // count] for i in range(count)]
    real = [torch.arange(b.tokens.shape[1]) < b.lengths[:, None] for b in chosen]
    context = torch.cat([model.context(b.states.to(device))[r.to(device)] for b, r in zip(chosen, real, strict=True)])
    tokens = torch.cat([b.tokens[r] for b, r in zip(chosen, real, strict=True)]).to(device)
    tokens = layer.input_layernorm(model.embed(tokens))
    masks = layer.input_layernorm(model.embed(torch.full((1,), model.config.mask_token_id, device=device)))
    masks = masks.expand(-(-len(tokens) // 3), -1)
    slot = _constant((tokens, 1.0), (masks, 1.0))
    recent = _constant((context, 1.0), (tokens, -1.0), (masks, -1.0))
    anchor = _constant((tokens, 1.0), (masks, -1.0), (context, -1.0))

    rotation = model.frequencies.to(device)
    near = _direction(torch.exp(-((rotation / _FREQUENCY).log() ** 2) / (2 * _WIDTH**2)))
    wide = _direction((rotation < _SLOW).float() + 1e-6)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(math.sqrt(_SHARP))
    identity = torch.eye(size, device=device)
    for head in range(keys):
        direction, reads = (near, recent) if head < keys - anchors else (wide, anchor)
        rows = slice(head * depth, (head + 1) * depth)
        attention.k_proj.weight[rows].mul_(_NOISE).add_(direction[:, None] * reads)
        carried = identity[rows] if head < keys - anchors else identity[:0]
        attention.v_proj.weight[rows][: len(carried)] = carried
        for query in range(head * group, (head + 1) * group):
            rows = slice(query * depth, (query + 1) * depth)
            attention.q_proj.weight[rows].mul_(_NOISE).add_(direction[:, None] * slot)
            attention.o_proj.weight[:, rows][:, : len(carried)] = carried.T / group


def _constant(*wanted: tuple[Tensor, float]) -> Tensor:
    """w with w · x near y for the rows x of each of the given (X, y), by ridge regression."""
    x = torch.cat([rows for rows, _ in wanted]).double()
    y = torch.cat([x.new_full((len(rows),), value) for rows, value in wanted])
    square = x.T @ x
    square.diagonal().add_(0.01 * square.diagonal().mean())
    return torch.linalg.solve(square, x.T @ y).float()


def _direction(weights: Tensor) -> Tensor:
    """A constant query or key [D] that has these weights of the rotations [D / 2], of RMS 1."""
    half = (weights / weights.mean()).sqrt()
    return torch.cat([half, torch.zeros_like(half)]) * math.sqrt(2.0)
