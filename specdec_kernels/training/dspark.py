"""The loss that trains a `DSparkModel` on texts and the target's states of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.drafters.dspark_part import DSparkPart
from ..decoding.dspark_model import DSparkModel
from .features import FeatureBatch
from .losses import log_softmax
from .module import PartTraining


class DSparkBatch(NamedTuple):
    """B texts of S tokens, padded at the end with any valid id; the target's states of padding mean nothing.

    tokens: int64 [B, S] · states: [B, S, T * Ht], outputs of the tapped layers, side by side · hidden: [B, S, Ht], what the
    target's LM head reads · anchors: int64 [B, A], in [0, S): each block's first token · trained: bool [B, S], the tokens whose
    prediction counts, False for padding; a block's slots count up to the first that predicts another one (None: all count) ·
    log_norm: float32 [B, S], log sum exp of the target's whole logits row behind each token, where the caller has it.
    """

    tokens: Tensor
    states: Tensor
    hidden: Tensor
    anchors: Tensor
    trained: Tensor | None = None
    log_norm: Tensor | None = None


class DSparkLoss(NamedTuple):
    """`loss` to minimise · its parts `ce`, `tv`, `confidence`, before their weights · `acceptance` [block_size], the mean of c* by
    slot, 0 where no slot counts · `accepted`, drafts of a block expected to be accepted by rule "token" at temperature 1 ·
    `confidence_error`, the mean of |c - c*|. All float32, scalars but for one; only `loss` has a gradient."""

    loss: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor
    acceptance: Tensor
    accepted: Tensor
    confidence_error: Tensor


def dspark_loss(
    model: DSparkModel,
    batch: DSparkBatch,
    *,
    head: Tensor | None = None,
    weights: tuple[float, float, float] = (0.1, 0.9, 1.0),
    decay: float = 4.0,
) -> DSparkLoss:
    """DSpark's loss (2607.05147) of blocks behind `batch.anchors`, teacher forced: every slot has the text's own token before it.

        loss = 0.1 · CE(x_k, q_k) + 0.9 · TV(p_k, q_k) + 1.0 · BCE(c_k, c*_k),    c*_k = sum over v of min(p_k(v), q_k(v)) = 1 - TV

    each a mean over the slots that count, slot k = 1, 2, .. with the weight exp(-(k - 1) / decay). p is the target's distribution
    softmax(head · hidden) at temperature 1, q the drafter's. With a reduced vocabulary q has mass on its ids alone, p is still
    normalised over all of them, and tokens that q cannot give have no CE. c* is a constant for the confidences.

    DeepSpec's code weights the L1 norm |p - q|, twice the TV, by 0.9: `weights=(0.1, 1.8, 1.0)`.

    Args:
        model: the drafter; gradients go to its parameters that want one.
        batch: see `DSparkBatch`.
        head: [V, Ht], the target's LM head; None: that of `model.target`. With `log_norm`, of a reduced vocabulary the kept rows
            [Vd, Ht] alone will do.
        weights: of the three parts, each >= 0. The last is not used for a model without confidence head.
        decay: of the weights in slots, > 0.

    Raises:
        ValueError: an argument of the wrong shape or range.
    """
    tokens, anchors, slots = batch.tokens, batch.anchors, model.config.block_size
    _check(model, batch, weights, decay)
    length = tokens.shape[1]
    h = model.forward_blocks(batch.states, tokens, anchors)
    # Slot k stands on token anchor + k and predicts the one behind it, as the target's state there does.
    at = anchors[..., None] + torch.arange(slots, device=anchors.device)
    counts = at + 1 < length
    if batch.trained is not None:
        counts &= _take(batch.trained, (at + 1).clamp(max=length - 1))
        counts = counts.to(torch.int32).cumprod(-1).bool()
    row, column = torch.where(counts)[0], at[counts]
    if len(row) == 0:
        zero = h.float().sum() * 0.0
        nothing = zero.detach()
        return DSparkLoss(zero, nothing, nothing, nothing, nothing.expand(slots).clone(), nothing, nothing)
    h, before, label = h[counts], tokens[row, column], tokens[row, column + 1]
    log_norm = None if batch.log_norm is None else batch.log_norm[row, column]

    p = _target_probabilities(model, batch.hidden[row, column], model.target_head() if head is None else head, log_norm)
    log_q = log_softmax(model.block_logits(h, before))
    overlap = torch.minimum(p, log_q.exp()).sum(-1).clamp(max=1.0)
    mapping = model.target_to_draft()
    draft = label if mapping is None else mapping.to(label.device)[label].long()
    kept = draft >= 0
    ce = torch.where(kept, -log_q.gather(1, draft.clamp_min(0)[:, None])[:, 0], 0.0)

    weight = torch.exp(-torch.arange(slots, device=h.device) / decay).expand(counts.shape)[counts]
    ce = (ce * weight).sum() / (weight * kept).sum().clamp_min(1e-12)
    tv, best = _mean(1.0 - overlap, weight), overlap.detach()
    loss = weights[0] * ce + weights[1] * tv
    confidence = error = best.new_zeros(())
    if model.confidence_head is not None:
        logit = model.confidence_logits(h, before).float()
        confidence = _mean(F.binary_cross_entropy_with_logits(logit, best, reduction="none"), weight)
        error = (torch.sigmoid(logit.detach()) - best).abs().mean()
        loss = loss + weights[2] * confidence
    by_slot = best.new_zeros(counts.shape)
    by_slot[counts] = best
    acceptance = by_slot.flatten(0, 1).sum(0) / counts.flatten(0, 1).sum(0).clamp_min(1)
    accepted = by_slot.cumprod(-1).sum() / counts[..., 0].sum().clamp_min(1)
    return DSparkLoss(loss, ce.detach(), tv.detach(), confidence.detach(), acceptance, accepted, error)


class DSparkTraining(PartTraining):
    """`dspark_loss` of blocks behind random anchors of each text, all texts of one folder.

    blocks: anchors of a text in a step · log_norm is computed from the states when a text is first seen, and kept.
    """

    def __init__(self, part: DSparkPart, *, blocks: int = 24):
        super().__init__(part)
        if blocks < 1:
            raise ValueError(f"train dspark: blocks must be >= 1, got {blocks}")
        self.blocks = blocks
        self._log_norms: dict[int, Tensor] = {}

    def forward(self, batch: FeatureBatch) -> dict[str, Tensor]:
        model, device = self.part.model, batch.tokens.device
        place = torch.arange(batch.tokens.shape[1], device=device)
        trained = (place >= batch.starts[:, None]) & (place < batch.lengths[:, None])
        # A block behind token a predicts a + 1 first. In training anchors are drawn anew at every step.
        able = F.pad(trained[:, 1:], (0, 1))
        score = torch.rand(able.shape, device=device) if self.training else (place * 0.618034 % 1).expand(able.shape)
        count = min(self.blocks, able.shape[1])
        anchors = score.masked_fill(~able, -1.0).topk(count, 1).indices
        # Texts shorter than that repeat an anchor.
        anchors = torch.where(able.gather(1, anchors), anchors, anchors[:, :1])
        log_norm = self._log_norm(batch, trained | able)
        data = DSparkBatch(batch.tokens, batch.states, batch.last, anchors, trained, log_norm)
        out = dspark_loss(model, data, head=self.part.head)
        figures = {f"accept_{k + 1}": a for k, a in enumerate(out.acceptance)}
        return {
            "loss": out.loss, "tv": out.tv, "accepted": out.accepted, "confidence_error": out.confidence_error, **figures
        }  # fmt: skip

    @torch.no_grad()
    def _log_norm(self, batch: FeatureBatch, wanted: Tensor) -> Tensor:
        """log sum exp of the target's whole rows, where a slot may count. It takes most of a step's time: every row of the head."""
        new = [row for row, text in enumerate(batch.texts) if text not in self._log_norms]
        if new:
            weight, kind = self.part.target.get_output_embeddings().weight, wanted.device.type
            if torch.is_autocast_enabled(kind):  # here once, not in every product
                weight = weight.to(torch.get_autocast_dtype(kind))
            rows = batch.last[new][wanted[new]]
            norms = torch.cat(
                [F.linear(part.to(weight.dtype), weight).float().logsumexp(-1) for part in rows.split(128)]
            )
            for row, part in zip(new, norms.split(wanted[new].sum(1).tolist()), strict=True):
                self._log_norms[batch.texts[row]] = part
        out = batch.last.new_zeros(wanted.shape)
        out[wanted] = torch.cat([self._log_norms[text] for text in batch.texts])
        return out


def _mean(value: Tensor, weight: Tensor) -> Tensor:
    return (value * weight).sum() / weight.sum()


def _take(table: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [B, A, K] of each row of `table` [B, S]."""
    return table.gather(1, index.flatten(1)).view(index.shape)


