"""EAGLE: one layer that goes on from the target's own features, and trees of its likeliest continuations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import SamplingTensors, build_tree
from ...build_tree import MAX_CANDIDATES
from ..cache import RowCache, check_cache
from ..draft_stack import DraftStack, StackForward
from ..masks import TreeShape
from ..transfers import on_device, padded_on_device
from .base import DraftBatch, DraftContext, StepOutcome
from .chain import ChainDrafter
from .part import DraftPart
from .pending_states import PendingStates


class EagleModel(DraftPart):
    """The trained part of an EAGLE drafter (2401.15077, 2406.16858; with several taps and no feature loss as EAGLE-3, 2503.01840).

    Entry i pairs the target's feature of token i with the embedding of token i + 1, and predicts token i + 2:

        g_i = layer(fc [norm(e_{i+1}); norm(f_i)]),   q(. | tokens 0..i+1) = softmax(head norm(g_i))

    where f_i = fuse(states of the tapped layers) while the target's features are known, and g_{i-1} behind them.

    Args:
        target: a transformers causal LM.
        taps: layers whose output states are f, 0 for the first; -1: what the LM head reads (EAGLE-1 and 2).
        draft_ids: see `DraftPart`.
        intermediate_size: of the layer's MLP; None: the target's.
    """

    kind = "eagle"

    def __init__(self, target, *, taps: Sequence[int] = (-1,), draft_ids=None, intermediate_size: int | None = None):
        super().__init__(target, draft_ids=draft_ids, taps=list(taps), intermediate_size=intermediate_size)
        size, eps = self.hidden_size, getattr(target.config.get_text_config(decoder=True), "rms_norm_eps", 1e-6)
        self.fuse = nn.Linear(len(taps) * size, size, bias=False) if len(taps) > 1 else nn.Identity()
        self.norm_token, self.norm_feature = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.to(device=target.device, dtype=target.dtype)
        self.stack = DraftStack(target, 1, intermediate_size=intermediate_size)
        self.stack.start_from(target)
        with torch.no_grad():
            # The layer starts as the target's last one, reading the feature.
            self.fc.weight.normal_(0, 0.02)
            self.fc.weight[:, size:] += torch.eye(size, dtype=self.fc.weight.dtype, device=self.fc.weight.device)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.options["taps"])

    def join(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Inputs of the layer, [.., H]."""
        return self.fc(torch.cat([self.norm_token(embeddings), self.norm_feature(features)], -1))


