"""Drafters: what proposes the tokens that the target verifies."""

from .base import DraftBatch, DraftContext, Drafter, StepOutcome
from .draft_model import DraftModelDrafter
from .prompt_lookup import PromptLookupDrafter

__all__ = ["DraftBatch", "DraftContext", "DraftModelDrafter", "Drafter", "PromptLookupDrafter", "StepOutcome"]
