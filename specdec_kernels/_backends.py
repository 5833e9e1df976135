"""Which implementation runs: loading the compiled library, choosing a backend, and saying why one is missing."""

import functools
import importlib.machinery
import importlib.metadata
import logging
import os
import pathlib

import torch

from . import _schemas

logger = logging.getLogger("specdec_kernels")

BUILD_HINT = "build it with a C++17 compiler: pip install --no-build-isolation -v . (SPECDEC_BUILD_CPU must not be 0)"
NAMES = ("auto", "native", "eager")


class BackendUnavailable(RuntimeError):
    """A backend asked for by name cannot run here; the message says why and how to get it."""


def _load_native() -> str | None:
    """Loads the compiled CPU kernels; returns None on success, else the reason they are missing."""
    if os.environ.get("SPECDEC_SKIP_NATIVE", "0") == "1":
        return "SPECDEC_SKIP_NATIVE=1"
    isa = os.environ.get("SPECDEC_CPU_ISA")
    if isa not in (None, "", "baseline", "avx2", "avx512"):
        return f"SPECDEC_CPU_ISA must be baseline, avx2 or avx512, got {isa!r}"
    # Beside this file only: an editable installation of another copy would offer that copy's library.
    here = [str(pathlib.Path(__file__).parent)]
    spec = importlib.machinery.PathFinder.find_spec(f"{__package__}._cpu", here)
    if spec is None or spec.origin is None:
        return "the extension was not built"
    try:
        torch.ops.load_library(spec.origin)
    except Exception as error:  # a library of another torch or machine must not break the import
        return f"{pathlib.Path(spec.origin).name} does not load: {error}"
    return None


NATIVE_MISSING = _load_native()


DEFAULT = os.environ.get("SPECDEC_BACKEND", "auto")
"""Read at import and judged at the first call that depends on it: a wrong value must not break the import."""


def unavailable_reason(backend: str, device_type: str) -> str | None:
    """None if `backend` can run tensors of that device, else why not."""
    if backend == "eager":
        return None
    if device_type != "cpu":
        return f"there are no native kernels for device {device_type!r}"
    return NATIVE_MISSING


@functools.cache
def _log_fallback(device_type: str, reason: str) -> None:
    logger.warning("specdec_kernels: no native kernels for %s (%s); using plain torch", device_type, reason)


def resolve(op: str, backend: str, device: torch.device) -> str:
    """The backend that runs `op`: "native" or "eager".

    Asked for by name (argument, then SPECDEC_BACKEND) and missing: BackendUnavailable. Chosen by "auto": the next best,
    logged once.
    """
    if backend == "auto":
        backend = DEFAULT
        if backend not in NAMES:
            raise ValueError(f"{op}: SPECDEC_BACKEND must be one of {NAMES}, got {backend!r}")
    if backend not in NAMES:
        raise ValueError(f"{op}: backend must be one of {NAMES}, got {backend!r}")
    if backend == "eager":
        return backend
    reason = unavailable_reason("native", device.type)
    if reason is None:
        return "native"
    if backend == "native":
        raise BackendUnavailable(f"{op}: backend 'native' is not available: {reason}; {BUILD_HINT}")
    if not torch.compiler.is_compiling():
        _log_fallback(device.type, reason)
    return "eager"


def op(name: str, backend: str):
    """The torch op that implements `name` on a resolved backend."""
    return getattr(getattr(torch.ops, _schemas.NAMESPACE), name if backend == "native" else f"{name}_eager").default


def register_eager(name: str, function) -> None:
    """Makes `function` the plain-torch implementation of op `name`, on every device."""
    _schemas.library.impl(f"{name}_eager", function, "CompositeExplicitAutograd")


def info() -> dict:
    """What is installed and what runs, as a plain dict (`python -m specdec_kernels info` prints it)."""
    from . import __version__

    def version(module: str) -> str | None:
        try:
            return importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            return None

    native = {"available": NATIVE_MISSING is None, "reason": NATIVE_MISSING}
    if NATIVE_MISSING is None:
        native["isa"] = cpu_isa()
        native["threads"] = torch.get_num_threads()
    return {
        "specdec_kernels": __version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "cuda": torch.version.cuda,
        "default_backend": DEFAULT,
        "backends": {"native (CPU)": native, "eager (plain torch)": {"available": True, "reason": None}},
        "ops": {op: ["native", "eager"] if NATIVE_MISSING is None else ["eager"] for op in _schemas.SCHEMAS},
    }


def cpu_isa() -> str:
    """Instruction set the native CPU kernels use here: "avx512", "avx2" or "baseline"."""
    return ("baseline", "avx2", "avx512")[int(getattr(torch.ops, _schemas.NAMESPACE).cpu_isa())]
