"""FlashSpec: a drafter that is the target's own first layers, two adapters and a small head.

"FlashSpec" here is this project's reading of a text that has no public code; packages and repositories of that name are
something else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draft_stack import DraftStack, StackForward
from ..forward import ForwardOutput, ModelForward
from ..masks import wanted_rows
from ..packed import PackedForward
from .draft_model import DraftModelDrafter
from .part import DraftPart


class FlashSpecModel(DraftPart):
    """The trained part: `adapters` decoder layers behind the target's first `shared` ones, and a head

        h + W2 silu(W1 h),  W1 [H / 2, H],  W2 [H, H / 2]

    in front of a norm and the target's LM head. Embedding, shared layers and LM head are the target's own, in the same storage and
    frozen, so that the drafter reads the very states that the target's layer `shared` gives. It starts as the target
    without its last layers: the adapters are copies of those behind the shared ones, W2 is 0.

    Args:
        target: a transformers causal LM.
        shared: N; None: a quarter of the target's layers.
        adapters: decoder layers that are trained.
        draft_ids: see `DraftPart`.
        intermediate_size: of the adapters' MLP; None: the target's. Where it differs, adapters start as if they were not there.
    """

    kind = "flashspec"

    def __init__(
        self,
        target,
        *,
        shared: int | None = None,
        adapters: int = 2,
        draft_ids=None,
        intermediate_size: int | None = None,
    ):
        layers = target.get_decoder().layers
        shared = max(1, len(layers) // 4) if shared is None else shared
        if not isinstance(shared, int) or not 1 <= shared <= len(layers):
            raise ValueError(
                f"FlashSpecModel: shared must be an int in 1..{len(layers)}, the target's layers, got {shared!r}"
            )
        if not isinstance(adapters, int) or adapters < 1:
            raise ValueError(f"FlashSpecModel: adapters must be an int >= 1, got {adapters!r}")
        super().__init__(
            target, draft_ids=draft_ids, shared=shared, adapters=adapters, intermediate_size=intermediate_size
        )
        self.stack = DraftStack(target, shared + adapters, shared=shared, intermediate_size=intermediate_size)
        self.stack.start_from(target)
        size = self.hidden_size
        self.squeeze = nn.Linear(size, size // 2, bias=False)
        self.widen = nn.Linear(size // 2, size, bias=False)
        nn.init.zeros_(self.widen.weight)
        for module in (self.squeeze, self.widen):
            module.to(device=target.device, dtype=target.dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.options["shared"] - 1,)

    def finish(self, states: Tensor) -> Tensor:
        """What the LM head reads, of states behind the last adapter."""
        return self.stack.norm(states + self.widen(F.silu(self.squeeze(states))))


class _Forward:
    """What `DraftModelDrafter` asks of a model, of a `FlashSpecModel`."""

    def __init__(self, model: FlashSpecModel, matmul_dtype: torch.dtype | None):
        self.model = model
        #: The target's forward: where it is packed, so are the shared layers.
        self.target: ModelForward | None = None
        self.stack = StackForward(model.stack, self._shared, matmul_dtype)
        self.device, self.vocab_size = self.stack.device, len(model.head)
        linear = self.stack.linear
        self._squeeze, self._widen = linear(lambda: model.squeeze.weight), linear(lambda: model.widen.weight)
        self._head = linear(lambda: model.head)

    def _shared(self) -> list:
        packed = isinstance(self.target, PackedForward) and self.target.fits
        return self.target.layers[: self.model.options["shared"]] if packed else []

    def new_cache(self, *args, **options):
        return self.stack.new_cache(*args, **options)

    def refresh(self) -> None:
        self.stack.refresh()

    def __call__(self, tokens: Tensor, counts: list[int], cache, *, last_only: bool = False) -> ForwardOutput:
        states = self.stack(self.model.embed(tokens), counts, cache)
        rows = wanted_rows(counts, tokens.shape[1], last_only, tokens.device)
        states = states if rows is None else states.index_select(0, rows)
        states = self._widen(F.silu(self._squeeze(states))) + states
        return ForwardOutput(self._head(self.stack.norm(states)), None)


class FlashSpecDrafter(DraftModelDrafter):
    """Drafts with a `FlashSpecModel`, verified `block_size` at a time while the next ones are drafted (`BlockRun`).

    A request's drafts run at most `num_draft` tokens ahead of its verified text. A rejection discards those behind it, and their
    entries in the drafter's cache.

    Args:
        model: the trained part; its target is the one to be decoded.
        block_size: drafts that are verified together; None: a step drafts `num_draft` tokens, then verifies them all.
        matmul_dtype: of the own layers' and the head's packed matrices in float32 models on the CPU, torch.float32 or torch.bfloat16; None: bfloat16 where the
            processor multiplies it natively. It changes drafts, not the law of the text; a seed's text under rules "token" and
            "block" depends on it as on all that drafts do.
        cache, page_size, budget, sinks: as in `DraftModelDrafter`.
    """

    def __init__(
        self, model: FlashSpecModel, *, block_size: int | None = 2, matmul_dtype: torch.dtype | None = None, cache: str = "ragged", page_size: int = 16,
        budget: int | None = None, sinks: int = 0,
    ):  # fmt: skip
        self.model = model
        self._last_id = model.vocab_size - 1
        self._set_up(
            _Forward(model, matmul_dtype), model.target_to_draft(), cache, page_size, budget, sinks, block_size
        )

    def check_target(self, target) -> None:
        if target is not self.model.target:
            raise ValueError("FlashSpecDrafter: target must be the model's own, got another one")

    def attach(self, forward) -> None:
        self.forward.target = forward
