"""The target's hidden states over the training texts, computed once and kept on disk.

A folder of shards, each a safetensors file of `_TEXTS` texts one behind the other: `tokens` int32 [n], `lengths` and `starts` int32
[texts], `states` float16 [n, (T + 1) H]: the tapped layers' output states side by side, and what the LM head reads. A shard
appears complete or not at all, so an interrupted run goes on with the first that is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..decoding.forward import ModelForward
from .texts import Text, in_dtype

_TEXTS = 256
_TOKENS = 2048  # of a forward


@dataclass
class FeatureBatch:
    """tokens int64 [B, S] · lengths, starts int64 [B]: tokens of a text, and the first whose prediction is trained · states float32
    [B, S, T H] of the taps · last float32 [B, S, H], what the LM head read · texts: which they are."""

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    states: Tensor
    last: Tensor
    texts: list[int]


def compute(
    target, texts: Sequence[Text], taps: Sequence[int], folder: Path | str, *, dtype: torch.dtype | None = None
) -> Path:
    """Fills the folder with the states of all texts, with a progress bar; what is there already is kept. A folder that has the
    states of more taps serves as well, and one of the first of these texts gets the others. dtype: to run the target in; None: the
    folder's, of a new one the target's own.

    Raises ValueError where the folder holds the states of other texts, of too few taps or of another target.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "meta.json"
    kept = json.loads(path.read_text()) if path.exists() else None
    if kept is not None and dtype is None:
        dtype = getattr(torch, str(kept.get("dtype")), None)
    forward = ModelForward(in_dtype(target, dtype))
    forward.check_taps("features", taps)
    taps = [tap for tap in taps if tap != -1]  # those are kept anyway
    meta = {"taps": list(taps), "target": _target(target), "dtype": str(dtype or target.dtype).removeprefix("torch.")}
    if kept is None:
        work = path.with_suffix(f".{os.getpid()}")
        work.write_text(json.dumps(meta))
        os.replace(work, path)
    else:
        if set(taps) <= set(kept["taps"]):
            taps = meta["taps"] = kept["taps"]
        for name in meta:
            if kept.get(name) != meta[name]:
                raise ValueError(
                    f"{folder}: holds other features: {name} is {kept.get(name)}, not {meta[name]}; name another folder"
                )
    from tqdm.auto import tqdm

    with tqdm(total=sum(len(t.tokens) for t in texts), unit="tok", desc="hidden states") as bar:
        for begin in range(0, len(texts), _TEXTS):
            part = texts[begin : begin + _TEXTS]
            file, digest = folder / f"{begin // _TEXTS:05d}.safetensors", _digest(part)
            if file.exists():
                kept_digest, count = _kept(file)
                if kept_digest == digest:
                    bar.update(sum(len(t.tokens) for t in part))
                    continue
                if _digest(part[:count]) != kept_digest:
                    raise ValueError(f"{file}: holds other features: of other texts; name another folder")
            _shard(forward, part, tuple(taps), file, digest, bar)
    return folder


def _kept(file: Path) -> tuple[str, int]:
    """Digest and number of a shard's texts."""
    from safetensors import safe_open

    with safe_open(str(file), "pt") as opened:
        return opened.metadata()["digest"], len(opened.get_tensor("lengths"))


def _digest(texts: Sequence[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.tokens, text.start]).encode())
    return digest.hexdigest()


def _target(target) -> str:
    total = sum(float(p.detach().double().abs().sum()) for p in target.parameters())
    return f"{type(target).__name__} {list(target.get_input_embeddings().weight.shape)} {total:.3f}"


