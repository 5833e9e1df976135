"""A draft head over a part of the target's vocabulary: from what checkpoints store to what the ops take."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks


def target_to_draft_from_d2t(draft_to_target: Tensor, vocab_size: int, *, offsets: bool) -> Tensor:
    """The `target_to_draft` that `sample`, `verify_chain` and `verify_tree` take, of a draft head over Vd of the target's V ids.

    Args:
        draft_to_target: int32/int64 [Vd], for each column of the draft logits its target id or, with `offsets`, what has to be
            added to the column to get it.
        vocab_size: V.
        offsets: True for `d2t` as EAGLE-3 checkpoints store it, False for target ids themselves (SGLang adds the columns when it
            loads: its `hot_token_id` holds ids). The two look alike, and a mix-up gives verification a wrong q: biased output.

    Returns:
        int32 [V] on the same device: the column of each target id, -1 for ids that the head cannot draft (q = 0 there).

    Raises:
        ValueError: an argument of the wrong shape or dtype, an id outside [0, V), or one that two columns have. Reads the
            values, so it waits for the device: for loading, not for a step.

    >>> target_to_draft_from_d2t(torch.tensor([0, 2, 2]), 6, offsets=True)
    tensor([ 0, -1, -1,  1,  2, -1], dtype=torch.int32)
    """
    op = "target_to_draft_from_d2t"
    if not isinstance(draft_to_target, Tensor):
        _checks.fail(op, "draft_to_target", "int32 or int64 [Vd]", draft_to_target)
    device = draft_to_target.device
    _checks.vector(op, "draft_to_target", draft_to_target, _checks.INDEX_DTYPES, 1, "Vd", device, at_least=True)
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        _checks.fail(op, "vocab_size", "an int >= 1", vocab_size)
    if not isinstance(offsets, bool):
        _checks.fail(op, "offsets", "True or False", offsets)
    column = torch.arange(draft_to_target.shape[0], device=device)
    ids = draft_to_target.long() + column if offsets else draft_to_target.long()
    outside = (ids < 0) | (ids >= vocab_size)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        _checks.fail(op, "draft_to_target", f"target ids in [0, {vocab_size})", f"{int(ids[at])} for column {at}")
    number = torch.bincount(ids, minlength=vocab_size)
    if bool((number > 1).any()):
        _checks.fail(op, "draft_to_target", "one column per target id", f"several for id {int(number.argmax())}")
    out = torch.full((vocab_size,), -1, dtype=torch.int32, device=device)
    out[ids] = column.to(torch.int32)
    return out
