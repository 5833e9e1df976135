"""`build_tree`: the tree of the likeliest drafted candidates, and who attends whom in it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks
from .verify_tree import MAX_NODES

MAX_CANDIDATES = 4096


class DraftTree(NamedTuple):
    """Trees of n nodes behind the root, which is node 0. Nodes that are not there come last and are -1.

    `tokens` int32 [B, n] and `parents` int32 [B, n], node numbers: flattened, they are what `verify_tree` takes ·
    `depth` int32 [B, n + 1]: node i is the token at position - 1 + depth, with `position` that of the token behind the root ·
    `index` int32 [B, n]: the candidate behind each node, by which a drafter finds its saved rows and hidden states ·
    `mask` bool [B, n + 1, n + 1]: node i attends node j, which is i or above it; a node that is not there attends itself ·
    `packed_mask` int32 [B, n + 1, ceil((n + 1) / 32)]: the same as bits, j % 32 of word j // 32."""

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    index: Tensor
    mask: Tensor
    packed_mask: Tensor


def build_tree(
    log_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    num_nodes: int,
    *,
    out: DraftTree | None = None,
    backend: str = "auto",
) -> DraftTree:
    """Keeps the candidates that are likeliest under the drafter, as a tree (EAGLE-2, 2406.16858: its reranking):

        score(c) = score(parent of c) + min(log q(c | parent), 0),    score(root) = 0

    in float32, one addition after another from the root. The num_nodes best are kept, equal ones in the order in which they
    were drafted. No candidate ranks before the one that it hangs from, so each is kept with its parent. Nodes are numbered in
    the order of their candidates, parents before children.

    Verify the tree by rule "target_only". Its shape depends on the drafted tokens but not on the target's randomness, which is
    all that this rule asks; candidates that are q's largest, or that were kept for their q, are no draws from q, so "recursive"
    and "traversal" would be biased.

    Args:
        log_probs: float32 [B, C], C in 1..4096: log q of each candidate given what it hangs from. Above 0 it counts as 0; NaN
            and -inf: the candidate is not there. One whose score is not finite is not there either.
        tokens: int32/int64 [B, C]. A candidate whose token is negative or above 2^31 - 1 is not there.
        parents: int32/int64 [B, C]: what each candidate hangs from, 0 for the root, c + 1 for candidate c, which comes before
            it. -1 (or any other value): the candidate is not there, nor what hangs from it.
        num_nodes: n in 1..128. Where fewer candidates are there, the last nodes are not.
        out: a DraftTree of the same shapes to write into; every element is written.

    Returns:
        DraftTree.

    Raises:
        ValueError: an argument of the wrong shape, dtype, device or range; nothing is written then.
        BackendUnavailable: `backend` names one that cannot run here.

    Nothing waits for the device and shapes depend on the arguments' shapes and n alone, so a CUDA graph can hold it.

    Two candidates for the next token and two behind the first of them, of which three are kept and verified:

    >>> import specdec_kernels as sk
    >>> q = torch.tensor([[0.6, 0.1, 0.7, 0.2]])
    >>> tree = sk.build_tree(q.log(), torch.tensor([[5, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1]]), 3)
    >>> tree.tokens, tree.parents, tree.index
    (tensor([[5, 3, 4]], dtype=torch.int32), tensor([[0, 1, 1]], dtype=torch.int32), tensor([[0, 2, 3]], dtype=torch.int32))
    >>> logits = torch.zeros(4, 8)  # of the target, a row for the root and each node
    >>> logits[[0, 1, 2, 3], [5, 4, 0, 7]] = 9.0
    >>> cu, params = torch.tensor([0, 3], dtype=torch.int32), sk.SamplingTensors.create(temperature=0.0)
    >>> out = sk.verify_tree(logits, tree.tokens.flatten(), tree.parents.flatten(), cu, params, rule="target_only")
    >>> out.tokens, out.path
    (tensor([[5, 4, 7]], dtype=torch.int32), tensor([[1, 3]], dtype=torch.int32))
    """
    op = "build_tree"
    if not isinstance(log_probs, Tensor) or log_probs.dim() != 2 or log_probs.dtype != torch.float32:
        _checks.fail(op, "log_probs", "float32 [B, C]", log_probs)
    (B, C), device = log_probs.shape, log_probs.device
    if not 1 <= C <= MAX_CANDIDATES:
        _checks.fail(op, "log_probs", f"of 1 to {MAX_CANDIDATES} candidates", log_probs)
    for name, value in (("tokens", tokens), ("parents", parents)):
        fits = isinstance(value, Tensor) and value.dtype in _checks.INDEX_DTYPES and value.device == device
        if not fits or value.shape != log_probs.shape:
            _checks.fail(op, name, f"int32 or int64 [B={B}, C={C}] on {device}", value)
    whole = isinstance(num_nodes, (int, torch.SymInt)) and not isinstance(num_nodes, bool)
    if not whole or not 1 <= num_nodes <= MAX_NODES:
        _checks.fail(op, "num_nodes", f"an int in 1..{MAX_NODES}", num_nodes)
    out = _outputs(op, out, B, num_nodes, device)
    if B:
        run = _backends.op(op, _backends.resolve(op, backend, device))
        run(log_probs.contiguous(), tokens.contiguous(), parents.contiguous(), *out)
    return out


def _outputs(op: str, out, B: int, n: int, device: torch.device) -> DraftTree:
    shapes = DraftTree((B, n), (B, n), (B, n + 1), (B, n), (B, n + 1, n + 1), (B, n + 1, (n + 32) // 32))
    dtypes = DraftTree(*(torch.bool if name == "mask" else torch.int32 for name in DraftTree._fields))
    if out is None:
        return DraftTree(*(torch.empty(s, dtype=dtype, device=device) for s, dtype in zip(shapes, dtypes, strict=True)))
    if not isinstance(out, DraftTree):
        _checks.fail(op, "out", "a DraftTree", out)
    for name in DraftTree._fields:
        _checks.output(op, f"out.{name}", getattr(out, name), getattr(dtypes, name), getattr(shapes, name), device)
    return out
