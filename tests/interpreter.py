"""Triton's interpreter for a test suite: faster, with every address checked, and able to tell what a launch did."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator

import numpy as np
import torch


@dataclasses.dataclass
class Watch:
    """What launches did while it was active: their kernels, and how often each element of a watched tensor was read."""

    launches: list[str] = dataclasses.field(default_factory=list)
    counts: list[tuple[torch.Tensor, np.ndarray]] = dataclasses.field(default_factory=list)
    order: np.random.Generator | None = None

    def reads(self, i: int) -> np.ndarray:
        """[rows, V] of the i-th watched matrix (contiguous)."""
        tensor, counts = self.counts[i]
        return counts.reshape(tensor.shape)

    def record(self, addresses: np.ndarray) -> None:
        for tensor, counts in self.counts:
            start, size = tensor.data_ptr(), tensor.element_size()
            mine = addresses[(addresses >= start) & (addresses < start + tensor.numel() * size)]
            np.add.at(counts, (mine - start) // size, 1)


_watches: list[Watch] = []
_extents: list[tuple[int, int]] = []  # of the tensors that the running launch was given
_behind: list[tuple[int, int]] = []  # of those whose addresses are in the tables that it was given


@contextlib.contextmanager
def watching(*tensors: torch.Tensor, order: int | None = None) -> Iterator[Watch]:
    """Counts element reads of `tensors`. `order`: programs run in a random order of this seed instead of ascending."""
    watch = Watch(order=None if order is None else np.random.default_rng(order))
    watch.counts = [(t, np.zeros(t.numel(), dtype=np.int64)) for t in tensors]
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check(kind: str, pointers, mask) -> np.ndarray:
    """The addresses that an access touches; all of them belong to one tensor of the launch, or it is an error."""
    touched = pointers.data[mask.data.astype(bool)] if mask is not None else pointers.data.reshape(-1)
    if touched.size:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        low, high = int(touched.min()), int(touched.max()) + size
        if not any(start <= low and high <= end for start, end in _extents):
            raise IndexError(f"{kind} out of bounds: [{low:#x}, {high:#x}) is in none of the launch's tensors")
    return touched


@functools.cache
def prepare() -> None:
    """Patches the interpreter, once.

    Half of its time goes into patching `triton.language` at every call of a device function; once per module is enough, as
    a launch patches what its functions use before they run.
    """
    from triton.runtime import interpreter

    builder, seen = interpreter.interpreter_builder, set()

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in seen:
            seen.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    numpy_dtype, known = interpreter._get_np_dtype, {}

    def get_numpy_dtype(ty):
        name = "pointer" if ty.scalar.is_ptr() else ty.scalar.name
        if name not in known:
            known[name] = numpy_dtype(ty)
        return known[name]

    interpreter._get_np_dtype = get_numpy_dtype
    # It computes each integer addition in 64 bits as well, to find overflows, which the noise means to have.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    from specdec_kernels.triton import _pages, _pointers, state_select

    pointers = _pointers.pointers

    def noted_pointers(op, tensors):
        _behind.extend(map(_extent, tensors))
        return pointers(op, tensors)

    for module in (_pages, state_select):
        module.pointers = noted_pointers

    launch = interpreter.GridExecutor.__call__

    def checked_launch(self, *args, **kwargs):
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        _extents[:] = [*map(_extent, given), *_behind]
        grid = self.grid[0]
        place = np.arange(grid)
        for watch in _watches:
            watch.launches.append(self.fn.__name__)
            if watch.order is not None:
                place = watch.order.permutation(grid)
        set_index = type(builder).set_grid_idx
        builder.set_grid_idx = lambda x, y, z: set_index(builder, int(place[x]), y, z)
        try:
            return launch(self, *args, **kwargs)
        finally:
            del builder.set_grid_idx
            _extents.clear()
            _behind.clear()

    interpreter.GridExecutor.__call__ = checked_launch

    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def checked_load(pointers, mask, *rest):
        touched = _check("load", pointers, mask)
        for watch in _watches:
            watch.record(touched)
        return load(pointers, mask, *rest)

    def checked_store(pointers, value, mask, *rest):
        _check("store", pointers, mask)
        return store(pointers, value, mask, *rest)

    def checked_atomic(op, pointers, value, mask, *rest):
        _check("atomic", pointers, mask)
        return atomic(op, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw = checked_atomic
    # Infinities meet in the kernels on purpose; the interpreter computes with numpy, which warns.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
