"""Lossy acceptance rules, apart from the exact ones: what they emit does not have the target's law, and none is ever a default.

Trees, layout, outputs, status bits and randomness are those of `verify_tree`; nothing here reads a q."""

from __future__ import annotations

import math

from torch import Tensor

from . import _checks, _schemas
from .params import SamplingTensors
from .verify_tree import TreeOutput, run_rule

TYPICAL, THRESHOLD, SYNTHETIC = (len(_schemas.TREE_RULES) + i for i in range(len(_schemas.LOSSY_RULES)))


def typical(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params: SamplingTensors,
    position: Tensor | None = None,
    *,
    parents: Tensor | None = None,
    epsilon: float = 0.09,
    delta: float = 0.3,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
    logprobs: int = 0,
    return_nucleus: bool = False,
    out: TreeOutput | None = None,
    backend: str = "auto",
) -> TreeOutput:
    """Typical acceptance (Medusa, 2401.10774): a draft that is likely enough for its row stands, without a coin.

    Draft x of node c is accepted iff its parent is and

        p(x) > min(epsilon, delta * exp(-H(p))),    H(p) = -sum p log p in nats,

    p the parent's row, filtered and renormalised. Of the accepted nodes the deepest wins, of several the one with the largest sum of
    log p along its path, then the lowest id; the emitted token is sampled from p of that node.

    What it gives up: text is the drafter's wherever that is likely enough, so it is more predictable than the target's samples, at any
    temperature above 0, and depends on the drafter. It is never a default.

    Args:
        target_logits: [R >= N, V] float32, bfloat16 or float16, rows as in `verify_tree`; None with `target_probs`.
        draft_tokens: int32/int64 [>= D], request-major; a negative id or one >= V is a child that is not there.
        cu_num_draft: int32 [B + 1], exclusive prefix sum of drafts per request; at most 128 of a request are looked at.
        params, position, target_probs, filter_order, logprobs, return_nucleus, backend: as in `verify_tree`. Requests with
            temperature 0 follow the argmax; `target_probs` are taken as they are, in H too (at least 0).
        parents: int32/int64 [>= D] as in `verify_tree`. None: chains, every draft behind the one before it.
        epsilon: in (0, 1], taken as float32. A p(x) up to 2^-126 is never accepted.
        delta: finite and >= 0, taken as float32.
        max_depth: K, as in `verify_tree`; required but for CPU tensors outside torch.compile.
        out: a TreeOutput of the same shapes to write into; every element is written.

    Returns:
        TreeOutput: tokens [B, K + 1] padded with -1, and the rest of `verify_tree`'s.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 9.0]])
    >>> params, cu = SamplingTensors.create(seed=[1]), torch.tensor([0, 1], dtype=torch.int32)
    >>> lossy.typical(logits, torch.tensor([1]), cu, params).num_accepted
    tensor([1], dtype=torch.int32)
    """
    _number("lossy.typical", "epsilon", epsilon, "in (0, 1]", lambda x: 0 < x <= 1)
    _number("lossy.typical", "delta", delta, "finite and >= 0", lambda x: 0 <= x < math.inf)
    return run_rule(
        "lossy.typical", TYPICAL, target_logits, draft_tokens, parents, cu_num_draft, params, position, target_probs, max_depth,
        filter_order, logprobs, return_nucleus, out, backend, bound=epsilon, factor=delta,
    )  # fmt: skip


def threshold(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params: SamplingTensors,
    position: Tensor | None = None,
    *,
    parents: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
    logprobs: int = 0,
    return_nucleus: bool = False,
    out: TreeOutput | None = None,
    backend: str = "auto",
) -> TreeOutput:
    """`verify_tree`'s "target_only" with SGLang's thresholds: a child is also accepted if p(c) >= threshold_single, and the others
    as if p were 1 / threshold_acc times as large.

    With one coin u a node (that of "target_only"), its children in ascending order, a token once: the first one is accepted for which

        u * threshold_acc < the running sum of p,  or  p(c) >= threshold_single;

    none: a token of p without the children's. With both at 1 it is "target_only", bit for bit, and exact.

    What it gives up: below 1 drafts are emitted more often than the target would, the others less often. One child x and
    threshold_acc = a emit x with probability min(1, p(x) / a), which is that much more than p(x). It is never a default.

    Args:
        threshold_single, threshold_acc: in [2^-126, 1], taken as float32.
        The others: as in `typical`.

    Returns:
        TreeOutput, and raises what `typical` does.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 9.0]])
    >>> params, cu = SamplingTensors.create(seed=[1]), torch.tensor([0, 1], dtype=torch.int32)
    >>> lossy.threshold(logits, torch.tensor([1]), cu, params, threshold_single=0.2).num_accepted
    tensor([1], dtype=torch.int32)
    """
    for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        _number("lossy.threshold", name, value, "in [2^-126, 1]", lambda x: 2.0**-126 <= x <= 1)
    return run_rule(
        "lossy.threshold", THRESHOLD, target_logits, draft_tokens, parents, cu_num_draft, params, position, target_probs, max_depth,
        filter_order, logprobs, return_nucleus, out, backend, bound=threshold_single, factor=threshold_acc,
    )  # fmt: skip


def synthetic(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params: SamplingTensors,
    position: Tensor | None = None,
    *,
    rates: Tensor,
    parents: Tensor | None = None,
    target_probs: Tensor | None = None,
    max_depth: int | None = None,
    filter_order: str = "hf",
    logprobs: int = 0,
    return_nucleus: bool = False,
    out: TreeOutput | None = None,
    backend: str = "auto",
) -> TreeOutput:
    """Drafts accepted at given rates, for load tests only (as vLLM's `rejection_sample_method=synthetic`).

    The first child of a node (lowest id, a token that is one) is accepted iff the node's coin, that of "target_only", is below
    rates[depth], depth 0 for children of the root; the walk ends at the first that is not, with a token of p there. So a chain
    of d drafts has sum over i <= d of rates[0] * ... * rates[i - 1] accepted ones on average. Rows are visited and read as by a real
    rule. Requests with temperature 0 do the same, and end with their argmax.

    What it gives up: everything. The text is the drafter's, whatever the target says of it. It is never a default.

    Args:
        rates: float32 [n], by depth, given that the drafts before were accepted. Below 0 or NaN is 0, above 1 is 1; depths
            from n on have rate 0.
        The others: as in `typical`.

    Returns:
        TreeOutput, and raises what `typical` does. `logprobs` of an accepted draft is -inf where p is 0.

    >>> params, cu = SamplingTensors.create(seed=[1]), torch.tensor([0, 2], dtype=torch.int32)
    >>> rates = torch.tensor([1.0, 0.0])
    >>> lossy.synthetic(torch.zeros(3, 5), torch.tensor([4, 2]), cu, params, rates=rates).num_accepted
    tensor([1], dtype=torch.int32)
    """
    if not isinstance(rates, Tensor):
        _checks.fail("lossy.synthetic", "rates", "float32 [n]", rates)
    return run_rule(
        "lossy.synthetic", SYNTHETIC, target_logits, draft_tokens, parents, cu_num_draft, params, position, target_probs, max_depth,
        filter_order, logprobs, return_nucleus, out, backend, rates=rates,
    )  # fmt: skip


def _number(op: str, name: str, value, must: str, right) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not right(value):
        _checks.fail(op, name, must, value)
