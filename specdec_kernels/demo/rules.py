"""Paired measurements of the verification rules: the same prompts, drafter and seeds under each."""

from __future__ import annotations

import copy
from statistics import median

from torch import Tensor

from .._schemas import RULES
from ..decoding import Drafter, SpeculativeDecoder
from .compare import Measurement, Mode, table

PLAIN = "plain"
HEADER = ["rule", "tokens", "steps", "drafts accepted", "per step", "tok/s", "over token", "over plain"]


def first_layers(model, count: int):
    """A causal LM of the model's first `count` decoder layers, its embedding, norm and head. Untrained as a drafter: good to
    compare rules by what they accept, too slow to gain time."""
    total = model.config.num_hidden_layers
    if not 1 <= count <= total:
        raise ValueError(f"first_layers: count must be in [1, {total}], got {count}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    draft = type(model)(config).to(model.dtype)
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft.eval()


class RuleComparison:
    """Decodes with each rule and plainly; draft lengths are fixed, so that the rules alone differ."""

    def __init__(self, model, drafter: Drafter, num_draft: int = 5):
        plain = SpeculativeDecoder(model, None)
        self.decoders = {PLAIN: plain} | {
            rule: SpeculativeDecoder(
                model, drafter, num_draft=num_draft, rule=rule, adaptive=False, forward=plain.forward
            )
            for rule in RULES
        }

    def warmup(self, prompt: Tensor) -> None:
        for decoder in self.decoders.values():
            decoder.generate(prompt, params=Mode().tensors(0), max_new_tokens=4)

    def round(self, prompt: Tensor, mode: Mode, tokens: int, seed: int, into: dict[str, Measurement]) -> None:
        """One run of each, back to back, so that the machine's other load meets them alike."""
        for name, decoder in self.decoders.items():
            result = decoder.generate(prompt, params=mode.tensors(seed), max_new_tokens=tokens)
            cell = into.setdefault(name, Measurement())
            cell.tokens.append(result.lengths[0])
            cell.seconds.append(result.stats.seconds)
            cell.calls.append(result.stats.target_calls)
            cell.stats.append(result.stats)


def rule_table(cells: dict[str, Measurement]) -> str:
    """Totals over the rounds; speeds as medians of paired ratios."""

    def over(name: str, base: str) -> str:
        return f"{median(a / b for a, b in zip(cells[name].rates, cells[base].rates, strict=True)):.2f}x"

    rows = []
    for name, cell in cells.items():
        steps = sum(cell.calls)
        accepted, drafted = (sum(getattr(s, field) for s in cell.stats) for field in ("accepted", "drafted"))
        share = f"{accepted / drafted:.2f}" if drafted else ""
        per_step = f"{accepted / steps:.2f}" if steps else ""
        figures = f"{sum(cell.tokens)}", f"{steps}", share, per_step, f"{median(cell.rates):.1f}"
        rows.append([name, *figures, over(name, "token"), over(name, PLAIN)])
    return table(rows, HEADER)
