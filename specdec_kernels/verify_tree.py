"""`verify_tree`: one speculative step over trees of drafts, from raw logits to the accepted path and the token behind it."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks, _schemas, _verify_args
from .nucleus import Nucleus, empty_nucleus
from .params import SamplingTensors

MAX_NODES = 128
"""Drafts of a request that are looked at."""


class TreeOutput(NamedTuple):
    """`tokens` int32 [B, K + 1]: the drafts of the accepted path, then one sampled token, then -1.
    `num_accepted` int32 [B]: length of the path · `path` int32 [B, K]: its nodes, -1 behind them. Node n is the request's
    n-th draft, counted from 1, and the offset of its target row: what a cache moves to be contiguous.
    `num_emitted` int32 [B] = num_accepted + 1 · `status` int32 [B], bits of the rows on the path: 1 row with nothing to keep,
    2 NaN logit, 4 q(x) = 0 for a child, 8 unusable q row, 16 placeholder among the children, 32 offsets or parents out of
    range, more than 128 drafts, or a tree deeper than K.
    `logprobs` float32 [B, K + 1] or None: log p of each emitted token under its row's filtered p, 0 past num_emitted.
    `nucleus` [B, K + 1] or None: Nucleus of each emitted row, 0 past num_emitted."""

    tokens: Tensor
    num_accepted: Tensor
    path: Tensor
    num_emitted: Tensor
    status: Tensor
    logprobs: Tensor | None = None
    nucleus: Nucleus | None = None


def verify_tree(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    parents: Tensor,
    cu_num_draft: Tensor,
    params: SamplingTensors,
    position: Tensor | None = None,
    *,
    rule: str = "target_only",
    replacement: bool | None = None,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_nucleus: Nucleus | None = None,
    draft_probs: Tensor | None = None,
    draft_params: SamplingTensors | None = None,
    target_to_draft: Tensor | None = None,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
    logprobs: int = 0,
    return_nucleus: bool = False,
    out: TreeOutput | None = None,
    backend: str = "auto",
) -> TreeOutput:
    """Verifies a batch of draft trees; the emitted tokens are distributed exactly as the target's own sampling, where the rule
    fits the way the children were drawn:

    - "target_only" (SpecInfer's and EAGLE's rule without q): children that do not depend on the target's randomness, however
      they were chosen (top-k, beams, n-grams, samples). Child c of node n is accepted with probability p_n(c); none: a token
      of p_n without the children. Reads the rows of the accepted path only, and no q.
    - "recursive" (SpecInfer 2305.09781, Sequoia 2402.12374): children drawn from q, tried in their order with
      min(1, p(x) / q(x)); after a rejection p becomes max(0, p - q), renormalised. `replacement=True`: they were drawn
      independently of each other. `replacement=False`: each from what its elder siblings left of q (`sample(num_samples=k)`),
      and q loses each rejected one; independent children are verified exactly as well, a repeated one ends its node.
      True for children drawn without replacement is biased, and so is either for top-k children.
    - "traversal" (2505.12398): the same children from the leaves to the root; accepts never fewer of them, and on a chain is
      the block rule. Reads the row of every node that can still be accepted.
    - "greedy_draft" (Hu et al. 2502.18779): of each node's children the last is drawn from q without the others, which may be
      any (q's largest, for gain). It is tested first, then "target_only" decides about the others. Mark a drawn child that there is not by the
      token -1 (not by its parent): "target_only" then decides about its siblings alone, as in a tree that is cut (status 32).

    Requests with temperature 0 follow the children that equal the argmax (lowest id), under every rule.

    Request b has d_b = cu_num_draft[b + 1] - cu_num_draft[b] drafts, its nodes 1 to d_b; node 0 is the last token of its text. It
    owns the d_b + 1 consecutive target rows from cu_num_draft[b] + b; row n is the distribution of the token behind node n. The
    layout of `verify_chain` is that of a tree whose parents are 0, 1, 2, ... With D = sum d_b, N = D + B and K = max_depth:

    Args:
        target_logits: [R >= N, V] float32, bfloat16 or float16, last dimension contiguous. None with `target_probs`.
        draft_tokens: int32/int64 [>= D], target ids, request-major. A negative id or one >= V is a child that is not there.
        parents: int32/int64 [>= D]: each draft's parent node within its request, smaller than the draft's own, 0 (not -1) for
            children of the root; -1: the draft is not there, nor what hangs from it. Siblings are tried in ascending order.
        cu_num_draft: int32 [B + 1], exclusive prefix sum of d_b; at most 128 drafts of a request are looked at (status 32).
        params, position, target_probs, target_to_draft, filter_order, logprobs, return_nucleus, backend: as in `verify_chain`;
            `position` [B] is that of the token behind the root.
        rule: "target_only", "recursive", "traversal" or "greedy_draft".
        replacement: how the children were drawn, required by "recursive" and "traversal", None for the others.
        draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params: as in `verify_chain`, per draft: the row it was drawn
            from. Siblings share one: that of the first is taken. Not for "target_only", required by the others.
        max_depth: K, longest path that is looked at (deeper drafts are not there, status 32). None derives it from `parents`
            (CPU tensors only, not under torch.compile).
        out: a TreeOutput of the same shapes to write into; every element is written.

    Returns:
        TreeOutput.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Randomness: coins on stream 1 at (anchor = position[b], id): the child's draft offset (node - 1), under "target_only" the
    parent node; the emitted token on stream 2 at its absolute position. Draw children on stream 0 at the anchor with
    ids = draft offset, children without replacement with the first sibling's.

    >>> logits = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    >>> params, cu = SamplingTensors.create(temperature=0.0), torch.tensor([0, 2], dtype=torch.int32)
    >>> out = verify_tree(logits, torch.tensor([0, 1]), torch.tensor([0, 0]), cu, params)
    >>> out.tokens, out.path
    (tensor([[1, 2]], dtype=torch.int32), tensor([[2]], dtype=torch.int32))
    """
    op = "verify_tree"
    rule_index = _checks.choice(op, "rule", rule, _schemas.TREE_RULES)
    drawn = rule in ("recursive", "traversal")
    if drawn != isinstance(replacement, bool):
        must = f"True or False for rule {rule!r} (how the children were drawn)" if drawn else f"None for rule {rule!r}"
        _checks.fail(op, "replacement", must, replacement)
    if (rule == "target_only") != (draft_logits is None and draft_probs is None):
        must = "None for rule 'target_only', which reads no q" if rule == "target_only" else f"given for rule {rule!r}"
        _checks.fail(op, "draft_logits", must, "None" if rule != "target_only" else "q")
    q = (draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params, target_to_draft)
    return run_rule(
        op, rule_index, target_logits, draft_tokens, parents, cu_num_draft, params, position, target_probs, max_depth,
        filter_order, logprobs, return_nucleus, out, backend, q=q, replacement=bool(replacement),
    )  # fmt: skip


def run_rule(
    op: str, rule: int, target_logits, draft_tokens, parents, cu_num_draft, params, position, target_probs, max_depth,
    filter_order, logprobs, return_nucleus, out, backend, *, q=(None,) * 6, replacement=False, bound=0.0, factor=0.0, rates=None,
) -> TreeOutput:  # fmt: skip
    """Checks what all rules take and runs the op, for the public function `op`. `rule` indexes TREE_RULES + LOSSY_RULES; `q` is
    `verify_tree`'s draft_logits to target_to_draft; parents of None are those of chains."""
    target, target_is_probs = _verify_args.target_of(op, target_logits, target_probs)
    device, vocab = target.device, target.shape[1]
    B = _verify_args.batch_of(op, cu_num_draft, draft_tokens, params, position, device)
    D = _verify_args.known_drafts(cu_num_draft, draft_tokens)
    if parents is None:
        parents = _chain_parents(draft_tokens, cu_num_draft)
    _checks.vector(op, "parents", parents, _checks.INDEX_DTYPES, D, "D", device, at_least=True)
    draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params, target_to_draft = q
    draft, draft_is_probs, draft_params = _verify_args.draft_of(
        op, B, cu_num_draft, draft_tokens, draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params,
        target_to_draft, vocab, device,
    )  # fmt: skip
    if rates is not None:
        _checks.vector(op, "rates", rates, (torch.float32,), 0, "n", device, at_least=True)
    order = _checks.choice(op, "filter_order", filter_order, _schemas.FILTER_ORDERS)
    if logprobs not in (0, 1):
        _checks.fail(op, "logprobs", "0 or 1", logprobs)
    if max_depth is None:
        if device.type != "cpu" or torch.compiler.is_compiling():
            why = (
                "a graph reads no parents"
                if torch.compiler.is_compiling()
                else f"reading parents on {device} would sync"
            )
            _checks.fail(op, "max_depth", f"given ({why})", "None")
        max_depth = _deepest(parents, cu_num_draft)
    elif not isinstance(max_depth, (int, torch.SymInt)) or max_depth < 0:
        _checks.fail(op, "max_depth", "an int >= 0", max_depth)
    out = _outputs(op, out, B, max_depth, device, bool(logprobs), return_nucleus)
    if B == 0:
        return out
    run = _backends.op("verify_tree", _backends.resolve("verify_tree", backend, device))
    run(
        target, target_is_probs, draft_tokens, parents, cu_num_draft,
        *_verify_args.op_arguments(
            params, position, draft, draft_is_probs, draft_rows, draft_nucleus, draft_params, target_to_draft
        ),
        rule, replacement, bound, factor, rates, order,
        out.tokens, out.num_accepted, out.path, out.num_emitted, out.status, out.logprobs, *(out.nucleus or (None, None, None)),
    )  # fmt: skip
    return out


def _chain_parents(draft_tokens: Tensor, cu_num_draft: Tensor) -> Tensor:
    """int64 [D]: every draft behind the one before it, found on the device."""
    offsets = cu_num_draft.long().clamp_min(0)
    draft = torch.arange(draft_tokens.shape[0], device=draft_tokens.device)
    request = torch.searchsorted(offsets[1:], draft, right=True)
    return draft - offsets[request]


def _deepest(parents: Tensor, cu_num_draft: Tensor) -> int:
    """Length of the longest path; what makes no sense is not there."""
    offsets, values, deepest = cu_num_draft.tolist(), parents.tolist(), 0
    for first, past in itertools.pairwise(offsets):
        depth = {0: 0}
        for node, parent in enumerate(values[max(first, 0) : max(past, 0)][:MAX_NODES], 1):
            if parent in depth:
                depth[node] = depth[parent] + 1
        deepest = max(deepest, *depth.values())
    return deepest


def _outputs(op, out, B: int, K: int, device: torch.device, logprobs: bool, return_nucleus: bool) -> TreeOutput:
    shapes = {"tokens": (B, K + 1), "num_accepted": (B,), "path": (B, K), "num_emitted": (B,), "status": (B,)}
    if out is None:
        return TreeOutput(
            *(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes.values()),
            torch.empty(B, K + 1, dtype=torch.float32, device=device) if logprobs else None,
            empty_nucleus((B, K + 1), device) if return_nucleus else None,
        )
    if not isinstance(out, TreeOutput):
        _checks.fail(op, "out", "a TreeOutput", out)
    for name, shape in shapes.items():
        _checks.output(op, f"out.{name}", getattr(out, name), torch.int32, shape, device)
    if (out.logprobs is not None) != logprobs or (out.nucleus is not None) != return_nucleus:
        _checks.fail(op, "out", "a TreeOutput made with the same logprobs and return_nucleus", "other fields")
    if out.logprobs is not None:
        _checks.output(op, "out.logprobs", out.logprobs, torch.float32, (B, K + 1), device)
    for name, tensor in zip(Nucleus._fields, out.nucleus or (), strict=False):
        _checks.output(op, f"out.nucleus.{name}", tensor, torch.float32, (B, K + 1), device)
    return out
