"""The training loop: transformers' Trainer over `FeatureBatches`, with checkpoints that resume."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path

import torch
import transformers
from torch import nn

from .features import FeatureBatch, FeatureBatches

_log = logging.getLogger(__name__)


class PartTrainer(transformers.Trainer):
    """Trains `model.part`, of which alone checkpoints hold the weights.

    model: a module that takes a `FeatureBatch` and returns {"loss": .., further figures to log}, with `rates()`: a list of
    (parameters, factor of the learning rate).
    """

    def __init__(self, model: nn.Module, batches: FeatureBatches, args: transformers.TrainingArguments):
        super().__init__(model=model, args=args, train_dataset=batches, data_collator=lambda items: {"batch": items[0]})
        self.figures: dict[str, list[float]] = {}

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups, lr, decay = self.model.rates(), self.args.learning_rate, self.args.weight_decay
            self.optimizer = torch.optim.AdamW(
                [
                    {"params": [p for p in ps if (p.dim() > 1) == matrices], "lr": lr * f, "weight_decay": decay * matrices}
                    for ps, f in groups
                    for matrices in (True, False)
                ],
                betas=(0.9, 0.95),
            )  # fmt: skip
        return self.optimizer

    def _prepare_inputs(self, inputs):
        batch: FeatureBatch = inputs["batch"]
        device = self.args.device
        return {"batch": FeatureBatch(*(t.to(device) if torch.is_tensor(t) else t for t in vars(batch).values()))}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        loss = out["loss"]
        if not math.isfinite(float(loss.detach())):
            raise FloatingPointError(
                f"training: loss is {float(loss)} at step {self.state.global_step + 1}, in the batch of texts {inputs['batch'].texts}"
            )
        for name, value in out.items():
            if name != "loss":
                self.figures.setdefault(name, []).append(float(value))
        return (loss, out) if return_outputs else loss

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs = {**logs, **{name: round(sum(v) / len(v), 4) for name, v in self.figures.items()}}
            self.figures.clear()
        super().log(logs, *args, **kwargs)


def train(
    model: nn.Module, batches: FeatureBatches, out: Path | str, *, epochs: float, learning_rate: float, seed: int = 0,
    save_steps: int = 200, progress: bool = True, bf16: bool = False,
) -> None:  # fmt: skip
    """Trains `model.part`, keeping checkpoints in `out`/checkpoints; goes on from the newest whole one.

    bf16: matrix products in bfloat16 (autocast); weights, losses and the optimizer stay in float32.

    Raises FloatingPointError naming step and batch where the loss is not finite; the checkpoints stay.
    """
    folder = Path(out) / "checkpoints"
    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, learning_rate=learning_rate, per_device_train_batch_size=1,
        lr_scheduler_type="cosine", warmup_steps=round(0.05 * epochs * len(batches)), weight_decay=0.01, max_grad_norm=1.0, seed=seed, data_seed=seed,
        save_strategy="steps", save_steps=save_steps, save_total_limit=2, logging_steps=50, report_to=[],
        remove_unused_columns=False, disable_tqdm=not progress, use_cpu=next(model.parameters()).device.type == "cpu",
        dataloader_pin_memory=False, bf16=bf16,
    )  # fmt: skip
    model.train()
    PartTrainer(model, batches, args).train(resume_from_checkpoint=newest_checkpoint(folder))
    model.eval()


def newest_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: its state is the last of its files."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rsplit("-", 1)[1]), reverse=True)
    for path in found:
        with contextlib.suppress(OSError, ValueError):
            json.loads((path / "trainer_state.json").read_text())
            return str(path)
        _log.warning("%s is not complete: an earlier one is used", path)
    return None
