"""Checks that verify_chain and verify_tree share."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks
from .nucleus import Nucleus


def target_of(op: str, logits, probs) -> tuple[Tensor, bool]:
    """(the target's rows, whether they are probabilities)."""
    if (logits is None) == (probs is None):
        got = "both" if logits is not None else "neither"
        _checks.fail(op, "target_logits", "given, or target_probs instead of it", got)
    if probs is not None:
        _checks.rows2d(op, "target_probs", probs, (torch.float32,))
        return probs, True
    _checks.rows2d(op, "target_logits", logits)
    return logits, False


def batch_of(op: str, cu_num_draft, draft_tokens, params, position, device: torch.device) -> int:
    """B, after checking what is per request and the drafts."""
    if not isinstance(cu_num_draft, Tensor) or cu_num_draft.dim() != 1 or cu_num_draft.shape[0] < 1:
        _checks.fail(op, "cu_num_draft", "int32 [B + 1]", cu_num_draft)
    B = cu_num_draft.shape[0] - 1
    _checks.vector(op, "cu_num_draft", cu_num_draft, (torch.int32,), B + 1, "B + 1", device)
    if isinstance(draft_tokens, Tensor) and draft_tokens.dim() == 2:
        how = "ragged_from_padded makes it from [B, K] of chains, .flatten() from [B, n] of trees"
        _checks.fail(op, "draft_tokens", f"[D], request-major ({how})", draft_tokens)
    _checks.vector(op, "draft_tokens", draft_tokens, _checks.INDEX_DTYPES, 0, "D", device, at_least=True)
    if getattr(params, "num_requests", 0) == B + 1:  # counts, or a prefix sum without its 0
        must = f"int32 [B + 1={B + 2}], a prefix sum that starts at 0, for the B={B + 1} requests of params"
        _checks.fail(op, "cu_num_draft", must, cu_num_draft)
    _checks.params(op, "params", params, B, device, B)
    if position is not None:
        _checks.vector(op, "position", position, (torch.int64,), B, "B", device)
    return B


def known_drafts(cu_num_draft: Tensor, draft_tokens: Tensor) -> int:
    """Drafts that the companions of draft_tokens must cover. It is known on the host only; elsewhere the kernel takes a
    missing row as unusable."""
    known = cu_num_draft.device.type == "cpu" and cu_num_draft.shape[0] > 1 and type(cu_num_draft) is Tensor
    if not known or torch.compiler.is_compiling():
        return 0
    return min(max(int(cu_num_draft[-1]), 0), draft_tokens.shape[0])


def draft_of(
    op, B, cu_num_draft, draft_tokens, draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params, target_to_draft,
    vocab, device,
) -> tuple[Tensor | None, bool, object]:  # fmt: skip
    """(draft rows [rows, Vd] or None, whether they are probabilities, draft_params)."""
    D = known_drafts(cu_num_draft, draft_tokens)
    if draft_logits is not None and draft_probs is not None:
        _checks.fail(op, "draft_probs", "None where draft_logits is given", draft_probs)
    is_probs = draft_probs is not None
    draft = draft_probs if is_probs else draft_logits
    if draft is not None:
        draft = _draft_matrix(op, "draft_probs" if is_probs else "draft_logits", draft, draft_rows, D, device, is_probs)
    if draft_rows is not None:
        if draft is None:
            _checks.fail(op, "draft_rows", "None where there are no draft_logits or draft_probs", draft_rows)
        _checks.vector(op, "draft_rows", draft_rows, _checks.INDEX_DTYPES, D, "D", device, at_least=True)
    if draft_logits is not None:
        if draft_params is None:
            must = "given with draft_logits (the parameters the drafts were sampled with)"
            _checks.fail(op, "draft_params", must, "None")
        _checks.params(op, "draft_params", draft_params, B, device, B)
    elif draft_params is not None:
        _checks.fail(op, "draft_params", "None where there are no draft_logits", "SamplingTensors")
    if draft_nucleus is not None:
        if not isinstance(draft_nucleus, tuple) or len(draft_nucleus) != 3:
            _checks.fail(op, "draft_nucleus", "a Nucleus", draft_nucleus)
        if draft_logits is None:
            _checks.fail(op, "draft_nucleus", "None where there are no draft_logits", "a Nucleus")
        for name, tensor in zip(Nucleus._fields, draft_nucleus, strict=True):
            _checks.vector(op, f"draft_nucleus.{name}", tensor, (torch.float32,), D, "D", device, at_least=True)
            if tensor.shape != draft_nucleus[0].shape:
                must = f"as long as draft_nucleus.cutoff {list(draft_nucleus[0].shape)}"
                _checks.fail(op, f"draft_nucleus.{name}", must, tensor)
    if target_to_draft is not None:
        _checks.vector(op, "target_to_draft", target_to_draft, _checks.INDEX_DTYPES, vocab, "V", device)
    return draft, is_probs, draft_params


def op_arguments(
    params, position, draft, draft_is_probs, draft_rows, draft_nucleus, draft_params, target_to_draft
) -> tuple:
    """These as the schemas list them (`_schemas._PARAMS` to `_DRAFT`)."""
    p, q = params, draft_params
    return (
        p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.slots, position, draft, draft_is_probs, draft_rows,
        *(draft_nucleus or (None, None, None)),
        *((q.temperature, q.top_p, q.top_k, q.min_p, q.slots) if q is not None else (None,) * 5),
        target_to_draft,
    )  # fmt: skip


def _draft_matrix(op, name, draft, draft_rows, D: int, device: torch.device, is_probs: bool) -> Tensor:
    """Draft rows as [rows, Vd], in place."""
    if not isinstance(draft, Tensor) or draft.dim() < 2 or (draft_rows is None and draft.dim() != 2):
        _checks.fail(op, name, "[>= D, Vd], or [..., Vd] with draft_rows", draft)
    if draft.dim() > 2:
        try:
            draft = draft.view(-1, draft.shape[-1])
        except RuntimeError:
            _checks.fail(op, name, "viewable as [rows, Vd] without a copy", f"strides {list(draft.stride())}")
    _checks.rows2d(op, name, draft, (torch.float32,) if is_probs else _checks.LOGITS_DTYPES)
    if draft.device != device or (draft_rows is None and draft.shape[0] < D):
        _checks.fail(op, name, f"[>= D={D}, Vd] on {device}", draft)
    return draft


def validate(
    op,
    target,
    target_is_probs,
    params,
    draft_params,
    draft_tokens,
    cu,
    draft,
    draft_is_probs,
    draft_rows,
    target_to_draft,
    K,
) -> None:
    """Reads the values that the kernels would clamp or flag."""
    draft_name = "draft_probs" if draft_is_probs else "draft_logits"
    offsets = cu.tolist()
    B = len(offsets) - 1
    lengths = [offsets[b + 1] - offsets[b] for b in range(B)]
    if offsets[0] != 0 or any(d < 0 for d in lengths):
        _checks.fail(op, "cu_num_draft", "a non-decreasing prefix sum that starts at 0", str(offsets))
    if any(d > K for d in lengths):
        _checks.fail(op, "cu_num_draft", f"of at most max_draft={K} drafts a request", str(lengths))
    D = offsets[-1]
    if draft_tokens.shape[0] < D:
        _checks.fail(op, "draft_tokens", f"[>= D={D}]", draft_tokens)
    if target.shape[0] < D + B:
        name = "target_probs" if target_is_probs else "target_logits"
        _checks.fail(op, name, f"[>= D + B={D + B}, V]", target)
    for which, p in (("params", params), ("draft_params", draft_params)):
        if p is None:
            continue
        if not bool(((p.temperature >= 0) & p.temperature.isfinite()).all()):
            _checks.fail(op, f"{which}.temperature", "finite and >= 0", str(p.temperature.tolist()))
        if p.slots is not None and B and not 0 <= int(p.slots.min()) <= int(p.slots.max()) < p.temperature.shape[0]:
            _checks.fail(op, f"{which}.slots", f"in [0, {p.temperature.shape[0]})", str(p.slots.tolist()))
    drafts = draft_tokens[:D]
    bad = (drafts < 0) | (drafts >= target.shape[1])
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        _checks.fail(op, "draft_tokens", f"in [0, {target.shape[1]})", f"{int(drafts[first])} at {first}")
    name = "target_probs" if target_is_probs else "target_logits"
    used = target[: D + B]
    if bool(torch.isnan(used).any()):
        _checks.fail(op, name, "free of NaN", f"NaN in row {int(torch.isnan(used).any(1).nonzero()[0])}")
    live = (used > 0).any(1) if target_is_probs else (used > -torch.inf).any(1)
    if not bool(live.all()):
        _checks.fail(op, name, "of rows with something to keep", f"none in row {int((~live).nonzero()[0])}")
    if draft is not None:
        index = draft_rows[:D].long() if draft_rows is not None else torch.arange(D, device=draft.device)
        if D and (int(index.min()) < 0 or int(index.max()) >= draft.shape[0]):
            _checks.fail(op, "draft_rows", f"in [0, {draft.shape[0]})", f"{int(index.min())}..{int(index.max())}")
        if bool(torch.isnan(draft[index]).any()):
            _checks.fail(op, draft_name, "free of NaN", "NaN")
    if target_to_draft is not None and draft is not None:
        low, high = int(target_to_draft.min()), int(target_to_draft.max())
        if low < -1 or high >= draft.shape[1]:
            _checks.fail(op, "target_to_draft", f"in [-1, Vd={draft.shape[1]})", f"{low}..{high}")
