"""Plain-torch implementations: slow, float64 inside, correct on any device that torch has; no host sync."""

from . import (
    build_tree,
    filter_probs,
    kv_append_slots,
    kv_compact,
    kv_copy_pages,
    kv_evict,
    kv_rollback,
    kv_scrub,
    markov_step,
    nucleus,
    sample,
    schedule_lengths,
    state_select,
    verify_chain,
    verify_tree,
)
