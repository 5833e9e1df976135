"""Fixtures of the op tests."""

import os

import pytest
import torch

# Triton decides at its decorators whether it interprets: the kernels then run on CPU tensors, in any test process.
os.environ.setdefault("TRITON_INTERPRET", "1")

import specdec_kernels as sk
from specdec_kernels import _backends
from tests import interpreter

BACKENDS = ("native", "triton", "eager")
"""Every backend that the op tests run on; one that cannot run here is skipped with its reason."""


COMPILED = tuple(b for b in BACKENDS if b != "eager")


def available(name: str) -> str:
    reason = _backends.unavailable_reason(name, "cpu")
    if reason is not None:
        pytest.skip(f"backend {name}: {reason}")
    if name == "triton":
        interpreter.prepare()
    return name


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return available(request.param)


@pytest.fixture(params=COMPILED)
def compiled(request) -> str:
    """Backends with kernels of their own, for what plain torch does not promise or is too slow for."""
    return available(request.param)


@pytest.fixture
def native() -> str:
    return available("native")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a buffer with what no op may leave there: NaN, or 12345."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 12345)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """torch.empty and its kin return poison, so that an output element nobody wrote cannot be right by luck."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, real=real, **kwargs: poison(real(*args, **kwargs)))


@pytest.fixture
def one_thread():
    """For tests of values, most of whose time is the oracle's: threads that wait for each other on a busy machine cost
    more than they bring. That the count changes no bit is shown by `test_rank_divergence`, which sets its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LONGEST = ("test_triton_aot.py", "test_decoder_smollm2.py", "test_bench.py", "test_kv_property.py")


def pytest_collection_modifyitems(items):
    """Files that take minutes come first, so that no process is left with one of them when the others are done (make test keeps
    the order, --no-loadscope-reorder)."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_report_header(config):
    native = sk.info()["backends"]["native (CPU)"]
    return f"specdec_kernels {sk.__version__}: native {native}"
