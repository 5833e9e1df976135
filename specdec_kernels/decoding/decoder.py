"""Speculative decoding of a batch of prompts with a transformers model."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .. import SamplingTensors, verify_chain
from .cache import RowCache, check_cache
from .drafters.base import DraftBatch, DraftContext, Drafter, StepOutcome
from .forward import ForwardOutput, ModelForward
from .packed import PackedForward
from .policy import AcceptanceWatch, StepCosts
from .stats import SpecDecodeStats

_RULES = ("auto", "token", "block", "coupled")


@dataclass
class GenerateResult:
    """Output of `SpeculativeDecoder.generate`.

    sequences: int64 [B, n + longest output], the given `input_ids` and the new tokens, padded on the right.
    lengths: new tokens of each row, end-of-sequence token included.
    tokens: the new tokens of each row.
    status: OR of the rows' `verify_chain` status bits over all steps.
    stats: counters and times.
    """

    sequences: Tensor
    lengths: list[int]
    tokens: list[list[int]]
    status: list[int]
    stats: SpecDecodeStats


@dataclass
class _Row:
    """A running request."""

    index: int
    tokens: list[int]
    prompt_length: int
    limit: int
    status: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length


class SpeculativeDecoder:
    """Generates with a target model and a drafter; the text is distributed exactly as the target's own sampling.

    Each step feeds the target the last token and the drafts of every row in one forward, verifies them with
    `verify_chain`, and rolls every row's cache back to what was accepted of it. Rows accept different numbers of drafts
    and finish at different steps; finished rows leave the batch. A decoder, its drafter and its costs serve one `generate`
    at a time; decoders in several threads may share a target, each with a drafter of its own.

    Args:
        target: a transformers causal LM that `ModelForward` supports.
        drafter: proposes tokens; None decodes plainly through the same code.
        num_draft: most drafts per row and step.
        rule: "token", "block", "coupled" or "auto": "coupled" for deterministic drafters, where it accepts as often, "token"
            otherwise. Under "coupled" the text depends on the seed alone, not on drafter, draft lengths or pauses, up to
            the last bits of the model's own logits, which differ with the number of tokens per forward: in float32 that
            is rarely seen, in bfloat16 and float16 often.
        adaptive: watch acceptance against the measured costs, pause speculation where it loses time (see `threshold`),
            and let lookups choose draft lengths by cost. Under rule "token" the lengths shape the text, so a fixed seed
            then gives the same text only with `adaptive=False`; the distribution is the same either way.
        threshold: share of the break-even acceptance below which speculation pauses.
        packed: "auto" uses the packed float32 CPU forward where the model fits, True requires it, False leaves the
            model's own. It doubles the memory of the weights; logits differ from the model's in the last bits.
        cache: "ragged" keeps each row's keys and values in one block of memory, allocated for its longest text; "paged" in pages
            that rows take as they need them and give back on rejection (`PagedKVCache`). The text is the same.
        page_size: tokens of a page of a paged cache.
        forward: another decoder's `forward` of the same target, to share its packed weights; overrides `packed`.

    Raises:
        UnsupportedModel: the target's cache cannot be rolled back by length.
        ValueError: an argument out of range, or a drafter that does not fit the target.
    """

    def __init__(
        self,
        target,
        drafter: Drafter | None = None,
        *,
        num_draft: int = 5,
        rule: str = "auto",
        adaptive: bool = True,
        threshold: float = 0.5,
        packed: bool | str = "auto",
        cache: str = "ragged",
        page_size: int = 16,
        forward: ModelForward | None = None,
    ):
        if num_draft < 0:
            raise ValueError(f"SpeculativeDecoder: num_draft must be >= 0, got {num_draft}")
        if rule not in _RULES:
            raise ValueError(f"SpeculativeDecoder: rule must be one of {', '.join(_RULES)}, got {rule!r}")
        if packed not in (True, False, "auto"):
            raise ValueError(f'SpeculativeDecoder: packed must be True, False or "auto", got {packed!r}')
        if drafter is not None:
            if not isinstance(drafter, Drafter):
                raise ValueError(f"SpeculativeDecoder: drafter must be a Drafter or None, got {type(drafter).__name__}")
            drafter.check_target(target)
        if rule == "auto":
            rule = "coupled" if drafter is None or drafter.deterministic else "token"
        self.target = target
        self.drafter = drafter
        self.num_draft, self.rule, self.adaptive, self.threshold = num_draft, rule, adaptive, threshold
        self.cache, self.page_size = check_cache("SpeculativeDecoder", cache, page_size), page_size
        self.costs = StepCosts()
        if forward is None:
            forward = (packed and PackedForward.build(target, required=packed is True)) or ModelForward(target)
        elif forward.model is not target:
            raise ValueError("SpeculativeDecoder: forward must be of the same target, got that of another model")
        self.forward = forward

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        params: SamplingTensors | None = None,
        *,
        max_new_tokens: int = 128,
        eos: int | Sequence[int] | Tensor | None = None,
        pad: int | None = None,
        streamer=None,
        progress: bool = False,
    ) -> GenerateResult:
        """Continues every prompt until an end-of-sequence token or `max_new_tokens`.

        Args:
            input_ids: int64 [B, n] on the target's device.
            attention_mask: [B, n], 0 for padding, left or right; None: no padding.
            params: sampling parameters of the B requests; None: those of the target's generation config
                (`SamplingTensors.from_generation_config`, which warns of settings it cannot carry over), seeds from torch's
                default generator.
            max_new_tokens: >= 1.
            eos: id or ids (int, sequence or tensor) that end a row; None: the generation config's; an empty sequence: none.
            pad: id that fills the output; None: the generation config's, or the first `eos`, or 0.
            streamer: transformers streamer; gets the prompt, then each step's tokens. Batch 1 only.
            progress: show a tqdm bar of new tokens.

        Returns:
            GenerateResult.

        Raises:
            ValueError: an argument of the wrong shape, dtype or range.

        Reads the emitted tokens back once per step. Not re-entrant: one call at a time per decoder and per drafter.
        """
        prompts = _prompts(input_ids, attention_mask)
        batch, device = len(prompts), self.forward.device
        if max_new_tokens < 1:
            raise ValueError(f"generate: max_new_tokens must be >= 1, got {max_new_tokens}")
        if streamer is not None and batch != 1:
            raise ValueError(f"generate: streamer needs a batch of 1, got {batch}")
        if params is None:
            params = SamplingTensors.from_generation_config(
                self.target.generation_config, batch_size=batch, device=device
            )
        elif params.num_requests != batch:
            raise ValueError(
                f"generate: params must describe one request per row of input_ids [{batch}], got {params.num_requests}"
            )
        ends = _ids(eos, getattr(self.target.generation_config, "eos_token_id", None))
        self.forward.refresh()
        stats = SpecDecodeStats()
        rows = [_Row(b, list(p), len(p), len(p) + max_new_tokens) for b, p in enumerate(prompts)]
        run = _Run(self, rows, params, ends, stats)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        bar = _bar(progress, batch * max_new_tokens)
        try:
            for emitted in run:
                if streamer is not None:
                    streamer.put(torch.tensor(emitted[0], dtype=torch.int64))
                if bar is not None:
                    bar.update(sum(map(len, emitted)))
        finally:
            if bar is not None:
                bar.close()
        if streamer is not None:
            streamer.end()

        if pad is None:
            fills = _ids(None, getattr(self.target.generation_config, "pad_token_id", None))
            pad = next(iter(fills), min(ends, default=0))
        tokens = [row.tokens[row.prompt_length :] for row in rows]
        stats.tokens = sum(map(len, tokens))
        output = torch.full((batch, max(map(len, tokens))), int(pad), dtype=torch.int64)
        for b, new in enumerate(tokens):
            output[b, : len(new)] = torch.tensor(new)
        sequences = torch.cat([input_ids, output.to(input_ids.device)], 1)
        return GenerateResult(sequences, [len(t) for t in tokens], tokens, [row.status for row in rows], stats)

    def new_cache(self, batch_size: int, capacity: int) -> RowCache:
        """An empty cache of the decoder's kind for `batch_size` rows of `capacity` tokens."""
        return self.forward.new_cache(batch_size, capacity, self.cache, page_size=self.page_size)

    @torch.inference_mode()
    def warmup(self, batch_size: int = 1, *, context: int = 64, repeats: int = 7) -> None:
        """Runs the forwards that decoding will run, and measures the step costs that adaptive speculation starts from.

        Args:
            batch_size: rows of the batches to come.
            context: tokens per row in the cache while measuring.
            repeats: measured forwards of each size, after one that is not.
        """
        self.forward.refresh()
        ids = torch.arange(context + self.num_draft + 1, device=self.forward.device) % self.forward.vocab_size
        ids = ids.repeat(batch_size, 1)
        cache = self.new_cache(batch_size, ids.shape[1])
        self.forward(ids[:, :context], [context] * batch_size, cache, last_only=True)
        cache.advance([context] * batch_size)
        params = SamplingTensors.create(temperature=1.0, seed=0, batch_size=batch_size, device=ids.device)
        position = torch.full((batch_size,), context + 1, dtype=torch.int64, device=ids.device)
        sizes = sorted({0, min(1, self.num_draft), self.num_draft} if self.drafter is not None else {0})
        # In turn, so that the machine's other load meets all sizes alike; the first round pays for lazy initialisation.
        for repeat in range(repeats + 1):
            for drafts in sizes:
                feed = ids[:, context : context + drafts + 1]
                proposed = feed[:, 1:].flatten().contiguous()
                begin = perf_counter()
                logits = self.forward(feed, [drafts + 1] * batch_size, cache).logits
                verify_chain(
                    logits, proposed, _offsets([drafts] * batch_size, ids.device), params, position, rule="coupled",
                    max_draft=drafts,
                ).tokens.cpu()  # fmt: skip
                if repeat:
                    self.costs.record(batch_size, drafts, perf_counter() - begin)


