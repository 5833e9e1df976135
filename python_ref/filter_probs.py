"""Renormalised probabilities of filtered rows (what FlashInfer and SGLang call top-k / top-p renorm, from logits)."""

import torch
from torch import Tensor

from .nucleus import row_nucleus, row_probs
from .params import request_params


def filter_probs(logits: Tensor, params, *, rows: Tensor | None = None, filter_order: str = "hf") -> Tensor:
    """float64 [N, V]: softmax of logits / T over the kept tokens, 0 elsewhere; one-hot for greedy rows, 0 for empty rows."""
    out = torch.zeros(logits.shape, dtype=torch.float64)
    for n in range(logits.shape[0]):
        p_n = request_params(params, int(rows[n]) if rows is not None else n)
        out[n] = row_probs(logits[n], row_nucleus(logits[n], p_n, filter_order), p_n)
    return out
