"""`verify_chain`: one speculative step, from raw logits and drafts to the tokens to emit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks, _schemas, _verify_args
from .nucleus import Nucleus, empty_nucleus
from .params import SamplingTensors
from .status import Status


class VerifyOutput(NamedTuple):
    """`tokens` int32 [B, K + 1]: the accepted drafts, then one sampled token, then -1.
    `num_accepted` int32 [B] · `num_emitted` int32 [B] = num_accepted + 1 (num_accepted where `emit_bonus=False` and all
    drafts were accepted) · `status` int32 [B], bits for rows 0..num_accepted: 1 row with nothing to keep, 2 NaN logit,
    4 q(x) = 0 for a draft, 8 unusable q row, 16 placeholder draft, 32 offsets out of range or d_b > K.
    `logprobs` float32 [B, K + 1] or None: log p of each emitted token under the filtered target, 0 past num_emitted.
    `nucleus` [B, K + 1] or None: Nucleus of each emitted row, 0 past num_emitted."""

    tokens: Tensor
    num_accepted: Tensor
    num_emitted: Tensor
    status: Tensor
    logprobs: Tensor | None = None
    nucleus: Nucleus | None = None


def verify_chain(
    target_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_num_draft: Tensor,
    params: SamplingTensors,
    position: Tensor | None = None,
    *,
    draft_logits: Tensor | None = None,
    draft_rows: Tensor | None = None,
    draft_nucleus: Nucleus | None = None,
    draft_probs: Tensor | None = None,
    draft_params: SamplingTensors | None = None,
    target_to_draft: Tensor | None = None,
    target_probs: Tensor | None = None,
    rule: str = "token",
    max_draft: int | None = None,
    emit_bonus: bool = True,
    filter_order: str = "hf",
    logprobs: int = 0,
    return_nucleus: bool = False,
    out: VerifyOutput | None = None,
    backend: str = "auto",
    validate: bool = False,
) -> VerifyOutput:
    """Verifies a batch of draft chains; the emitted tokens are distributed exactly as the target's own sampling.

    rule "token" (Leviathan et al. 2211.17192, Chen et al. 2302.01318): draft x_i is accepted iff u * q_i(x_i) < p_i(x_i);
    the first rejected row emits a token of max(0, p_i - q_i), renormalised (p_i if nothing is left); a chain accepted to
    its end emits one of p_d. rule "block" (Sun et al. 2403.10444): with running weights w_0 = 1, w_{i+1} = min(1, w_i
    p_i(x_i) / q_i(x_i)), the first i drafts stand if coin i - 1 is below Z / (Z + 1 - w_i), Z = sum max(0, w_i p_i - q_i), or
    below w_d where i = d; the largest such i counts, and its row emits a token of max(0, w_i p_i - q_i). It accepts never
    fewer drafts on average, but reads the rows of every draft; requests with deterministic drafts are verified by "token", which
    has the same law there. rule "coupled" (Daliri et al. 2408.07978): row i samples y_i from p_i with the noise plain
    sampling would use, and drafts are accepted while x_i = y_i; q is not read and the text is that of `sample`.
    Requests with temperature 0 accept drafts that equal the argmax (lowest id). p and q are temperature- and
    filter-processed as their parameters say.

    Request b has d_b = cu_num_draft[b + 1] - cu_num_draft[b] drafts and owns the d_b + 1 consecutive target rows from
    cu_num_draft[b] + b: row i is the distribution of the token that draft i guesses, its last row the bonus row. With
    D = sum d_b, N = D + B and K = max_draft:

    Args:
        target_logits: [R >= N, V] float32, bfloat16 or float16, last dimension contiguous; rows past N are not read. None
            with `target_probs`.
        draft_tokens: int32/int64 [>= D], target ids, request-major. A negative id or one >= V is a placeholder: the chain
            ends there and its row emits from p.
        cu_num_draft: int32 [B + 1], exclusive prefix sum of d_b. Values are clamped to what is there (status 32).
        params: SamplingTensors of the B requests (with `target_probs` only `seed` is used).
        position: int64 [B], absolute position (padding not counted) of the token that row 0 predicts. None is 0: the
            caller gives fresh seeds every step.
        draft_logits: [>= D, Vd], or any [..., Vd] with `draft_rows`, before temperature; None: deterministic drafts
            (one-hot q). Requires `draft_params`.
        draft_rows: int32/int64 [>= D], row of `draft_logits` or `draft_probs` (viewed as [-1, Vd]) of each draft.
        draft_nucleus: Nucleus of float32 [>= D], as `sample(return_nucleus=True)` gave it for each draft; the draft rows
            are then read only where needed. Overrides the filters of `draft_params`, not its temperature.
        draft_probs: float32 [>= D, Vd] or [..., Vd] with `draft_rows`: q, taken as it is.
        draft_params: the parameters the drafts were really sampled with (`params` where they are the same): a guessed q
            biases the output. Temperature 0: deterministic drafts.
        target_to_draft: int32/int64 [V], column of target id v in the draft rows or -1 (q = 0). None: ids are the same,
            and q = 0 for ids >= Vd. Each column that has mass must be some id's: what is mapped nowhere was sampled by nobody.
        target_probs: float32 [R >= N, V] instead of logits: p, taken as it is; no temperature, no filter.
        rule: "token", "block" or "coupled".
        max_draft: K. None derives it from cu_num_draft (CPU tensors only, not under torch.compile). Longer chains are cut
            at K (status 32).
        emit_bonus: False: a chain accepted to its end emits no bonus token, and its last row is left to verify the first
            draft of the next part. Not with rule "block".
        filter_order: as in `nucleus`, for p and q.
        logprobs: 0, or 1 for the emitted tokens' log-probabilities.
        return_nucleus: also return the emitted rows' Nucleus.
        out: a VerifyOutput of the same shapes to write into; every element is written. Outputs may not overlap each
            other or the inputs.
        backend: "auto", "native", "triton" or "eager".
        validate: also read the values and raise ValueError for what would set a status bit (a sync on devices), except
            q(x) = 0, which filters that differ between drafting and verifying can bring about.

    Returns:
        VerifyOutput.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Randomness: Philox4x32-10 keyed by the request's seed; coins on stream 1 at (anchor = position[b], offset i), the
    emitted token on stream 2 at its absolute position. No host sync; output shapes depend on B and K only. The caller's
    tensors are not modified, nothing of size [rows, V] is allocated by the native and Triton backends.

    >>> logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    >>> params = SamplingTensors.create(temperature=0.0)
    >>> verify_chain(logits, torch.tensor([1, 0]), torch.tensor([0, 2], dtype=torch.int32), params).tokens
    tensor([[ 1,  2, -1]], dtype=torch.int32)
    """
    op = "verify_chain"
    target, target_is_probs = _verify_args.target_of(op, target_logits, target_probs)
    device, vocab = target.device, target.shape[1]
    B = _verify_args.batch_of(op, cu_num_draft, draft_tokens, params, position, device)
    if max_draft is None:
        if device.type != "cpu":
            _checks.fail(op, "max_draft", f"given for tensors on {device} (reading cu_num_draft would sync)", "None")
        lengths = cu_num_draft.long().diff()
        # Offsets that make no sense ask for no more than there is.
        max_draft = min(max(int(lengths.max()), 0), draft_tokens.shape[0]) if B else 0
    elif not isinstance(max_draft, (int, torch.SymInt)) or max_draft < 0:
        _checks.fail(op, "max_draft", "an int >= 0", max_draft)
    K = max_draft

    draft, draft_is_probs, draft_params = _verify_args.draft_of(
        op, B, cu_num_draft, draft_tokens, draft_logits, draft_rows, draft_nucleus, draft_probs, draft_params,
        target_to_draft, vocab, device,
    )  # fmt: skip
    if rule == "block" and not emit_bonus:
        must = "True for rule 'block' (verifying the drafts of a step part by part is exact under 'token' and 'coupled' only)"
        _checks.fail(op, "emit_bonus", must, "False")
    rule_index = _checks.choice(op, "rule", rule, _schemas.RULES)
    order = _checks.choice(op, "filter_order", filter_order, _schemas.FILTER_ORDERS)
    if logprobs not in (0, 1):
        _checks.fail(op, "logprobs", "0 or 1", logprobs)

    out = _outputs(op, out, B, K, device, bool(logprobs), return_nucleus)
    if validate:
        _verify_args.validate(
            op, target, target_is_probs, params, draft_params, draft_tokens, cu_num_draft, draft, draft_is_probs, draft_rows,
            target_to_draft, K,
        )  # fmt: skip
    if B == 0:
        return out
    run = _backends.op(op, _backends.resolve(op, backend, device))
    run(
        target, target_is_probs, draft_tokens, cu_num_draft,
        *_verify_args.op_arguments(
            params, position, draft, draft_is_probs, draft_rows, draft_nucleus, draft_params, target_to_draft
        ),
        rule_index, emit_bonus, order, out.tokens, out.num_accepted, out.num_emitted, out.status, out.logprobs,
        *(out.nucleus or (None, None, None)),
    )  # fmt: skip
    if validate and bool((out.status & ~Status.ZERO_Q).any()):
        b = int((out.status & ~Status.ZERO_Q).nonzero()[0])
        raise ValueError(f"{op}: request {b} must be free of faults, got status {Status(int(out.status[b]))!r}")
    return out


def _outputs(op, out, B: int, K: int, device: torch.device, logprobs: bool, return_nucleus: bool) -> VerifyOutput:
    if out is None:
        return VerifyOutput(
            torch.empty(B, K + 1, dtype=torch.int32, device=device),
            torch.empty(B, dtype=torch.int32, device=device),
            torch.empty(B, dtype=torch.int32, device=device),
            torch.empty(B, dtype=torch.int32, device=device),
            torch.empty(B, K + 1, dtype=torch.float32, device=device) if logprobs else None,
            empty_nucleus((B, K + 1), device) if return_nucleus else None,
        )
    if not isinstance(out, VerifyOutput):
        _checks.fail(op, "out", "a VerifyOutput", out)
    _checks.output(op, "out.tokens", out.tokens, torch.int32, (B, K + 1), device)
    for name in ("num_accepted", "num_emitted", "status"):
        _checks.output(op, f"out.{name}", getattr(out, name), torch.int32, (B,), device)
    if (out.logprobs is not None) != logprobs or (out.nucleus is not None) != return_nucleus:
        _checks.fail(op, "out", "a VerifyOutput made with the same logprobs and return_nucleus", "other fields")
    if out.logprobs is not None:
        _checks.output(op, "out.logprobs", out.logprobs, torch.float32, (B, K + 1), device)
    for name, tensor in zip(Nucleus._fields, out.nucleus or (), strict=False):
        _checks.output(op, f"out.nucleus.{name}", tensor, torch.float32, (B, K + 1), device)
    return out
