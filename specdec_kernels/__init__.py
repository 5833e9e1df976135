"""Kernels for speculative decoding: one step's raw logits and drafts in, emitted tokens out, exactly the target's law."""

from ._version import __version__  # isort: skip

from . import eager as _eager
from . import lossy
from ._backends import BackendUnavailable, info
from .build_tree import DraftTree, build_tree
from .draft_vocab import target_to_draft_from_d2t
from .filter_probs import filter_probs
from .kv_append_slots import AppendOutput, kv_append_slots
from .kv_compact import kv_compact
from .kv_copy_pages import kv_copy_pages
from .kv_evict import kv_evict
from .kv_rollback import kv_rollback
from .markov_step import MarkovOutput, markov_step
from .nucleus import Nucleus, nucleus
from .paged_kv_cache import PagedKVCache
from .params import RaggedDrafts, SamplingTensors, ragged_from_padded
from .sample import SampleOutput, sample
from .schedule_lengths import schedule_lengths
from .state_select import state_select
from .status import CacheStatus, Status
from .trees import (
    Retrieve,
    StaticTree,
    parents_from_retrieve,
    retrieve_from_parents,
    static_tree,
    static_tree_tokens,
)
from .verify_chain import VerifyOutput, verify_chain
from .verify_tree import TreeOutput, verify_tree

__all__ = [
    "AppendOutput",
    "BackendUnavailable",
    "CacheStatus",
    "DraftTree",
    "MarkovOutput",
    "Nucleus",
    "PagedKVCache",
    "RaggedDrafts",
    "Retrieve",
    "SampleOutput",
    "SamplingTensors",
    "StaticTree",
    "Status",
    "TreeOutput",
    "VerifyOutput",
    "build_tree",
    "filter_probs",
    "info",
    "kv_append_slots",
    "kv_compact",
    "kv_copy_pages",
    "kv_evict",
    "kv_rollback",
    "lossy",
    "markov_step",
    "nucleus",
    "parents_from_retrieve",
    "ragged_from_padded",
    "retrieve_from_parents",
    "sample",
    "schedule_lengths",
    "state_select",
    "static_tree",
    "static_tree_tokens",
    "target_to_draft_from_d2t",
    "verify_chain",
    "verify_tree",
]
