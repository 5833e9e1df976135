"""Speculative decoding with transformers models, on the package's own ops."""

from .decoder import GenerateResult, SpeculativeDecoder
from .drafters import (
    ChainDrafter,
    DraftBatch,
    DraftContext,
    Drafter,
    DraftModelDrafter,
    DraftPart,
    DSparkDrafter,
    DSparkPart,
    EagleDrafter,
    EagleModel,
    FlashSpecDrafter,
    FlashSpecModel,
    PromptLookupDrafter,
    StepOutcome,
    load_drafter_part,
)
from .dspark_config import DSparkConfig
from .dspark_model import DSparkModel
from .forward import ModelForward
from .packed import PackedForward
from .paged_cache import PagedCache
from .ragged_cache import RaggedCache
from .rollback import CacheRollback, rollback_attention_mask
from .stats import SpecDecodeStats
from .support import UnsupportedModel

__all__ = [
    "CacheRollback",
    "ChainDrafter",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkModel",
    "DSparkPart",
    "DraftBatch",
    "DraftContext",
    "DraftModelDrafter",
    "DraftPart",
    "Drafter",
    "EagleDrafter",
    "EagleModel",
    "FlashSpecDrafter",
    "FlashSpecModel",
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
    "load_drafter_part",
    "rollback_attention_mask",
]
