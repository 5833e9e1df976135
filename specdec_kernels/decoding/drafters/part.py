"""What is trained of a drafter, and its file: `config.json` and `model.safetensors` in a folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import target_to_draft_from_d2t
from ..weight_stamp import WeightStamp

_FORMAT = 1
_TARGET = ("hidden_size", "num_hidden_layers", "vocab_size")


class DraftPart(nn.Module):
    """The modules that a drafter adds to its target, whose embedding and LM head it uses (shared storage, frozen).

    Parameters are the trained ones alone: those of the target are reached through `target`, which is no submodule.

    Args:
        target: the transformers causal LM.
        draft_ids: int [Vd], the target ids that can be drafted, ascending; None: all of them.
        options: the other arguments of the subclass, written to config.json.
    """

    kind: ClassVar[str]
    parts: ClassVar[dict[str, type[DraftPart]]] = {}

    def __init_subclass__(cls) -> None:
        DraftPart.parts[cls.kind] = cls

    def __init__(self, target, *, draft_ids: Tensor | Sequence[int] | None = None, **options: Any):
        super().__init__()
        self._target = (target,)
        self.options = options
        self.vocab_size = target.get_output_embeddings().weight.shape[0]
        self.hidden_size = target.config.get_text_config(decoder=True).hidden_size
        self.draft_ids: Tensor | None
        if draft_ids is not None:
            ids = torch.as_tensor(draft_ids, dtype=torch.int64)
            if ids.dim() != 1 or not len(ids) or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0:
                raise ValueError(
                    f"{type(self).__name__}: draft_ids must be ascending target ids, got {ids.tolist()[:8]}.."
                )
            if int(ids[-1]) >= self.vocab_size:
                raise ValueError(
                    f"{type(self).__name__}: draft_ids must be below {self.vocab_size}, got {int(ids[-1])}"
                )
            self.register_buffer("draft_ids", ids.to(target.device))
        else:
            self.draft_ids = None
        self._head: tuple[WeightStamp, Tensor] | None = None

    @property
    def target(self):
        return self._target[0]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose states the part reads, as `Drafter.taps`."""
        raise NotImplementedError

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings, [.., H]."""
        return self.target.get_input_embeddings()(tokens)

    @property
    def head(self) -> Tensor:
        """The LM head's rows of the ids that can be drafted, [Vd, H]."""
        weight = self.target.get_output_embeddings().weight
        stamp = WeightStamp([weight])
        if self._head is None or self._head[0] != stamp:
            with torch.inference_mode(False):  # training reads them too
                rows = weight.detach()
                self._head = stamp, rows if self.draft_ids is None else rows.index_select(0, self.draft_ids)
        return self._head[1]

    def target_to_draft(self) -> Tensor | None:
        """What the ops take for a reduced vocabulary; None for all ids."""
        if self.draft_ids is None:
            return None
        return target_to_draft_from_d2t(self.draft_ids, self.vocab_size, offsets=False)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    def tensors(self) -> dict[str, Tensor]:
        """What the file holds: everything but the target's own."""
        own = {id(p) for p in self.target.parameters()}
        return {name: t for name, t in self.state_dict(keep_vars=True).items() if id(t) not in own}

    # files

    def save(
        self, folder: Path | str, *, dtype: str = "float32", about: dict | None = None, tokenizer=None
    ) -> None:  # fmt: skip
        """Writes the part; `dtype`: "float32", "float16", or "int8" (matrices by rows, each with its largest magnitude as 127, the
        rest in float16). `about`: anything else worth keeping, say how it was trained. `tokenizer`: the target's, whose vocabulary
        `load` can then compare."""
        from safetensors.torch import save_file

        if dtype not in ("float32", "float16", "int8"):
            raise ValueError(f'{type(self).__name__}.save: dtype must be "float32", "float16" or "int8", got {dtype!r}')
        stored = {}
        for name, tensor in self.tensors().items():
            tensor = tensor.detach().cpu()
            if not tensor.is_floating_point():
                stored[name] = tensor.to(torch.int32)
            elif dtype == "int8" and tensor.dim() == 2:
                scale = tensor.float().abs().amax(1).clamp_min(1e-30) / 127
                stored[f"{name}.int8"] = (tensor.float() / scale[:, None]).round().to(torch.int8)
                stored[f"{name}.scale"] = scale
            else:
                stored[name] = tensor.to(torch.float32 if dtype == "float32" else torch.float16)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights, work = folder / "model.safetensors", folder / ".model.safetensors.part"
        save_file({name: t.contiguous() for name, t in stored.items()}, str(work), metadata={"format": "pt"})
        config = {
            "format": _FORMAT, "drafter": self.kind, "options": self.options, "target": _facts(self.target),
            "sha256": _sha256(work), "about": about or {},
        }  # fmt: skip
        if tokenizer is not None:
            config["target"]["tokenizer"] = _vocabulary(tokenizer)
        if self.draft_ids is not None:
            config["draft_vocab_size"] = len(self.draft_ids)
        # The checksum is in the config: what an interruption leaves is not taken for a whole.
        os.replace(work, weights)
        part = folder / ".config.json.part"
        part.write_text(json.dumps(config, indent=1) + "\n")
        os.replace(part, folder / "config.json")

    @staticmethod
    def load(folder: Path | str, target, tokenizer=None) -> DraftPart:
        """The part of `folder` for this target, of the class that its config names. With `tokenizer`, the target's, its vocabulary
        must be that of the tokenizer which the part was saved with. A target with other weights of the same shape is not refused:
        the text has its law all the same, only fewer drafts are accepted.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the part was made for another kind of target or tokenizer, or the files are not whole.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{folder}: config.json is no JSON: {error}") from None
        if (
            not isinstance(config, dict)
            or config.get("format") != _FORMAT
            or config.get("drafter") not in DraftPart.parts
        ):
            kinds = ", ".join(DraftPart.parts)
            got = config.get("drafter") if isinstance(config, dict) else type(config).__name__
            raise ValueError(f"{folder}: config.json must be of a drafter ({kinds}) in format {_FORMAT}, got {got!r}")
        for name, kind in (("target", dict), ("options", dict), ("sha256", str)):
            if not isinstance(config.get(name), kind):
                raise ValueError(f"{folder}: config.json must have {name!r}, got {config.get(name)!r}")
        facts = _facts(target)
        for name in ("model_type", *_TARGET):
            if config["target"].get(name) != facts[name]:
                raise ValueError(
                    f"{folder}: the drafter was made for a target with {name} {config['target'].get(name)}, got {facts[name]}"
                )
        saved = config["target"].get("tokenizer")
        if tokenizer is not None and saved is not None and saved != _vocabulary(tokenizer):
            raise ValueError(
                f"{folder}: the drafter was made for a tokenizer with vocabulary {saved}, got {_vocabulary(tokenizer)}"
            )
        stored = _read(folder, config["sha256"])
        ids = stored.pop("draft_ids", None)
        try:
            part = DraftPart.parts[config["drafter"]](target, draft_ids=ids, **config["options"])
        except TypeError as error:
            raise ValueError(f"{folder}: options of config.json do not fit: {error}") from None
        own = part.tensors()
        own.pop("draft_ids", None)
        wrong = [f"{n} {list(t.shape)}" for n, t in own.items() if n not in stored or stored[n].shape != t.shape]
        extra = sorted(set(stored) - set(own))
        if wrong or extra:
            raise ValueError(
                f"{folder}: tensors must be those of its config; wrong or missing: {wrong}, not known: {extra}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(stored[name])
        return part.eval()


def _vocabulary(tokenizer) -> str:
    """SHA-256 of the tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _facts(target) -> dict:
    config = target.config.get_text_config(decoder=True)
    return {
        "model_type": config.model_type, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers, "vocab_size": target.get_output_embeddings().weight.shape[0],
    }  # fmt: skip


def _read(folder: Path, sha256: str) -> dict[str, Tensor]:
    """The file's tensors, int8 ones as float32."""
    from safetensors.torch import load_file

    weights = folder / "model.safetensors"
    digest = _sha256(weights)
    if digest != sha256:
        raise ValueError(f"{weights}: truncated or changed: sha256 must be {sha256}, got {digest}")
    stored = load_file(str(weights))
    out = {}
    for name, tensor in stored.items():
        if name.endswith(".int8"):
            name = name.removesuffix(".int8")
            out[name] = tensor.float() * stored[f"{name}.scale"][:, None]
        elif not (name.endswith(".scale") and f"{name.removesuffix('.scale')}.int8" in stored):
            out[name] = tensor.long() if name == "draft_ids" else tensor
    return out


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
