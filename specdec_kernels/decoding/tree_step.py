"""One step over trees of drafts: who attends whom, which path is accepted, and what the cache keeps of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import SamplingTensors, sample, verify_tree
from ..trees import ancestors
from .cache import RowCache
from .drafters.base import DraftBatch
from .masks import TreeShape
from .transfers import on_device, padded_on_device


class TreeStep:
    """The trees of one `DraftBatch`, padded to `longest` drafts a request. `shape` is what the forward takes, `depths` the
    length of each request's longest path."""

    def __init__(self, drafts: DraftBatch, longest: int):
        assert drafts.parents is not None
        self.counts, self.device = drafts.counts, drafts.tokens.device
        # The host follows the accepted path, so it reads the trees, in one transfer.
        both = torch.stack([drafts.tokens.to(torch.int64), drafts.parents.to(torch.int64)]).tolist()
        self.tokens, self.parents, start = [], [], 0
        for count in self.counts:
            self.tokens.append(both[0][start : start + count])
            self.parents.append(both[1][start : start + count])
            start += count
        padded = [p + [-1] * (longest - len(p)) for p in self.parents]
        depth, visible = ancestors(torch.tensor(padded, dtype=torch.int64))
        self.depth = depth.clamp_min_(0).to(torch.int64)
        self.depths = self.depth.amax(1).tolist()
        self.shape = TreeShape(self.depth.to(self.device), visible.to(self.device))

    def coupled(
        self, logits: Tensor, params: SamplingTensors, position: Tensor
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Emitted tokens, accepted nodes and status of each request: every node's token is sampled as it is without speculation,
        and the path follows the drafts that equal it."""
        rows = [b for b, n in enumerate(self.counts) for _ in range(n + 1)]
        depth = [d for b, n in enumerate(self.counts) for d in self.depth[b, : n + 1].tolist()]
        rows, depth = (on_device(values, torch.int64, self.device) for values in (rows, depth))
        out = sample(logits, params, position.index_select(0, rows) + depth, rows=rows)
        drawn, status = torch.stack([out.tokens, out.status]).tolist()
        emitted, paths, bits, start = [], [], [], 0
        for tokens, parents in zip(self.tokens, self.parents, strict=True):
            node, path, text, worst = 0, [], [], 0
            while True:
                token = drawn[start + node]
                text.append(token)
                worst |= status[start + node]
                node = next(
                    (n for n, (t, p) in enumerate(zip(tokens, parents, strict=True), 1) if t == token and p == node), 0
                )
                # A row with nothing finite ends its request's path.
                if not node or worst & 1:
                    break
                path.append(node)
            emitted.append(text)
            paths.append(path)
            bits.append(worst)
            start += len(tokens) + 1
        return emitted, paths, bits

    def target_only(
        self, logits: Tensor, drafts: DraftBatch, params: SamplingTensors, place: tuple[Tensor, Tensor]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """The same by `verify_tree`; place: offsets of the drafts and positions of the requests' next tokens."""
        out = verify_tree(
            logits, drafts.tokens, drafts.parents, place[0], params, place[1], rule="target_only",
            max_depth=max(self.depths),
        )  # fmt: skip
        packed = torch.cat([out.tokens, out.path, out.num_accepted[:, None], out.status[:, None]], 1).tolist()
        width = out.tokens.shape[1]
        accepted = [values[-2] for values in packed]
        emitted = [values[: a + 1] for values, a in zip(packed, accepted, strict=True)]
        paths = [values[width : width + a] for values, a in zip(packed, accepted, strict=True)]
        return emitted, paths, [values[-1] for values in packed]

    def compact(self, cache: RowCache, paths: list[list[int]]) -> None:
        """Moves the accepted nodes' cache entries behind the root's, before the cache is advanced."""
        if all(path == list(range(1, len(path) + 1)) for path in paths):
            return
        cache.compact(padded_on_device(paths, self.device, fill=-1, dtype=torch.int32))
