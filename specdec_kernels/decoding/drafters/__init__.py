"""Drafters: what proposes the tokens that the target verifies."""

from .base import DraftBatch, DraftContext, Drafter, StepOutcome
from .chain import ChainDrafter
from .draft_model import DraftModelDrafter
from .dspark import DSparkDrafter
from .dspark_part import DSparkPart
from .eagle import EagleDrafter, EagleModel
from .flashspec import FlashSpecDrafter, FlashSpecModel
from .part import DraftPart
from .prompt_lookup import PromptLookupDrafter

#: `DraftPart.load`: the trained part of a drafter from its folder, for a target.
load_drafter_part = DraftPart.load

__all__ = [
    "ChainDrafter",
    "DSparkDrafter",
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
    "PromptLookupDrafter",
    "StepOutcome",
    "load_drafter_part",
]
