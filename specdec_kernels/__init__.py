"""Kernels for speculative decoding: one step's raw logits and drafts in, emitted tokens out, exactly the target's law."""

from ._version import __version__  # isort: skip

from . import eager as _eager
from ._backends import BackendUnavailable, info
from .filter_probs import filter_probs
from .nucleus import Nucleus, nucleus
from .params import RaggedDrafts, SamplingTensors, ragged_from_padded
from .sample import SampleOutput, sample
from .status import Status
from .verify_chain import VerifyOutput, verify_chain

__all__ = [
    "BackendUnavailable",
    "Nucleus",
    "RaggedDrafts",
    "SampleOutput",
    "SamplingTensors",
    "Status",
    "VerifyOutput",
    "filter_probs",
    "info",
    "nucleus",
    "ragged_from_padded",
    "sample",
    "verify_chain",
]