class _Run:
    """One `generate` call: iterates over steps, each giving the tokens that every running row emitted."""

    def __init__(
        self, decoder, rows: list[_Row], params: SamplingTensors, ends: frozenset[int], stats: SpecDecodeStats
    ):
        self.decoder, self.rows, self.params, self.ends, self.stats = decoder, rows, params, ends, stats
        self.forward, self.drafter = decoder.forward, decoder.drafter
        self.device = self.forward.device
        self.watch = AcceptanceWatch(decoder.threshold if decoder.adaptive else 0.0)
        self.cache = decoder.new_cache(len(rows), max(row.limit for row in rows) + decoder.num_draft + 1)

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
        width = max(counts)
        feed = torch.tensor([r.tokens + [0] * (width - len(r.tokens)) for r in self.rows], device=self.device)
        none = [0] * len(self.rows)
        place = _offsets(none, self.device), self._position()
        logits = self.forward(feed, counts, self.cache, last_only=True).logits
        self.cache.advance(counts)
        emitted, _ = self._verify(logits, None, none, place)
        emitted = self._emit(emitted)
        if self.drafter is not None:
            self.drafter.observe(StepOutcome(emitted, none, none))
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
        place, feed = (_offsets(counts, self.device), position), self._feed(drafts, longest)
        output = self.forward(feed, [n + 1 for n in counts], self.cache)
        t2 = perf_counter()
        emitted, accepted = self._verify(output.logits, drafts, counts, place)
        t3 = perf_counter()
        self.cache.advance([n + 1 for n in counts])
        self.cache.rollback([n - a for n, a in zip(counts, accepted, strict=True)])
        stats.record(counts, accepted)
        if self.decoder.adaptive:
            self._account(counts, accepted, t3 - t1, t1 - t0)
        emitted = self._emit(emitted)
        self._observe(emitted, counts, accepted, output)
        emitted = self._finish(emitted)
        stats.draft_seconds += t1 - t0
        stats.target_seconds += t2 - t1
        stats.verify_seconds += t3 - t2
        stats.rest_seconds += perf_counter() - t3
        return emitted

    def _propose(self, position: Tensor) -> DraftBatch | None:
        decoder, batch = self.decoder, len(self.rows)
        if self.drafter is None or decoder.num_draft == 0:
            return None
        if not self.watch.speculate() or (decoder.adaptive and decoder.costs.wants_plain(batch)):
            return None
        # The last token of a row needs no draft behind it: a row with one token to go takes none.
        budgets = [min(decoder.num_draft, row.limit - len(row.tokens) - 1) for row in self.rows]
        if max(budgets) <= 0:
            return None
        costs = decoder.costs
        judged = decoder.adaptive and not costs.wants_drafts(batch)
        drafts = self.drafter.propose(
            DraftContext(
                tokens=[row.tokens for row in self.rows],
                position=position,
                params=self.params,
                budgets=budgets,
                rule=decoder.rule,
                relative_cost=(lambda d: costs.relative(batch, d)) if judged else (lambda d: None),
            )
        )
        if drafts is None or not any(drafts.counts):
            return None
        if drafts.parents is not None:
            raise ValueError("SpeculativeDecoder: drafter must propose chains (parents=None), got a tree")
        for b, (count, budget) in enumerate(zip(drafts.counts, budgets, strict=True)):
            if not 0 <= count <= budget:
                raise ValueError(f"SpeculativeDecoder: drafter's counts[{b}] must be in [0, {budget}], got {count}")
        return drafts

    def _position(self) -> Tensor:
        return torch.tensor([len(row.tokens) for row in self.rows], dtype=torch.int64, device=self.device)

    def _feed(self, drafts: DraftBatch | None, longest: int) -> Tensor:
        """Each row's pending token and its drafts, int64 [B, longest + 1], padded with 0."""
        pending = torch.tensor([[row.tokens[-1]] for row in self.rows], dtype=torch.int64, device=self.device)
        if drafts is None:
            return pending
        if all(n == longest for n in drafts.counts):
            return torch.cat([pending, drafts.tokens.view(-1, longest).to(torch.int64)], 1)
        feed = torch.nn.functional.pad(pending, (0, longest))
        index = [b * (longest + 1) + 1 + i for b, n in enumerate(drafts.counts) for i in range(n)]
        feed.view(-1)[torch.tensor(index, device=self.device)] = drafts.tokens.to(torch.int64)
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
        out = verify_chain(
            logits, tokens, place[0], self.params, place[1], rule=self.decoder.rule, max_draft=max(counts), **given,
        )  # fmt: skip
        # One transfer for everything the host needs.
        packed = torch.cat([out.tokens, out.num_accepted[:, None], out.status[:, None]], 1).tolist()
        for row, values in zip(self.rows, packed, strict=True):
            row.status |= values[-1]
        accepted = [values[-2] for values in packed]
        return [values[: a + 1] for values, a in zip(packed, accepted, strict=True)], accepted

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

    def _observe(self, emitted, counts, accepted, output: ForwardOutput) -> None:
        if self.drafter is not None:
            hidden = output.hidden if self.drafter.needs_hidden else None
            self.drafter.observe(StepOutcome(emitted, counts, accepted, hidden))

    def _finish(self, emitted: list[list[int]]) -> list[list[int]]:
        """Drops the rows that are done from the batch, caches and parameters; gives `emitted` back."""
        keep = [i for i, row in enumerate(self.rows) if len(row.tokens) < row.limit and row.tokens[-1] not in self.ends]
        if len(keep) < len(self.rows):
            self.rows = [self.rows[i] for i in keep]
            if keep:
                self.cache.select_rows(keep)
                self.params = _select_params(self.params, torch.tensor(keep, device=self.device))
                if self.drafter is not None:
                    self.drafter.select_rows(keep)
        return emitted

    def _account(self, counts: list[int], accepted: list[int], target_seconds: float, draft_seconds: float) -> None:
        costs, batch, longest = self.decoder.costs, len(self.rows), max(counts)
        costs.record(batch, longest, target_seconds, draft_seconds)
        if longest:
            self.watch.record(sum(accepted) / batch, costs.relative(batch, longest))


