"""Verification block by block, while the next block is drafted."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from .. import Nucleus, SamplingTensors, verify_chain
from .drafters.base import DraftBatch, DraftContext
from .run import Run, draft_offsets, select_params
from .transfers import on_device, padded_on_device


class Draft(NamedTuple):
    """One draft: its token, and the row it was sampled from with its nucleus, where verification reads q."""

    token: int
    logits: Tensor | None
    nucleus: tuple[Tensor, ...] | None


class BlockRun(Run):
    """A run whose steps verify the first `block_size` drafts of each request, while the drafter goes on behind all of them as if
    they were accepted, to at most `num_draft` tokens ahead of the verified text.

    A step that accepts its whole block emits these drafts and no token of the target's own: the next draft is the guess for that
    position, and the target's row for it is kept (`carry`) until the next step judges it. So the target never feeds a token twice,
    and what was drafted meanwhile is of use. A rejection emits a token of the residual and discards the drafts behind it; the
    next step waits for a block that follows it.

    Exact under "token" and "coupled": a draft is judged once, by its own row, and drafts that were discarded have decided
    nothing. (So a block that replaces a discarded one may be drawn with the same keys: nobody has looked at the first one's values,
    which rule "block", judging by later drafts too, would.) The drafter runs in a thread of its own on the CPU and on a stream of its own on a GPU. Speculation is not paused.
    """

    def __iter__(self):
        self.ahead: list[list[Draft]] = [[] for _ in self.rows]
        self.carry: list[Tensor | None] = [None] * len(self.rows)
        self.draft_params: SamplingTensors | None = None
        self.draft_map: Tensor | None = None
        self.worker = _Worker(self.device)
        try:
            yield from super().__iter__()
        finally:
            self.worker.close()

    def _step(self) -> list[list[int]]:
        stats, size = self.stats, self.drafter.block_size
        t0 = perf_counter()
        blocks = [self._most(row, size) for row in range(len(self.rows))]
        missing = [max(n - len(have), 0) for n, have in zip(blocks, self.ahead, strict=True)]
        if any(missing):
            with self.worker.beside():
                drafted = self._draft(missing)
            self._take(drafted, missing)
        drafts = [have[:n] for n, have in zip(blocks, self.ahead, strict=True)]
        more = [
            max(min(size, self._most(row, self.decoder.num_draft) - len(have)), 0)
            for row, have in enumerate(self.ahead)
        ]
        t1 = perf_counter()
        # Everything that comes from the host goes ahead of the forward.
        counts, position = [len(d) for d in drafts], self._position()
        feed, fed = self._fed(drafts)
        place = draft_offsets(counts, self.device)
        pending = self.worker.start(lambda: self._draft(more)) if any(more) else None
        try:
            output = self.forward(feed, fed, self.cache)
            t2 = perf_counter()
            emitted, accepted, carry = self._verify_blocks(output.logits, drafts, fed, place, position)
        finally:
            drafted = pending.result() if pending is not None else None
        t3 = perf_counter()
        if any(more):
            self._take(drafted, more)
        self.cache.advance(fed)
        self.cache.rollback([n - a for n, a in zip(counts, accepted, strict=True)])
        stats.record(counts, accepted, emitted=sum(map(len, emitted)))
        for row, (n, a) in enumerate(zip(counts, accepted, strict=True)):
            if a < n:
                stats.discarded += len(self.ahead[row]) - n
            self.ahead[row] = self.ahead[row][n:] if a == n else []
        self.carry = carry
        emitted = self._emit(emitted)
        # What the drafter has read of a rejected draft, and behind it, is no part of the text.
        lengths = [
            len(row.tokens) - 1 if a < n else len(row.tokens) + len(have)
            for row, have, n, a in zip(self.rows, self.ahead, counts, accepted, strict=True)
        ]
        with self.worker.beside():
            self.drafter.rewind(lengths, ahead=self.decoder.num_draft + 1)
        emitted = self._finish(emitted)
        stats.clock(t0, t1, t2, t3, perf_counter())
        return emitted

    def _most(self, row: int, count: int) -> int:
        """At most `count` drafts, none of them past the end of the row."""
        return min(count, self.rows[row].limit - len(self.rows[row].tokens))

    def _draft(self, counts: list[int]) -> DraftBatch | None:
        """Proposals of counts[b] tokens behind all drafts of each row."""
        tokens = [row.tokens + [d.token for d in have] for row, have in zip(self.rows, self.ahead, strict=True)]
        position = on_device([len(t) for t in tokens], torch.int64, self.device)
        context = DraftContext(tokens, position, self.params, counts, self.decoder.rule, lambda d: None)
        return self.drafter.propose(context)

    def _take(self, batch: DraftBatch | None, counts: list[int]) -> None:
        """Appends the proposals to the rows' drafts."""
        if batch is None or batch.counts != counts:
            got = None if batch is None else batch.counts
            raise ValueError(f"SpeculativeDecoder: a drafter with a block_size must propose {counts} drafts, got {got}")
        self.draft_params, self.draft_map = batch.params, batch.target_to_draft
        tokens, place = batch.tokens.tolist(), 0
        rows = range(len(tokens)) if batch.rows is None else batch.rows.tolist()
        for have, count in zip(self.ahead, counts, strict=True):
            for j in range(place, place + count):
                logits = batch.logits[rows[j]] if batch.logits is not None else None
                nucleus = tuple(part[j] for part in batch.nucleus) if batch.nucleus is not None else None
                have.append(Draft(tokens[j], logits, nucleus))
            place += count

    def _fed(self, drafts: list[list[Draft]]) -> tuple[Tensor, list[int]]:
        """Tokens for the target, padded, and how many of each row: its last token where there is no row kept for it, its drafts."""
        rows = [
            ([] if carry is not None else row.tokens[-1:]) + [d.token for d in have]
            for row, carry, have in zip(self.rows, self.carry, drafts, strict=True)
        ]
        feed = padded_on_device(rows, self.device)
        return feed, [len(r) for r in rows]

    def _verify_blocks(
        self, logits: Tensor, drafts: list[list[Draft]], fed: list[int], place: Tensor, position: Tensor
    ) -> tuple[list[list[int]], list[int], list[Tensor | None]]:
        """Emitted tokens, accepted drafts and kept row of each request."""
        parts = []
        for carry, rows in zip(self.carry, logits.split(fed), strict=True):
            parts += [carry[None], rows] if carry is not None else [rows]
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        flat = [d for have in drafts for d in have]
        given = {}
        if flat[0].logits is not None:
            nuclei = [torch.stack(part) for part in zip(*(d.nucleus for d in flat), strict=True)]
            given = {
                "draft_logits": torch.stack([d.logits for d in flat]), "draft_nucleus": Nucleus(*nuclei),
                "draft_params": self.draft_params, "target_to_draft": self.draft_map,
            }  # fmt: skip
        tokens = on_device([d.token for d in flat], torch.int32, self.device)
        out = verify_chain(
            rows, tokens, place, self.params, position, rule=self.decoder.rule, max_draft=max(map(len, drafts)),
            emit_bonus=False, **given,
        )  # fmt: skip
        packed = torch.cat([out.tokens, out.num_accepted[:, None], out.num_emitted[:, None], out.status[:, None]], 1)
        emitted, accepted, carry, end = [], [], [], 0
        for row, have, values in zip(self.rows, drafts, packed.tolist(), strict=True):
            row.status |= values[-1]
            accepted.append(values[-3])
            emitted.append(values[: values[-2]])
            end += len(have) + 1
            whole = values[-3] == len(have)
            carry.append(rows[end - 1].clone() if whole else None)
        return emitted, accepted, carry

    def _finish(self, emitted: list[list[int]]) -> list[list[int]]:
        keep = self._running()
        self.ahead, self.carry = [self.ahead[i] for i in keep], [self.carry[i] for i in keep]
        if self.draft_params is not None and 0 < len(keep) < len(self.rows):
            self.draft_params = select_params(self.draft_params, on_device(keep, torch.int64, self.device))
        with self.worker.beside():
            return super()._finish(emitted)


class _Worker:
    """Runs the drafter beside the target."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = ThreadPoolExecutor(1) if self.stream is None else None

    def start(self, work):
        """A handle whose `result()` waits for `work`."""
        if self.stream is None:
            return self.pool.submit(torch.inference_mode()(work))
        return _OnStream(self.stream, work)

    @contextlib.contextmanager
    def beside(self):
        """For what the drafter does while the target waits: on the same stream as the rest, whose memory its cache is."""
        if self.stream is None:
            yield
            return
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            yield
        main.wait_stream(self.stream)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


class _OnStream:
    """Work launched on a stream of its own, ahead of what the caller launches next."""

    def __init__(self, stream, work):
        self.stream = stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.value = work()

    def result(self):
        main = torch.cuda.current_stream(self.stream.device)
        main.wait_stream(self.stream)
        # Memory of the other stream, which would hand it out again while this one reads.
        batch = self.value
        for tensor in (batch.tokens, batch.logits, batch.rows, *(batch.nucleus or ())) if batch is not None else ():
            if tensor is not None:
                tensor.record_stream(main)
        return batch
