"""Drafters for the demo's model: lookups, and the trained parts that the package ships or that a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..decoding import (
    Drafter,
    DraftModelDrafter,
    DSparkDrafter,
    EagleDrafter,
    FlashSpecDrafter,
    PromptLookupDrafter,
    load_drafter_part,
)

#: Folder of the parts that the package ships for SmolLM2-135M-Instruct, one folder each; NOTICE says of what they were made.
SHIPPED = Path(__file__).parent / "trained"


def _has(parts: Path, name: str) -> bool:
    return (parts / name / "config.json").is_file()


def draft_model(parts: Path | str | None = None):
    """The distilled small model of the folder, or None."""
    folder = Path(parts or SHIPPED) / "draft-model"
    if not (folder / "config.json").is_file():
        return None
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def available(target, parts: Path | str | None = None) -> dict[str, Callable[[], Drafter]]:
    """name -> what makes a drafter for this target: the lookups and whatever `parts` (default: the shipped folder) has.

    Raises ValueError where a part does not fit the target or is not whole.
    """
    folder = Path(parts or SHIPPED)
    out: dict[str, Callable[[], Drafter]] = {
        "lookup": PromptLookupDrafter,
        "lookup tree": lambda: PromptLookupDrafter(tree=True),
    }
    if _has(folder, "eagle"):
        eagle = load_drafter_part(folder / "eagle", target)
        out["eagle tree"] = lambda: EagleDrafter(eagle)
        out["eagle chain"] = lambda: EagleDrafter(eagle, tree=False)
    if _has(folder, "flashspec"):
        flashspec = load_drafter_part(folder / "flashspec", target)
        out["flashspec"] = lambda: FlashSpecDrafter(flashspec)
        out["flashspec, no blocks"] = lambda: FlashSpecDrafter(flashspec, block_size=None)
    if _has(folder, "dspark"):
        dspark = load_drafter_part(folder / "dspark", target).model
        out["dspark"] = lambda: DSparkDrafter(dspark)
        out["dspark, scheduled"] = lambda: DSparkDrafter(dspark, schedule="threshold")
    if (model := draft_model(folder)) is not None:
        out["draft model"] = lambda: DraftModelDrafter(model)
    return out
