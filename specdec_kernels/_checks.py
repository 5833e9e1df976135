"""Argument checks shared by the public functions: one sentence naming the argument, what it must be and what it got."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)


def describe(value) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def fail(op: str, name: str, must: str, got) -> NoReturn:
    raise ValueError(f"{op}: {name} must be {must}, got {got if isinstance(got, str) else describe(got)}")


def rows2d(op: str, name: str, value, dtypes=LOGITS_DTYPES) -> None:
    """A [N, V] tensor with a contiguous last dimension and V >= 1."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype not in dtypes:
        fail(op, name, f"a [rows, vocab] tensor of {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}", value)
    if value.shape[1] < 1 or value.shape[1] >= 2**31:
        fail(op, name, "a tensor whose vocabulary is 1 to 2^31 - 1", value)
    if value.stride(1) != 1 and value.shape[1] != 1:
        fail(op, name, "contiguous in its last dimension", f"strides {list(value.stride())}")


def vector(
    op: str, name: str, value, dtypes, size: int, what: str, device: torch.device, at_least: bool = False
) -> None:
    """A contiguous 1-D tensor of one of `dtypes` on `device`, of `size` elements (or at least that many)."""
    if (
        isinstance(value, Tensor)
        and value.dim() == 1
        and value.dtype in dtypes
        and value.device == device
        and ((n := value.shape[0]) >= size if at_least else (n := value.shape[0]) == size)
        and (n <= 1 or value.stride(0) == 1)
    ):
        return
    if isinstance(value, Tensor) and value.dim() == 1 and value.shape[0] > 1 and value.stride(0) != 1:
        fail(op, name, "contiguous", f"stride {value.stride(0)}")
    kind = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    length = f"{what}{'>=' if at_least else '='}{size}" if size or not at_least else what
    fail(op, name, f"{kind} [{length}], contiguous, on {device}", value)


def params(op: str, name: str, value, batch: int, device: torch.device, rows: int) -> None:
    """SamplingTensors of `batch` requests, or of any number of states with `slots` [batch]; not empty if `rows` are to be
    given parameters."""
    if value is None or not hasattr(value, "temperature") or not hasattr(value, "slots"):
        fail(op, name, "a SamplingTensors", value)
    size = batch
    if value.slots is not None:
        vector(op, f"{name}.slots", value.slots, INDEX_DTYPES, batch, "B", device)
        size = value.temperature.shape[0]
    if value.slots is None and isinstance(value.temperature, Tensor) and value.temperature.shape != (size,):
        must = f"float32 [B={size}] (SamplingTensors.create(..., batch_size={size}) spreads scalars)"
        fail(op, f"{name}.temperature", must, value.temperature)
    vector(op, f"{name}.temperature", value.temperature, (torch.float32,), size, "B", device)
    vector(op, f"{name}.top_p", value.top_p, (torch.float32,), size, "B", device)
    vector(op, f"{name}.top_k", value.top_k, (torch.int32,), size, "B", device)
    vector(op, f"{name}.min_p", value.min_p, (torch.float32,), size, "B", device)
    vector(op, f"{name}.seed", value.seed, (torch.int64,), size, "B", device)
    if rows > 0 and (batch == 0 or size == 0):
        fail(op, name, "of at least one request where there are rows", f"{batch} requests, {size} states")


def choice(op: str, name: str, value: str, choices: tuple[str, ...]) -> int:
    """Index of `value` among `choices`."""
    for i, candidate in enumerate(choices):
        if candidate == value:
            return i
    fail(op, name, f"one of {choices}", repr(value))


def row_op(op: str, logits, params_, rows, filter_order: str, orders: tuple[str, ...], name: str = "logits") -> int:
    """What every op over rows of logits takes alike; returns the index of `filter_order`."""
    rows2d(op, name, logits)
    N, device = logits.shape[0], logits.device
    if rows is not None:
        vector(op, "rows", rows, INDEX_DTYPES, N, "N", device)
    params(op, "params", params_, N if rows is None else getattr(params_, "num_requests", 0), device, N)
    return choice(op, "filter_order", filter_order, orders)


def output(op: str, name: str, value, dtype: torch.dtype, shape: tuple, device: torch.device) -> None:
    """A caller-supplied output buffer: exact dtype, shape and device, contiguous."""
    if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != shape or value.device != device:
        fail(op, name, f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}", value)
    if not value.is_contiguous():
        fail(op, name, "contiguous", f"strides {list(value.stride())}")


def tensors(op: str, name: str, value, device: torch.device) -> None:
    """A list or tuple of tensors on `device` whose elements have 1, 2 or 4 bytes, to be moved as bits."""
    if not isinstance(value, (list, tuple)):
        fail(op, name, "a list or tuple of tensors", value)
    for i, t in enumerate(value):
        if not isinstance(t, Tensor) or t.device != device or t.element_size() not in (1, 2, 4):
            fail(op, f"{name}[{i}]", f"a tensor on {device} with elements of 1, 2 or 4 bytes", t)


def cache(op: str, name: str, value: Tensor, also: str = "") -> None:
    """A cache whose pages (or rows) are its first dimension and tokens its second, no two elements at one place."""
    if value.dim() not in (3, 4):
        fail(op, name, f"[pages, page_size, H, D] or [pages, page_size, D]{also}", value)
    if not dense(value, value.dim() - 1):
        fail(op, name, "contiguous in its last dimension", f"strides {list(value.stride())}")
    if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
        fail(op, name, "of elements that do not share memory", f"strides {list(value.stride())}")


def dense(t: Tensor, first: int) -> bool:
    """Whether dimensions `first` and up lie contiguously."""
    expected = 1
    for dim in range(t.dim() - 1, first - 1, -1):
        if t.shape[dim] != 1 and t.stride(dim) != expected:
            return False
        expected *= t.shape[dim]
    return True


def alike(*lists: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the lists by layout: of one group, the i-th tensors agree in element size, shape and strides, list by list."""
    groups: list[tuple[list, list[int]]] = []
    for i, row in enumerate(zip(*lists, strict=True)):
        layout = [x for t in row for x in (t.element_size(), t.shape, t.stride())]
        for known, members in groups:
            if known == layout:
                members.append(i)
                break
        else:
            groups.append((layout, [i]))
    return [members for _, members in groups]
