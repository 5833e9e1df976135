"""The steps of one `SpeculativeDecoder.generate` call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .. import SamplingTensors, verify_chain
from .drafters.base import DraftBatch, DraftContext, StepOutcome
from .policy import AcceptanceWatch
from .stats import SpecDecodeStats
from .transfers import on_device, padded_on_device
from .tree_step import TreeStep

_NOTICED = 0.02  # share of a step from which a proposal's time counts


@dataclass
class Row:
    """A running request."""

    index: int
    tokens: list[int]
    prompt_length: int
    limit: int
    status: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length


class Run:
    """One `generate` call: iterates over steps, each giving the tokens that every running row emitted."""

    def __init__(self, decoder, rows: list[Row], params: SamplingTensors, ends: frozenset[int], stats: SpecDecodeStats):
        self.decoder, self.rows, self.params, self.ends, self.stats = decoder, rows, params, ends, stats
        self.forward, self.drafter = decoder.forward, decoder.drafter
        self.device = self.forward.device
        self.watch = AcceptanceWatch(decoder.threshold if decoder.adaptive else 0.0)
        self.taps = tuple(self.drafter.taps) if self.drafter is not None else ()
        spare = decoder.max_nodes if self.drafter is not None and self.drafter.trees else decoder.num_draft
        self.cache = decoder.new_cache(len(rows), max(row.limit for row in rows) + spare + 1)

    def __iter__(self):
        begin = perf_counter()
        if self.drafter is not None:
            self.calls_before = self.drafter.calls
            self.drafter.begin([r.tokens for r in self.rows], self.params, max(row.limit for row in self.rows))
        emitted = self._finish(self._prefill())
        self.stats.prefill_seconds = perf_counter() - begin
        yield emitted
        while self.rows:
            yield self._step()
        if self.drafter is not None:
            self.stats.draft_calls = self.drafter.calls - self.calls_before
        self.cache.check()
        self.stats.fallbacks = self.watch.fallbacks

    def _prefill(self) -> list[list[int]]:
        """Feeds the prompts and samples each row's first token."""
        counts = [len(row.tokens) for row in self.rows]
        feed = padded_on_device([row.tokens for row in self.rows], self.device)
        none = [0] * len(self.rows)
        place = draft_offsets(none, self.device), self._position()
        output = self.forward(feed, counts, self.cache, last_only=True, taps=self.taps)
        self.cache.advance(counts)
        emitted, _ = self._verify(output.logits, None, none, place)
        emitted = self._emit(emitted)
        if self.drafter is not None:
            self.drafter.observe(StepOutcome(emitted, none, none, output.taps))
        return emitted

    def _step(self) -> list[list[int]]:
        stats, batch = self.stats, len(self.rows)
        t0 = perf_counter()
        position = self._position()
        drafts = self._propose(position)
        counts = drafts.counts if drafts is not None else [0] * batch
        longest = max(counts)
        t1 = perf_counter()
        # Everything that comes from the host goes ahead of the forward: a copy behind it would wait for it.
        place, feed = (draft_offsets(counts, self.device), position), self._feed(drafts, longest)
        tree = TreeStep(drafts, longest) if drafts is not None and drafts.parents is not None else None
        if tree is not None:
            for b, (row, depth) in enumerate(zip(self.rows, tree.depths, strict=True)):
                if depth > min(self.decoder.num_draft, row.limit - len(row.tokens) - 1):
                    raise ValueError(
                        f"SpeculativeDecoder: drafter's tree of request {b} must be no deeper than its budget, got {depth}"
                    )
        output = self.forward(
            feed, [n + 1 for n in counts], self.cache, tree=tree and tree.shape, taps=self.taps
        )  # fmt: skip
        t2 = perf_counter()
        paths = None
        if tree is None:
            emitted, accepted = self._verify(output.logits, drafts, counts, place)
        else:
            emitted, paths = self._verify_tree(output.logits, drafts, tree, place)
            accepted = [len(path) for path in paths]
        t3 = perf_counter()
        if tree is not None:
            tree.compact(self.cache, paths)
        self.cache.advance([n + 1 for n in counts])
        self.cache.rollback([n - a for n, a in zip(counts, accepted, strict=True)])
        stats.record(counts, accepted, tree and tree.depths)
        if self.decoder.adaptive:
            self._account(counts, accepted, tree and tree.depths, t3 - t1, t1 - t0)
        emitted = self._emit(emitted)
        self._observe(emitted, counts, accepted, output.taps, paths)
        emitted = self._finish(emitted)
        stats.clock(t0, t1, t2, t3, perf_counter())
        return emitted

    def _propose(self, position: Tensor) -> DraftBatch | None:
        decoder, batch = self.decoder, len(self.rows)
        if self.drafter is None or decoder.num_draft == 0:
            return None
        if not self.watch.speculate() or (decoder.adaptive and decoder.costs.wants_plain(batch)):
            return None
        costs = decoder.costs
        judged = decoder.adaptive and not costs.wants_drafts(batch)
        most = decoder.num_draft
        if decoder.length is not None and judged:
            most = decoder.length.choose(costs, batch, decoder.max_nodes if self.drafter.trees else None)
        # The last token of a row needs no draft behind it: a row with one token to go takes none.
        budgets = [min(most, row.limit - len(row.tokens) - 1) for row in self.rows]
        if max(budgets) <= 0:
            return None
        drafts = self.drafter.propose(
            DraftContext(
                tokens=[row.tokens for row in self.rows],
                position=position,
                params=self.params,
                budgets=budgets,
                rule=decoder.rule,
                relative_cost=(lambda d: costs.relative(batch, d)) if judged else (lambda d: None),
                max_nodes=decoder.max_nodes,
            )
        )
        if drafts is None or not any(drafts.counts):
            return None
        if (drafts.parents is not None) != self.drafter.trees:
            must = "trees (with parents)" if self.drafter.trees else "chains (parents=None)"
            raise ValueError(f"SpeculativeDecoder: drafter must propose {must}, got the other")
        for b, (count, budget) in enumerate(zip(drafts.counts, budgets, strict=True)):
            most = decoder.max_nodes * (budget > 0) if self.drafter.trees else budget
            if not 0 <= count <= most:
                raise ValueError(f"SpeculativeDecoder: drafter's counts[{b}] must be in [0, {most}], got {count}")
        # On a GPU the host would wait for the answer.
        if drafts.tokens.device.type == "cpu" and int(drafts.tokens.max()) >= self.forward.vocab_size:
            raise ValueError(
                f"SpeculativeDecoder: drafter's tokens must be below the target's {self.forward.vocab_size}, got "
                f"{int(drafts.tokens.max())}"
            )
        return drafts

    def _position(self) -> Tensor:
        return on_device([len(row.tokens) for row in self.rows], torch.int64, self.device)

    def _feed(self, drafts: DraftBatch | None, longest: int) -> Tensor:
        """Each row's pending token and its drafts, int64 [B, longest + 1], padded with 0."""
        pending = padded_on_device([row.tokens[-1:] for row in self.rows], self.device)
        if drafts is None:
            return pending
        # A node that is not there has no token.
        tokens = drafts.tokens.to(torch.int64).clamp_min(0)
        if all(n == longest for n in drafts.counts):
            return torch.cat([pending, tokens.view(-1, longest)], 1)
        feed = torch.nn.functional.pad(pending, (0, longest))
        index = [b * (longest + 1) + 1 + i for b, n in enumerate(drafts.counts) for i in range(n)]
        feed.view(-1)[on_device(index, torch.int64, self.device)] = tokens
        return feed

    def _verify(
        self, logits: Tensor, drafts: DraftBatch | None, counts: list[int], place: tuple[Tensor, Tensor]
    ) -> tuple[list[list[int]], list[int]]:
        """Tokens that each row emits and drafts accepted of it; `place`: offsets of the drafts, positions of the rows."""
        given: dict[str, Any] = {}
        if drafts is None:
            tokens = torch.empty(0, dtype=torch.int32, device=self.device)
        else:
            tokens = drafts.tokens
            if drafts.logits is not None:
                given = {
                    "draft_logits": drafts.logits, "draft_rows": drafts.rows, "draft_nucleus": drafts.nucleus,
                    "draft_params": drafts.params, "target_to_draft": drafts.target_to_draft,
                }  # fmt: skip
        # Without drafts every rule is plain sampling.
        rule = self.decoder.rule if drafts is not None else "coupled"
        out = verify_chain(
            logits, tokens, place[0], self.params, place[1], rule=rule, max_draft=max(counts), **given,
        )  # fmt: skip
        # One transfer for everything the host needs.
        packed = torch.cat([out.tokens, out.num_accepted[:, None], out.status[:, None]], 1).tolist()
        for row, values in zip(self.rows, packed, strict=True):
            row.status |= values[-1]
        accepted = [values[-2] for values in packed]
        return [values[: a + 1] for values, a in zip(packed, accepted, strict=True)], accepted

    def _verify_tree(
        self, logits: Tensor, drafts: DraftBatch, tree: TreeStep, place: tuple[Tensor, Tensor]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens that each row emits and the nodes that it accepted."""
        if self.decoder.rule == "coupled":
            emitted, paths, status = tree.coupled(logits, self.params, place[1])
        else:
            emitted, paths, status = tree.target_only(logits, drafts, self.params, place)
        for row, bits in zip(self.rows, status, strict=True):
            row.status |= bits
        return emitted, paths

    def _emit(self, emitted: list[list[int]]) -> list[list[int]]:
        """Appends the tokens, cut behind an end of sequence. Budgets keep a row from passing its limit."""
        kept = []
        for row, tokens in zip(self.rows, emitted, strict=True):
            end = next((i for i, token in enumerate(tokens) if token in self.ends), None)
            if end is not None:
                tokens = tokens[: end + 1]
            row.tokens += tokens
            kept.append(tokens)
        return kept

    def _observe(self, emitted, counts, accepted, taps: Tensor | None, paths: list[list[int]] | None) -> None:
        if self.drafter is None:
            return
        if taps is not None and any(counts):
            # The rows of rejected drafts are no part of the text.
            kept, start = [], 0
            for row, (n, a) in enumerate(zip(counts, accepted, strict=True)):
                kept += [start, *(start + node for node in (range(1, a + 1) if paths is None else paths[row]))]
                start += n + 1
            taps = taps.index_select(0, on_device(kept, torch.int64, self.device))
        self.drafter.observe(StepOutcome(emitted, counts, accepted, taps, paths))

    def _running(self) -> list[int]:
        """Rows that are not done."""
        return [i for i, row in enumerate(self.rows) if len(row.tokens) < row.limit and row.tokens[-1] not in self.ends]

    def _finish(self, emitted: list[list[int]]) -> list[list[int]]:
        """Drops the rows that are done from the batch, caches and parameters; gives `emitted` back."""
        keep = self._running()
        if len(keep) < len(self.rows):
            self.rows = [self.rows[i] for i in keep]
            if keep:
                self.cache.select_rows(keep)
                self.params = select_params(self.params, on_device(keep, torch.int64, self.device))
                if self.drafter is not None:
                    self.drafter.select_rows(keep)
        return emitted

    def _account(
        self,
        counts: list[int],
        accepted: list[int],
        depths: list[int] | None,
        target_seconds: float,
        draft_seconds: float,
    ) -> None:
        """depths: of trees."""
        costs, batch, longest = self.decoder.costs, len(self.rows), max(counts)
        depth = max(depths) if depths is not None else longest
        costs.record(batch, longest, target_seconds, draft_seconds, depth)
        if longest:
            if self.decoder.length is not None:
                self.decoder.length.record(counts if depths is None else depths, accepted)
            self.watch.record(sum(accepted) / batch, costs.relative(batch, longest, depth))
        elif draft_seconds > _NOTICED * target_seconds:
            # A drafter that worked and proposed nothing costs as well; a lookup's glance does not count.
            self.watch.record(0.0, 1.0 + draft_seconds / target_seconds)


def select_params(params: SamplingTensors, rows: Tensor) -> SamplingTensors:
    """Parameters of the requests `rows`, through `slots`: nothing is copied."""
    return replace(params, slots=rows if params.slots is None else params.slots.index_select(0, rows))


def draft_offsets(counts: list[int], device: torch.device) -> Tensor:
    offsets = [0]
    for n in counts:
        offsets.append(offsets[-1] + n)
    return on_device(offsets, torch.int32, device)
