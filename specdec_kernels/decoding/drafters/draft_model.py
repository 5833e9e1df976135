"""Drafts from a smaller language model with the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ... import SamplingTensors
from ..cache import RowCache, check_cache
from ..forward import ModelForward
from ..packed import PackedForward
from ..transfers import padded_on_device
from .base import DraftContext, StepOutcome
from .chain import ChainDrafter

# Models of one family round their vocabulary up differently (Qwen2.5: 151,936 and 152,064 rows for one tokenizer).
_PADDING = 1024
_PIECE = 64  # tokens fed at once at least


class DraftModelDrafter(ChainDrafter):
    """Samples drafts from a causal LM that shares the target's token ids, with the request's own parameters.

    The draft model keeps its own `RowCache`. After a step it lacks at most the entry of the last accepted draft,
    which was proposed but never fed: the next step feeds it two tokens instead of one; after plain steps it catches up
    in one forward.

    Args:
        model: a transformers causal LM that `ModelForward` supports.
        target_to_draft: int [V], column of target id v in the draft's logits or -1, for a head over a reduced
            vocabulary; the model's input embeddings still take target ids. None: ids are the same, and the two
            vocabularies may differ by up to 1,024 padding rows. Ids that the model has no embedding for are fed to it as
            its last id: worse drafts behind them, the same law of the text.
        packed: "auto" uses the packed CPU forward where it fits, True requires it, False leaves the model's own.
        cache, page_size: of the draft model, as in `SpeculativeDecoder`.
        budget: the draft model reads the last `budget` tokens and the first `sinks` alone; a paged cache then keeps and gathers
            no more of them, beyond whole pages. None: all. Worse drafts for long texts; the law of the text is the same.
        sinks: see `budget`.
        block_size: verify this many drafts at a time while the next ones are drafted (`BlockRun`); None: a step drafts, then
            verifies all.

    Raises:
        UnsupportedModel: the model's cache cannot be rolled back by length.
        ValueError: (from `check_target`) the vocabularies do not fit.
    """

    def __init__(
        self, model, *, target_to_draft: Tensor | None = None, packed: bool | str = "auto",
        cache: str = "ragged", page_size: int = 16, budget: int | None = None, sinks: int = 0,
        block_size: int | None = None,
    ):  # fmt: skip
        forward = (packed and PackedForward.build(model, required=packed is True)) or ModelForward(model)
        self._last_id = model.get_input_embeddings().weight.shape[0] - 1
        self._set_up(forward, target_to_draft, cache, page_size, budget, sinks, block_size)

    def _set_up(self, forward, target_to_draft, cache, page_size, budget, sinks, block_size) -> None:
        name = type(self).__name__
        self.forward, self.target_to_draft = forward, target_to_draft
        self.calls = 0
        self._columns = forward.vocab_size
        self.cache, self.page_size = check_cache(name, cache, page_size), page_size
        if budget is not None and not (isinstance(budget, int) and budget >= 1):
            raise ValueError(f"{name}: budget must be an int >= 1 or None, got {budget!r}")
        if not isinstance(sinks, int) or sinks < 0 or (sinks and budget is None):
            raise ValueError(f"{name}: sinks must be an int >= 0, and 0 without a budget, got {sinks!r}")
        if block_size is not None and not (isinstance(block_size, int) and block_size >= 1):
            raise ValueError(f"{name}: block_size must be an int >= 1 or None, got {block_size!r}")
        self.budget, self.sinks, self.block_size = budget, sinks, block_size
        self._cache: RowCache = self._new_cache(0, 1)
        self._committed: list[int] = []

    def check_target(self, target) -> None:
        head = target.get_output_embeddings()
        vocab = head.weight.shape[0] if head is not None else target.config.get_text_config().vocab_size
        inputs = self.forward.model.get_input_embeddings().weight.shape[0]
        own = self.forward.vocab_size
        if self.target_to_draft is not None:
            if self.target_to_draft.dim() != 1 or self.target_to_draft.shape[0] != vocab:
                raise ValueError(
                    f"DraftModelDrafter: target_to_draft must be [V={vocab}], got {list(self.target_to_draft.shape)}"
                )
            highest = int(self.target_to_draft.max())
            if highest >= own:
                raise ValueError(
                    f"DraftModelDrafter: target_to_draft must be below the draft's {own} columns, got {highest}"
                )
            if inputs < vocab:
                raise ValueError(
                    f"DraftModelDrafter: with target_to_draft the draft model reads target ids, so its input embeddings must "
                    f"have at least {vocab} rows, got {inputs}"
                )
            return
        if abs(own - vocab) > _PADDING:
            raise ValueError(
                f"DraftModelDrafter: draft vocabulary must be the target's up to {_PADDING} rows of padding, got {own} against "
                f"{vocab}; models with another tokenizer cannot draft, a reduced head needs target_to_draft"
            )
        # Ids that only one of the two has are padding: the draft never proposes them, and q is 0 there.
        self._columns = min(own, vocab)

    def begin(self, prompts: Sequence[Sequence[int]], params: SamplingTensors, max_tokens: int) -> None:
        self.forward.refresh()
        self._cache, self._committed = self._new_cache(len(prompts), max_tokens), []
        self._begin_chains(params)

    def _new_cache(self, batch_size: int, capacity: int) -> RowCache:
        return self.forward.new_cache(
            batch_size, capacity, self.cache, page_size=self.page_size, budget=self.budget, sinks=self.sinks
        )

    def _start(self, context: DraftContext) -> Tensor:
        self._committed = [len(t) for t in context.tokens]
        # A row that took no drafts of the last proposal was fed some all the same; and each row needs a token to be fed.
        self.rewind([n - 1 for n in self._committed])
        return self._catch_up(context.tokens)

    def _next(self, tokens: Tensor) -> Tensor:
        return self._forward(tokens[:, None], [1] * len(tokens))

    def _catch_up(self, tokens: list[list[int]]) -> Tensor:
        """Feeds what the cache lacks of each request; logits of the next token, [B, columns]."""
        missing = [t[n:] for t, n in zip(tokens, self._cache.lengths, strict=True)]
        # A long prompt goes in pieces, so that a paged cache never holds much more than its budget.
        piece = max(self.budget, _PIECE) if self.budget is not None else max(map(len, missing))
        while max(map(len, missing)) > piece:
            now = [m[: min(piece, len(m) - 1)] for m in missing]
            self._forward(self._padded(now), [len(m) for m in now])
            self._cache.evict()
            missing = [m[len(n) :] for m, n in zip(missing, now, strict=True)]
        return self._forward(self._padded(missing), [len(m) for m in missing])

    def _padded(self, rows: list[list[int]]) -> Tensor:
        return padded_on_device(rows, self.forward.device)

    def _forward(self, feed: Tensor, counts: list[int]) -> Tensor:
        logits = self.forward(feed.clamp(max=self._last_id), counts, self._cache, last_only=True).logits
        self._cache.advance(counts)
        self.calls += 1
        return logits[:, : self._columns]

    def observe(self, outcome: StepOutcome) -> None:
        # Entries beyond the committed text and the accepted drafts are of rejected ones; plain steps leave none.
        if self._committed:
            self.rewind([n + a for n, a in zip(self._committed, outcome.accepted, strict=True)])
            self._committed = []
        self._cache.evict()

    def rewind(self, lengths: Sequence[int], ahead: int = 0) -> None:
        """Drops the entries behind the first lengths[b] of each row, where it has them; with `ahead` lets go of what a budget no
        longer needs, of rows that may be rewound by that many tokens yet."""
        have = self._cache.lengths
        self._cache.rollback([max(n - keep, 0) for n, keep in zip(have, lengths, strict=True)])
        if ahead:
            self._cache.evict(ahead)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._cache.select_rows(rows)
