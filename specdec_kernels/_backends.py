"""Which implementation runs: loading the compiled library, choosing a backend, and saying why one is missing."""

import functools
import importlib
import importlib.machinery
import importlib.metadata
import logging
import os
import pathlib

import torch

from . import _schemas

logger = logging.getLogger("specdec_kernels")

BUILD_HINT = "build it with a C++17 compiler: pip install --no-build-isolation -v . (SPECDEC_BUILD_CPU must not be 0)"
NAMES = ("auto", *_schemas.SUFFIXES)


class BackendUnavailable(RuntimeError):
    """A backend asked for by name cannot run here; the message says why and how to get it."""


def _load_native() -> str | None:
    """Loads the compiled CPU kernels; returns None on success, else the reason they are missing."""
    if os.environ.get("SPECDEC_SKIP_NATIVE", "0") not in ("", "0"):
        return f"SPECDEC_SKIP_NATIVE={os.environ['SPECDEC_SKIP_NATIVE']}"
    isa = os.environ.get("SPECDEC_CPU_ISA")
    if isa not in (None, "", "baseline", "avx2", "avx512"):
        return f"SPECDEC_CPU_ISA must be baseline, avx2 or avx512, got {isa!r}"
    # Beside this file only: an editable installation of another copy would offer that copy's library.
    here = [str(pathlib.Path(__file__).parent)]
    spec = importlib.machinery.PathFinder.find_spec(f"{__package__}._cpu", here)
    if spec is None or spec.origin is None:
        return f"the extension was not built; {BUILD_HINT}"
    try:
        torch.ops.load_library(spec.origin)
    except Exception as error:  # a library of another torch or machine must not break the import
        return f"{pathlib.Path(spec.origin).name} does not load: {error}"
    return None


NATIVE_MISSING = _load_native()


@functools.cache
def _find_triton(device_type: str) -> str | None:
    """None if the Triton kernels can run on that device, else the reason. Not before they are wanted: it takes a second."""
    if device_type not in ("cuda", "cpu"):
        return f"there are no Triton kernels for device {device_type!r}"
    try:
        interpreted = importlib.import_module(".triton", __package__).INTERPRETED
    except ModuleNotFoundError as error:
        return f"{error}: pip install {error.name}"
    except Exception as error:
        return f"triton does not import: {error}"
    if device_type == "cpu" and not interpreted:
        return (
            "no CUDA tensors: on CPU tensors the kernels run in Triton's interpreter only, which TRITON_INTERPRET=1 in the "
            "environment turns on before anything imports triton"
        )
    return None


@torch.compiler.assume_constant_result  # torch.compile need not look into an import
def _triton_missing(device_type: str) -> str | None:
    return _find_triton(device_type)


DEFAULT = os.environ.get("SPECDEC_BACKEND") or "auto"
"""Read at import and judged at the first call that depends on it: a wrong value must not break the import."""


def unavailable_reason(backend: str, device_type: str) -> str | None:
    """None if `backend` can run tensors of that device, else why not."""
    if backend == "eager":
        return None
    if backend == "triton":
        return _triton_missing(device_type)
    if device_type != "cpu":
        return f"there are no native kernels for device {device_type!r}"
    return NATIVE_MISSING


def preferred(device_type: str) -> str:
    """The backend that "auto" tries first."""
    return "triton" if device_type == "cuda" else "native"


@functools.cache
def _log_fallback(backend: str, device_type: str, reason: str) -> None:
    logger.warning("specdec_kernels: no %s kernels for %s (%s); using plain torch", backend, device_type, reason)


def resolve(op: str, backend: str, device: torch.device) -> str:
    """The backend that runs `op`: "native", "triton" or "eager".

    Asked for by name (argument, then SPECDEC_BACKEND) and missing: BackendUnavailable. Chosen by "auto": Triton for CUDA
    tensors, native for the others; where that is missing plain torch, logged once.
    """
    if backend == "auto":
        backend = DEFAULT
        if backend not in NAMES:
            raise ValueError(f"{op}: SPECDEC_BACKEND must be one of {NAMES}, got {backend!r}")
    if backend not in NAMES:
        raise ValueError(f"{op}: backend must be one of {NAMES}, got {backend!r}")
    wanted = preferred(device.type) if backend == "auto" else backend
    reason = unavailable_reason(wanted, device.type)
    if reason is None:
        return wanted
    if backend != "auto":
        raise BackendUnavailable(f"{op}: backend {backend!r} is not available: {reason}")
    if not torch.compiler.is_compiling():
        _log_fallback(wanted, device.type, reason)
    return "eager"


def op(name: str, backend: str):
    """The torch op that implements `name` on a resolved backend."""
    return getattr(getattr(torch.ops, _schemas.NAMESPACE), name + _schemas.SUFFIXES[backend]).default


def _register_triton(name: str) -> None:
    @functools.cache
    def kernels():
        return getattr(importlib.import_module(f".triton.{name}", __package__), name)

    def run(*args):
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        device = first.device
        if device.type != "cuda":
            kernels()(*args)
            return
        with torch.cuda.device(device):  # Triton launches on the current one
            kernels()(*args)

    _schemas.library.impl(f"{name}_triton", run, "CompositeExplicitAutograd")


for _name in _schemas.SCHEMAS:
    _register_triton(_name)


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
    triton_reason = unavailable_reason("triton", "cuda" if torch.cuda.is_available() else "cpu")
    missing = {"native": NATIVE_MISSING, "triton": triton_reason, "eager": None}
    running = [name for name, reason in missing.items() if reason is None]
    return {
        "specdec_kernels": __version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "cuda": torch.version.cuda,
        "default_backend": DEFAULT if DEFAULT in NAMES else f"{DEFAULT}: SPECDEC_BACKEND must be one of {NAMES}",
        "backends": {
            "native (CPU)": native,
            "triton": {"available": triton_reason is None, "reason": triton_reason},
            "eager (plain torch)": {"available": True, "reason": None},
        },
        "ops": {op: list(running) for op in _schemas.SCHEMAS},
    }


def cpu_isa() -> str:
    """Instruction set the native CPU kernels use here: "avx512", "avx2" or "baseline"."""
    return ("baseline", "avx2", "avx512")[int(getattr(torch.ops, _schemas.NAMESPACE).cpu_isa())]
