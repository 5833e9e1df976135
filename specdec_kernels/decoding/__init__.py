"""Speculative decoding with transformers models, on the package's own ops."""

from .decoder import GenerateResult, SpeculativeDecoder
from .drafters import DraftBatch, DraftContext, Drafter, DraftModelDrafter, PromptLookupDrafter, StepOutcome
from .forward import ModelForward
from .packed import PackedForward
from .paged_cache import PagedCache
from .ragged_cache import RaggedCache
from .rollback import CacheRollback, rollback_attention_mask
from .stats import SpecDecodeStats
from .support import UnsupportedModel

__all__ = [
    "CacheRollback",
    "DraftBatch",
    "DraftContext",
    "DraftModelDrafter",
    "Drafter",
    "GenerateResult",
    "ModelForward",
    "PackedForward",
    "PagedCache",
    "PromptLookupDrafter",
    "RaggedCache",
    "SpecDecodeStats",
    "SpeculativeDecoder",
    "StepOutcome",
    "UnsupportedModel",
    "rollback_attention_mask",
]
