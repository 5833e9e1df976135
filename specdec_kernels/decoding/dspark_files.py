"""DSpark checkpoints on disk: config.json beside model.safetensors, whole or in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .dspark_config import DSparkConfig

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INDEX = (torch.int32, torch.int64)


def read_checkpoint(path: Path | str) -> tuple[DSparkConfig, dict[str, Tensor]]:
    """The config and the tensors that a drafter has, on the CPU. ValueError naming the file, key or tensor that is not as it must
    be; shapes are for the caller to check."""
    path = Path(path)
    raw = _json(path / "config.json")
    try:
        config = DSparkConfig.from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    tensors: dict[str, Tensor] = {}
    for file, names in _files(path).items():
        found = _read(file)
        if names is not None and found.keys() != names:
            name = min(found.keys() ^ names)
            where = "in the index alone" if name in names else "not in the index"
            raise ValueError(f"{file}: tensor {name!r} is {where}")
        tensors |= found
    for name, tensor in tensors.items():
        allowed = _INDEX if name == "d2t" else _DTYPES
        if tensor.dtype not in allowed:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise ValueError(
                f"DSpark checkpoint {path}: tensor {name!r} must be one of {kinds} (quantised drafters are not supported), "
                f"got {str(tensor.dtype).removeprefix('torch.')}"
            )
    heads = [name for name in tensors if name.startswith("confidence_head.")]
    if not config.enable_confidence_head:
        for name in heads:
            del tensors[name]
    elif not heads:
        config = replace(config, enable_confidence_head=False, confidence_head_with_markov=False)
    if "lm_head.weight" not in tensors and "d2t" in tensors:
        raise ValueError(
            f"DSpark checkpoint {path}: tensor 'lm_head.weight' is missing: a reduced vocabulary needs its own"
        )
    return config, tensors


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            # Tables for training, a placeholder, and what is made from the config: engines skip them too.
            return {name: opened.get_tensor(name) for name in opened.keys() if not _skipped(name)}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a readable safetensors file: {error}") from error


def _skipped(name: str) -> bool:
    return "t2d" in name or "mask_embedding" in name or name.endswith("rotary_emb.inv_freq")


def _files(path: Path) -> dict[Path, set[str] | None]:
    """The files that hold the tensors, and the names that each must have (None: whatever it has)."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists() or not index.exists():
        return {single: None}
    where = _json(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{index}: weight_map must be a table of file names, got {where!r}")
    files: dict[Path, set[str] | None] = {path / file: set() for file in where.values()}
    for name, file in where.items():
        if Path(file).name != file:
            raise ValueError(f"{index}: weight_map must name files beside it, got {file!r}")
        if not _skipped(name):
            names = files[path / file]
            assert names is not None
            names.add(name)
    return files


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must be a JSON object, got {type(value).__name__}")
    return value


def write_checkpoint(path: Path | str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes both files; each is complete or not there."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    temporary = path / "model.safetensors.tmp"
    save_file(kept, temporary, metadata={"format": "pt"})
    os.replace(temporary, path / "model.safetensors")
    temporary = path / "config.json.tmp"
    temporary.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(temporary, path / "config.json")