@torch.inference_mode()
def _shard(forward: ModelForward, texts: Sequence[Text], taps: tuple[int, ...], file: Path, digest: str, bar) -> None:
    from safetensors.torch import save_file

    states: list[Tensor | None] = [None] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    while order:
        group, longest = [], len(texts[order[-1]].tokens)
        while order and (len(group) + 1) * longest <= max(_TOKENS, longest):
            group.append(order.pop())
        counts = [len(texts[i].tokens) for i in group]
        feed = torch.tensor([texts[i].tokens + [0] * (longest - n) for i, n in zip(group, counts, strict=True)])
        cache = forward.new_cache(len(group), longest)
        out = forward(feed.to(forward.device), counts, cache, last_only=True, taps=(*taps, -1))
        kept = out.taps.to(torch.float16)
        if not bool(torch.isfinite(kept).all()):
            bad = (~torch.isfinite(kept)).any(0).view(len(taps) + 1, -1).any(1).tolist()
            layers = [tap for tap, wrong in zip((*taps, -1), bad, strict=True) if wrong]
            raise ValueError(f"features: states of layers {layers} are not finite in float16; tap other layers")
        for i, part in zip(group, kept.cpu().split(counts), strict=True):
            states[i] = part
        bar.update(sum(counts))
    work = file.with_suffix(f".{os.getpid()}")
    tensors = {
        "tokens": torch.tensor([t for text in texts for t in text.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
        "starts": torch.tensor([text.start for text in texts], dtype=torch.int32),
        "states": torch.cat(states),
    }
    save_file(tensors, str(work), metadata={"digest": digest})
    os.replace(work, file)


class FeatureBatches(Dataset):
    """Batches of texts of like length; an item is a whole `FeatureBatch`.

    folder: of `compute` · taps: those that the batches have, in this order · hidden_size: H · tokens: most padded tokens of a batch · texts: which of the texts (their numbers); None: all · seed:
    of the order · whole: train the prompts too: the target has a distribution behind each of their tokens as well.
    """

    def __init__(
        self, folder: Path | str, taps: Sequence[int], *, hidden_size: int, tokens: int = 2048,
        texts: Sequence[int] | None = None, seed: int = 0, whole: bool = False,
    ):  # fmt: skip
        from safetensors import safe_open

        kept = json.loads((Path(folder) / "meta.json").read_text())["taps"]
        self.hidden_size, self.columns = hidden_size, [kept.index(tap) if tap != -1 else -1 for tap in taps]
        self.files, self.places = [], []
        for path in sorted(Path(folder).glob("*.safetensors")):
            file = safe_open(str(path), "pt")
            self.files.append(file)
            lengths, starts = file.get_tensor("lengths").tolist(), file.get_tensor("starts").tolist()
            begin = 0
            for n, start in zip(lengths, starts, strict=True):
                self.places.append((len(self.files) - 1, begin, n, 1 if whole else start))
                begin += n
        chosen = list(range(len(self.places)) if texts is None else texts)
        rng = random.Random(seed)
        rng.shuffle(chosen)
        chosen.sort(key=lambda i: self.places[i][2] // 16)  # stable: random among like lengths
        self.batches: list[list[int]] = []
        batch: list[int] = []
        longest = 0
        for i in chosen:
            longest = max(longest, self.places[i][2])
            if batch and (len(batch) + 1) * longest > tokens:
                self.batches.append(batch)
                batch, longest = [], self.places[i][2]
            batch.append(i)
        self.batches += [batch] if batch else []
        rng.shuffle(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> FeatureBatch:
        rows = [self.places[i] for i in self.batches[index]]
        tokens, states = [], []
        for file, begin, n, _ in rows:
            tokens.append(self.files[file].get_slice("tokens")[begin : begin + n].long())
            parts = self.files[file].get_slice("states")[begin : begin + n].split(self.hidden_size, -1)
            states.append(torch.cat([*(parts[c] for c in self.columns), parts[-1]], -1).float())
        padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        lengths, starts = (torch.tensor([row[k] for row in rows]) for k in (2, 3))
        size = self.hidden_size
        return FeatureBatch(
            torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), lengths, starts, padded[:, :, :-size],
            padded[:, :, -size:], self.batches[index],
        )  # fmt: skip
