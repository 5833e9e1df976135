"""A forward for few tokens on CPU: `PackedLayers` between a packed embedding and LM head."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import RowCache
from .forward import ForwardOutput, ModelForward, join_taps, model_lock
from .masks import TreeShape, row_positions, wanted_rows
from .packed_layers import MAX_ROWS, PackedLayers, PackedLinear, PackedNorm, unfit_layers
from .weight_stamp import WeightStamp

_log = logging.getLogger(__name__)

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_TOLERANCE = 1e-3
#: Row counts for which both paths are compared: all that a single request has, some of those of batches.
COMPARED = (*range(1, 17), 32, 64, 128)


def _stamp(model) -> tuple:
    """What a packed copy is made from: the modules, the parameters, the norms' epsilons."""
    modules = tuple(model.modules())
    return modules, WeightStamp(model.parameters()), [getattr(m, "variance_epsilon", None) for m in modules]


class PackedForward(ModelForward):
    """`ModelForward` with a fast path for at most `MAX_ROWS` tokens in all; more tokens (prefill) take the model's own.

    The construction packs the weights, which doubles their memory, and compares both paths on random tokens; use `build`,
    which says None or raises where the model, its dtype or the machine does not fit.

    `refresh` (once per `generate`) packs again what has changed since, and leaves every forward to the model where that
    no longer fits, say because of a hook. It goes by the modules and by identity, storage and version of their tensors:
    values written through `.data` leave no trace there, so call `repack` after that. Weights and hooks must not change
    while a `generate` runs.
    """

    MAX_ROWS = MAX_ROWS

    def __init__(self, model):
        super().__init__(model)
        with model_lock(model):
            reason = self.unfit(model)
            if reason:
                raise ValueError(f"PackedForward: {reason}")
            self.repack()

    def repack(self) -> None:
        """Packs the model's weights as they are now; ArithmeticError where both paths then disagree."""
        with model_lock(self.model), torch.inference_mode(False), torch.no_grad():
            self._fits, self._disagreement = False, None
            self._layers = None  # frees the old copy before the new one is made
            self._stamp = _stamp(self.model)
            self._pack()
            self._fits = True
            try:
                self._compare()
            except ArithmeticError as error:
                self._fits, self._disagreement = False, str(error)
                raise

    @property
    def fits(self) -> bool:
        """Whether the packed path is taken."""
        return self._fits

    @property
    def layers(self) -> list:
        """The packed layers, for who shares them."""
        return self._layers.layers

    def refresh(self) -> None:
        with model_lock(self.model):
            reason = self.unfit(self.model)
            if reason is None and self._stamp != _stamp(self.model):
                with contextlib.suppress(ArithmeticError):  # kept in _disagreement
                    self.repack()
            reason = reason or self._disagreement
            self._fits = reason is None
        if reason:
            _log.info("packed forward not used: %s", reason)

    def _pack(self) -> None:
        base = self.model.model
        self._embed, self._final_norm = base.embed_tokens, PackedNorm(base.norm)
        self._packed_head = PackedLinear(self.model.lm_head)
        self._layers = PackedLayers(base.layers, base.rotary_emb, self.config)

    @staticmethod
    def unfit(model) -> str | None:
        """Why `model` cannot take the fast path, or None."""
        reason = unfit_layers(model, model.config, _MODELS)
        # Versions are how `refresh` sees a change.
        if reason is None and any(p.is_inference() for p in model.parameters()):
            reason = "parameters must not be inference tensors, which have no version"
        return reason

    @classmethod
    def build(cls, model, required: bool = False) -> PackedForward | None:
        """The fast path of `model`, or None (an error where `required`) if it does not fit or does not agree."""
        reason = cls.unfit(model)
        if reason is None:
            try:
                return cls(model)
            except ArithmeticError as error:
                reason = str(error)
        if required:
            raise ValueError(f"PackedForward: {reason}")
        _log.info("packed forward not used: %s", reason)
        return None

    def _compare(self) -> None:
        """Raises ArithmeticError unless both paths agree on random tokens, for the row counts in COMPARED."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (1, 8 + self.MAX_ROWS), generator=generator)
        cache = self.new_cache(1, capacity=tokens.shape[1])
        super().__call__(tokens[:, :8], [8], cache, last_only=True)
        cache.advance([8])
        expected = super().__call__(tokens[:, 8:], [self.MAX_ROWS], cache).logits
        for count in COMPARED:
            got = self(tokens[:, 8 : 8 + count], [count], cache).logits
            error = (got - expected[:count]).abs().max().item()
            limit = _TOLERANCE * expected.std().item()
            if not error <= limit:
                raise ArithmeticError(
                    f"{count} tokens: logits differ by {error:.2e} from the model's own, limit {limit:.2e}"
                )

    def __call__(
        self, tokens: Tensor, counts: list[int], cache: RowCache, *, last_only: bool = False,
        tree: TreeShape | None = None, taps: Sequence[int] = (),
    ) -> ForwardOutput:  # fmt: skip
        batch, count = tokens.shape
        if batch * count > self.MAX_ROWS or not self._fits:
            return super().__call__(tokens, counts, cache, last_only=last_only, tree=tree, taps=taps)
        cache.reserve(counts, count)
        index, positions = row_positions(cache, counts, count, tokens.device, tree)
        mask = self.masks(cache, index, positions, torch.float32, tree)
        x, states = self._layers(self._embed(tokens).view(batch * count, -1), positions, mask, cache, taps)
        rows = wanted_rows(counts, count, last_only, x.device)
        if -1 in taps:
            states[-1] = self._final_norm(x)
            hidden = states[-1] if rows is None else states[-1].index_select(0, rows)
        else:
            hidden = self._final_norm(x if rows is None else x.index_select(0, rows))
        every = wanted_rows(counts, count, False, x.device) if taps else None
        return ForwardOutput(self._packed_head(hidden), join_taps(states, taps, every))