class EagleDrafter(ChainDrafter):
    """Drafts with an `EagleModel`: as EAGLE-2 a tree of the likeliest continuations (deterministic, verified by "target_only" or
    "coupled"), or with `tree=False` a sampled chain (rules "token", "block", "coupled").

    A tree grows level by level: the `top_k` likeliest tokens behind each of a level's nodes are candidates, the `top_k` best of
    these by the product of their probabilities are the next level's nodes; `build_tree` keeps the `max_nodes` best of all.

    The layer's cache holds one entry for each token of the text but the last; entries that were drafted are dropped when the
    step is over, and the accepted tokens are fed again with the target's own features.

    Args:
        model: the trained part; its target is the one to be decoded.
        tree: see above.
        top_k: nodes of a level, and children of a node.
        matmul_dtype: of the packed matrices in float32 models on the CPU, torch.float32 or torch.bfloat16; None: bfloat16 where the
            processor multiplies it natively. It changes drafts, not the law of the text; a seed's text under rules "token" and
            "block" depends on it as on all that drafts do.
        cache, page_size: as in `SpeculativeDecoder`.
    """

    def __init__(
        self, model: EagleModel, *, tree: bool = True, top_k: int = 4, matmul_dtype: torch.dtype | None = None,
        cache: str = "ragged", page_size: int = 16,
    ):  # fmt: skip
        if not isinstance(top_k, int) or not 1 <= top_k <= 32:
            raise ValueError(f"EagleDrafter: top_k must be an int in 1..32, got {top_k!r}")
        if tree and top_k > len(model.head):
            raise ValueError(
                f"EagleDrafter: top_k must be at most the {len(model.head)} ids that can be drafted, got {top_k}"
            )
        self.model, self.top_k = model, top_k
        self.trees = self.deterministic = tree
        self.taps = model.taps
        self.target_to_draft = model.target_to_draft()
        self.cache, self.page_size = check_cache("EagleDrafter", cache, page_size), page_size
        self.calls = 0
        self.forward = StackForward(model.stack, matmul_dtype=matmul_dtype)
        self._fc = self.forward.linear(lambda: model.fc.weight)
        self._fuse = self.forward.linear(lambda: model.fuse.weight) if len(self.taps) > 1 else model.fuse
        self._head = self.forward.linear(lambda: model.head)

    def check_target(self, target) -> None:
        if target is not self.model.target:
            raise ValueError("EagleDrafter: target must be the model's own, got another one")

    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingTensors, max_tokens: int) -> None:
        self.forward.refresh()
        self._begin_chains(params)
        spare = 64 if self.trees else 16
        self._cache: RowCache = self.forward.new_cache(
            len(prompts), max_tokens + spare, self.cache, page_size=self.page_size
        )
        self._pending = PendingStates("EagleDrafter", prompts)

    def observe(self, outcome: StepOutcome) -> None:
        self._pending.add(outcome)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._cache.select_rows(rows)
        self._pending.select_rows(rows)

    def propose(self, context: DraftContext) -> DraftBatch | None:
        if max(context.budgets, default=0) == 0:
            return None
        batch = self._propose_tree(context) if self.trees else super().propose(context)
        # What was drafted is read again with the target's features.
        drafted = [n - (len(t) - 1) for n, t in zip(self._cache.lengths, context.tokens, strict=True)]
        self._cache.rollback(drafted)
        return batch

    def _read(self, embeddings: Tensor, features: Tensor, counts: list[int], tree: TreeShape | None = None) -> Tensor:
        """States [B * q, H] behind the layer; what was read stays in the cache."""
        model = self.model
        pair = torch.cat([model.norm_token(embeddings), model.norm_feature(features)], -1)
        out = self.forward(self._fc(pair.flatten(0, 1)).view_as(embeddings), counts, self._cache, tree)
        self._cache.advance(counts)
        self.calls += 1
        return out

    def _logits(self, states: Tensor) -> Tensor:
        return self._head(self.forward.norm(states))

    def _last(self, context: DraftContext) -> Tensor:
        """Reads the pairs that the target has given since the last time; states [B, H] of each row's last one."""
        pending = self._pending.take()
        assert pending is not None  # each step gives states of a token of every request
        states, counts = pending
        tokens = padded_on_device(
            [t[len(t) - n :] for t, n in zip(context.tokens, counts, strict=True)], self.forward.device
        )
        embeddings = self.model.embed(tokens)
        features = nn.utils.rnn.pad_sequence(self._fuse(states).split(counts), batch_first=True)
        states = self._read(embeddings, features, counts).view(*tokens.shape, -1)
        return torch.stack([states[b, n - 1] for b, n in enumerate(counts)])

    def _start(self, context: DraftContext) -> Tensor:
        self._state = self._last(context)
        return self._logits(self._state)

    def _next(self, tokens: Tensor) -> Tensor:
        self._state = self._read(self.model.embed(tokens)[:, None], self._state[:, None], [1] * len(tokens))
        return self._logits(self._state)

    def _propose_tree(self, context: DraftContext) -> DraftBatch:
        budgets, k = context.budgets, self.top_k
        candidates = k + k * k * (max(budgets) - 1)
        if candidates > MAX_CANDIDATES:
            raise ValueError(
                f"EagleDrafter: top_k {k} with num_draft {max(budgets)} makes {candidates} candidates, at most {MAX_CANDIDATES} "
                "can be ranked"
            )
        batch, device = len(budgets), self.forward.device
        budget = on_device(budgets, torch.int64, device)[:, None]
        states = self._last(context)
        log_q, tokens = self._likeliest(self._logits(states), 1)
        scores = log_q
        # Candidates so far, and where those of the level that is read begin among them.
        all_log_q = [log_q.masked_fill(budget < 1, -torch.inf)]
        all_tokens, all_parents, first = [tokens], [torch.zeros_like(tokens)], 0
        nodes = torch.arange(k, device=device).expand(batch, k)
        features = states[:, None].expand(batch, k, -1)
        seen = torch.zeros(batch, k, 0, dtype=torch.bool, device=device)
        depth = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        own = torch.eye(k, dtype=torch.bool, device=device).expand(batch, k, k)
        for level in range(1, max(budgets)):
            depth = F.pad(depth, (0, k), value=level - 1)
            seen = torch.cat([seen, own], 2)
            shape = TreeShape(depth, seen)
            states = self._read(self.model.embed(tokens), features, [k] * batch, shape).view(batch, k, -1)
            log_q, children = self._likeliest(self._logits(states.flatten(0, 1)), k)
            all_log_q.append(log_q.masked_fill(budget <= level, -torch.inf))
            all_tokens.append(children)
            all_parents.append((first + nodes + 1).repeat_interleave(k, 1))
            first += all_tokens[-2].shape[1]
            scores, nodes = (scores.repeat_interleave(k, 1) + log_q).topk(k, 1)
            parent = nodes // k
            tokens = children.gather(1, nodes)
            features = states.gather(1, parent[:, :, None].expand_as(states))
            seen = seen.gather(1, parent[:, :, None].expand(-1, -1, seen.shape[2]))
        count = min(context.max_nodes, sum(t.shape[1] for t in all_tokens))
        tree = build_tree(torch.cat(all_log_q, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1), count)
        counts = [count if n else 0 for n in budgets]
        kept = [b for b, n in enumerate(counts) if n]
        flat = [t if len(kept) == batch else t[kept] for t in (tree.tokens, tree.parents)]
        return DraftBatch(flat[0].flatten(), counts, parents=flat[1].flatten())

    def _likeliest(self, logits: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """log q and target ids of the top_k of each row, [B, rows * top_k]."""
        log_q, columns = logits.float().log_softmax(-1).topk(self.top_k)
        ids = columns if self.model.draft_ids is None else self.model.draft_ids[columns]
        return log_q.view(-1, rows * self.top_k), ids.view(-1, rows * self.top_k)