def _select_params(params: SamplingTensors, rows: Tensor) -> SamplingTensors:
    """Parameters of the requests `rows`, through `slots`: nothing is copied."""
    return replace(params, slots=rows if params.slots is None else params.slots.index_select(0, rows))


def _offsets(counts: list[int], device: torch.device) -> Tensor:
    offsets = [0]
    for n in counts:
        offsets.append(offsets[-1] + n)
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The prompts without padding."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype != torch.int64:
        got = (
            f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise ValueError(f"generate: input_ids must be int64 [B, n], got {got}")
    if input_ids.shape[0] == 0:
        raise ValueError("generate: input_ids must have at least one row, got 0")
    ids = input_ids.tolist()
    if attention_mask is None:
        prompts = ids
    else:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"generate: attention_mask must be {list(input_ids.shape)} like input_ids, "
                f"got {list(attention_mask.shape)}"
            )
        mask = attention_mask.tolist()
        prompts = [[t for t, m in zip(r, k, strict=True) if m] for r, k in zip(ids, mask, strict=True)]
    for b, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"generate: input_ids must have at least one token per row, row {b} has none")
    return prompts


def _ids(given: int | Sequence[int] | Tensor | None, default: int | Sequence[int] | Tensor | None) -> frozenset[int]:
    chosen = default if given is None else given
    if chosen is None:
        return frozenset()
    if isinstance(chosen, Tensor):
        chosen = chosen.flatten().tolist()
    # Elements of other kinds (tensors, NumPy integers) hash differently from the ints of a text.
    return frozenset([int(chosen)] if isinstance(chosen, numbers.Integral) else map(int, chosen))


def _bar(progress: bool, total: int):
    if not progress:
        return None
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="tok")
