"""Speculative decoding of a batch of prompts with a transformers model."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from .. import SamplingTensors, verify_chain
from ..verify_tree import MAX_NODES
from .block_run import BlockRun
from .cache import RowCache, check_cache
from .cost_model import AutoLength
from .drafters.base import Drafter
from .forward import ModelForward
from .packed import PackedForward
from .policy import StepCosts
from .run import Row, Run, draft_offsets
from .stats import SpecDecodeStats

_AUTO = 8  # longest drafts of num_draft="auto"
_RULES = ("auto", "token", "block", "coupled", "target_only")


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


class SpeculativeDecoder:
    """Generates with a target model and a drafter; the text is distributed exactly as the target's own sampling.

    Each step feeds the target the last token and the drafts of every row in one forward, verifies them with
    `verify_chain` or, where the drafter proposes trees, as `verify_tree` does, and rolls every row's cache back to what was accepted of it. Rows accept different numbers of drafts
    and finish at different steps; finished rows leave the batch. A decoder, its drafter and its costs serve one `generate`
    at a time; decoders in several threads may share a target, each with a drafter of its own.

    Args:
        target: a transformers causal LM that `ModelForward` supports.
        drafter: proposes tokens; None decodes plainly through the same code.
        num_draft: most drafts per row and step, of a tree on one path; "auto": of up to 8 as many as gain most by the costs and
            acceptances measured so far (`CostModel`), for drafters that do not choose by themselves.
        max_nodes: most drafts of a row's tree.
        rule: for chains "token", "block" or "coupled", for trees "target_only" or "coupled"; "auto": "coupled" for deterministic
            drafters, where it accepts as often, else "token" or "target_only". Under "coupled" the text depends on the seed alone, not on drafter, draft lengths or pauses, up to
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
        num_draft: int | str = 5,
        max_nodes: int = 16,
        rule: str = "auto",
        adaptive: bool = True,
        threshold: float = 0.5,
        packed: bool | str = "auto",
        cache: str = "ragged",
        page_size: int = 16,
        forward: ModelForward | None = None,
    ):
        auto = num_draft == "auto"
        if not auto and not (isinstance(num_draft, int) and num_draft >= 0):
            raise ValueError(f'SpeculativeDecoder: num_draft must be >= 0 or "auto", got {num_draft!r}')
        if not isinstance(max_nodes, int) or not 1 <= max_nodes <= MAX_NODES:
            raise ValueError(f"SpeculativeDecoder: max_nodes must be an int in 1..{MAX_NODES}, got {max_nodes!r}")
        if rule not in _RULES:
            raise ValueError(f"SpeculativeDecoder: rule must be one of {', '.join(_RULES)}, got {rule!r}")
        if packed not in (True, False, "auto"):
            raise ValueError(f'SpeculativeDecoder: packed must be True, False or "auto", got {packed!r}')
        if drafter is not None:
            if not isinstance(drafter, Drafter):
                raise ValueError(f"SpeculativeDecoder: drafter must be a Drafter or None, got {type(drafter).__name__}")
            drafter.check_target(target)
        trees = drafter is not None and drafter.trees
        if rule == "auto":
            exact = drafter is None or drafter.deterministic
            rule = "coupled" if exact else "target_only" if trees else "token"
        if rule != "coupled" and drafter is not None and (rule == "target_only") != trees:
            must = "target_only or coupled for a drafter of trees" if trees else "token, block or coupled for chains"
            raise ValueError(f"SpeculativeDecoder: rule must be {must}, got {rule!r}")
        self.target = target
        self.drafter = drafter
        if auto and (not adaptive or (drafter is not None and drafter.block_size is not None)):
            got = "adaptive=False" if not adaptive else "a drafter with a block_size"
            raise ValueError(
                f'SpeculativeDecoder: num_draft "auto" is for adaptive decoding with drafts made at once, got {got}'
            )
        self.num_draft: int = _AUTO if isinstance(num_draft, str) else num_draft
        choose = auto and drafter is not None and not drafter.chooses_length
        self.length = AutoLength(self.num_draft) if choose else None
        self.max_nodes, self.rule = max_nodes, rule
        self.adaptive, self.threshold = adaptive, threshold
        self.cache, self.page_size = check_cache("SpeculativeDecoder", cache, page_size), page_size
        self.costs = StepCosts()
        if forward is None:
            forward = (packed and PackedForward.build(target, required=packed is True)) or ModelForward(target)
        elif forward.model is not target:
            raise ValueError("SpeculativeDecoder: forward must be of the same target, got that of another model")
        self.forward = forward
        if drafter is not None and drafter.block_size is not None:
            if trees or drafter.taps:
                got = "trees" if trees else "taps"
                raise ValueError(
                    f"SpeculativeDecoder: a drafter with a block_size must have neither trees nor taps, got {got}"
                )
            if rule == "block":
                raise ValueError(
                    "SpeculativeDecoder: rule must be token or coupled for drafts verified block by block, got 'block'"
                )
            if self.num_draft < drafter.block_size:
                raise ValueError(
                    f"SpeculativeDecoder: num_draft must be at least the drafter's block_size {drafter.block_size}, got {self.num_draft}"
                )
        if drafter is not None:
            forward.check_taps(type(drafter).__name__, drafter.taps)
            drafter.attach(forward)

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
        rows = [Row(b, list(p), len(p), len(p) + max_new_tokens) for b, p in enumerate(prompts)]
        blocks = self.drafter is not None and self.drafter.block_size is not None
        run = (BlockRun if blocks else Run)(self, rows, params, ends, stats)
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
        ids = (
            torch.arange(context + max(self.num_draft, self.max_nodes) + 1, device=self.forward.device)
            % self.forward.vocab_size
        )
        ids = ids.repeat(batch_size, 1)
        cache = self.new_cache(batch_size, ids.shape[1])
        self.forward(ids[:, :context], [context] * batch_size, cache, last_only=True)
        cache.advance([context] * batch_size)
        params = SamplingTensors.create(temperature=1.0, seed=0, batch_size=batch_size, device=ids.device)
        position = torch.full((batch_size,), context + 1, dtype=torch.int64, device=ids.device)
        most = self.max_nodes if self.drafter is not None and self.drafter.trees else self.num_draft
        sizes = sorted({0, min(1, most), most} if self.drafter is not None else {0})
        # In turn, so that the machine's other load meets all sizes alike; the first round pays for lazy initialisation.
        for repeat in range(repeats + 1):
            for drafts in sizes:
                feed = ids[:, context : context + drafts + 1]
                proposed = feed[:, 1:].flatten().contiguous()
                begin = perf_counter()
                logits = self.forward(feed, [drafts + 1] * batch_size, cache).logits
                verify_chain(
                    logits, proposed, draft_offsets([drafts] * batch_size, ids.device), params, position, rule="coupled",
                    max_draft=drafts,
                ).tokens.cpu()  # fmt: skip
                if repeat:
                    self.costs.record(batch_size, drafts, perf_counter() - begin)


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