@torch.no_grad()
def _target_probabilities(model: DSparkModel, hidden: Tensor, head: Tensor, log_norm: Tensor | None) -> Tensor:
    """p of the drafter's columns, float32 [R, Vd]."""
    ids, hidden = model.kept_ids, hidden.to(head.dtype)
    whole = None
    if ids is not None and (log_norm is None or len(head) != len(ids)):
        if log_norm is None:
            whole = F.linear(hidden, head).float()
            log_norm = whole.logsumexp(-1)
        logits = F.linear(hidden, head[ids.to(head.device)]).float() if whole is None else whole[:, ids.to(head.device)]
    else:
        logits = F.linear(hidden, head).float()
        log_norm = logits.logsumexp(-1) if log_norm is None else log_norm
    return torch.exp(logits - log_norm[:, None])


def _check(model: DSparkModel, batch: DSparkBatch, weights: tuple[float, float, float], decay: float) -> None:
    def fail(name: str, must: str, got) -> None:
        raise ValueError(f"dspark_loss: {name} must be {must}, got {got}")

    config = model.config
    if batch.tokens.dim() != 2 or batch.tokens.dtype != torch.int64:
        fail("batch.tokens", "int64 [B, S]", f"{batch.tokens.dtype} {list(batch.tokens.shape)}")
    shape = tuple(batch.tokens.shape)
    wanted: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("batch.states", batch.states, (*shape, len(config.target_layer_ids) * config.target_hidden_size)),
        ("batch.hidden", batch.hidden, (*shape, config.target_hidden_size)),
        ("batch.trained", batch.trained, shape),
        ("batch.log_norm", batch.log_norm, shape),
    )
    for name, tensor, must in wanted:
        if tensor is not None and tuple(tensor.shape) != must:
            fail(name, str(list(must)), list(tensor.shape))
    anchors = batch.anchors
    if anchors.dim() != 2 or anchors.shape[0] != shape[0] or anchors.dtype != torch.int64:
        fail("batch.anchors", f"int64 [{shape[0]}, A]", f"{anchors.dtype} {list(anchors.shape)}")
    if anchors.numel() and not 0 <= int(anchors.min()) <= int(anchors.max()) < shape[1]:
        fail("batch.anchors", f"in [0, {shape[1]})", [int(anchors.min()), int(anchors.max())])
    if len(weights) != 3 or not all(w >= 0 for w in weights):
        fail("weights", "three numbers >= 0", weights)
    if not decay > 0:
        fail("decay", "> 0", decay)
