"""Oracle for speculative-decoding kernels: plain PyTorch, float64, written to be read.

Every function follows the definitions of the project's README ("Semantics"), one row or one request at a time, with no
attempt at speed. Use it to test any kernel that filters, verifies or samples: it returns, beside each answer, the
*margin* of the decisions behind it, so that a float32 kernel's disagreement can be judged (see `margin` in each result).
It imports torch and nothing else. In an installed package it is called `specdec_kernels_ref`.
"""

from . import lossy
from .build_tree import DraftTree, build_tree
from .filter_probs import filter_probs
from .kv_append_slots import AppendOutput, kv_append_slots
from .kv_compact import kv_compact
from .kv_copy_pages import kv_copy_pages
from .kv_evict import kv_evict
from .kv_rollback import kv_rollback
from .kv_scrub import kv_scrub
from .markov_step import MarkovResult, markov_logits, markov_step
from .nucleus import Nucleus, NucleusResult, nucleus, row_nucleus, row_probs
from .params import SamplingParams
from .rng import coin, philox4x32, race_noise, uniform
from .rows import accept_probability, residual
from .sample import SampleResult, race, sample
from .schedule_lengths import schedule_lengths
from .state_select import state_select
from .verify_chain import ChainLaw, VerifyResult, chain_law, chain_weights, verify_chain
from .verify_tree import TreeResult, verify_tree

__all__ = [
    "AppendOutput",
    "ChainLaw",
    "DraftTree",
    "MarkovResult",
    "Nucleus",
    "NucleusResult",
    "SampleResult",
    "SamplingParams",
    "TreeResult",
    "VerifyResult",
    "accept_probability",
    "build_tree",
    "chain_law",
    "chain_weights",
    "coin",
    "filter_probs",
    "kv_append_slots",
    "kv_compact",
    "kv_copy_pages",
    "kv_evict",
    "kv_rollback",
    "kv_scrub",
    "lossy",
    "markov_logits",
    "markov_step",
    "nucleus",
    "philox4x32",
    "race",
    "race_noise",
    "residual",
    "row_nucleus",
    "row_probs",
    "sample",
    "schedule_lengths",
    "state_select",
    "uniform",
    "verify_chain",
    "verify_tree",
]
