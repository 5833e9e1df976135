"""Every op's schema, defined once, before any backend is looked for.

Each op writes into caller-allocated outputs and returns nothing, so one schema serves calls with and without `out=`. It
exists once per backend family: `<op>` (compiled: CPU now, CUDA where built), `<op>_triton` and `<op>_eager` (plain torch).
The public functions allocate, check and choose; nothing else calls these ops.
"""

import torch

NAMESPACE = "specdec_kernels"

_PARAMS = "Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p"
_DRAFT = (
    "Tensor? draft, bool draft_is_probs, Tensor? draft_rows, "
    "Tensor? draft_cutoff, Tensor? draft_row_max, Tensor? draft_log_mass, "
    "Tensor? draft_temperature, Tensor? draft_top_p, Tensor? draft_top_k, Tensor? draft_min_p, Tensor? draft_slots, "
    "Tensor? target_to_draft"
)

SCHEMAS = {
    "nucleus": (
        f"(Tensor logits, {_PARAMS}, Tensor? slots, Tensor? rows, int filter_order, "
        "Tensor(a!) cutoff, Tensor(b!) row_max, Tensor(c!) log_mass, Tensor(d!) status) -> ()"
    ),
    "sample": (
        f"(Tensor logits, {_PARAMS}, Tensor seed, Tensor? slots, Tensor? position, Tensor? rows, Tensor? ids, "
        "Tensor? target_to_draft, int stream, int filter_order, "
        "Tensor(a!) tokens, Tensor(b!) status, Tensor(c!)? logprobs, "
        "Tensor(d!)? cutoff, Tensor(e!)? row_max, Tensor(f!)? log_mass) -> ()"
    ),
    "markov_step": (
        # previous: the public function's `tokens`. logits may be base_logits itself.
        f"(Tensor base_logits, Tensor previous, Tensor w1, Tensor w2, {_PARAMS}, Tensor seed, Tensor? slots, "
        "Tensor? position, Tensor? rows, Tensor? ids, Tensor? target_to_draft, int stream, int filter_order, "
        "Tensor(a!) logits, Tensor(b!) tokens, Tensor(c!) status, "
        "Tensor(d!)? cutoff, Tensor(e!)? row_max, Tensor(f!)? log_mass) -> ()"
    ),
    "verify_chain": (
        "(Tensor target, bool target_is_probs, Tensor draft_tokens, Tensor cu_num_draft, "
        f"{_PARAMS}, Tensor seed, Tensor? slots, Tensor? position, "
        f"{_DRAFT}, int rule, bool emit_bonus, int filter_order, "
        "Tensor(a!) tokens, Tensor(b!) num_accepted, Tensor(c!) num_emitted, Tensor(d!) status, Tensor(e!)? logprobs, "
        "Tensor(f!)? cutoff, Tensor(g!)? row_max, Tensor(h!)? log_mass) -> ()"
    ),
    "verify_tree": (
        "(Tensor target, bool target_is_probs, Tensor draft_tokens, Tensor parents, Tensor cu_num_draft, "
        f"{_PARAMS}, Tensor seed, Tensor? slots, Tensor? position, "
        f"{_DRAFT}, int rule, bool replacement, float bound, float factor, Tensor? rates, int filter_order, "
        "Tensor(a!) tokens, Tensor(b!) num_accepted, Tensor(c!) path, Tensor(d!) num_emitted, Tensor(e!) status, "
        "Tensor(f!)? logprobs, Tensor(g!)? cutoff, Tensor(h!)? row_max, Tensor(i!)? log_mass) -> ()"
    ),
    "schedule_lengths": (
        "(Tensor confidence, Tensor? num_draft, Tensor? steps_per_second, int budget, Tensor(a!) lengths) -> ()"
    ),
    "build_tree": (
        "(Tensor log_probs, Tensor tokens, Tensor parents, Tensor(a!) node_tokens, Tensor(b!) node_parents, "
        "Tensor(c!) depth, Tensor(d!) index, Tensor(e!) mask, Tensor(f!) packed_mask) -> ()"
    ),
    "kv_rollback": (
        "(Tensor(a!) seq_lens, Tensor num_rejected, Tensor(b!) block_table, Tensor(c!) free_pages, Tensor(d!) num_free, "
        # window: 0 is none.
        "Tensor(e!)? ref_counts, Tensor? slots, int page_size, int null_page, int window, int sinks, "
        "Tensor(f!) status) -> ()"
    ),
    "kv_evict": (
        "(Tensor seq_lens, int keep_last, Tensor(a!) block_table, Tensor(b!) free_pages, Tensor(c!) num_free, "
        "Tensor(d!)? ref_counts, Tensor? slots, int page_size, int null_page, int sinks, Tensor(e!) status) -> ()"
    ),
    "kv_append_slots": (
        "(Tensor(a!) seq_lens, Tensor num_new, Tensor(b!) block_table, Tensor free_pages, Tensor(c!) num_free, "
        "Tensor(d!)? ref_counts, Tensor? slots, int page_size, int null_page, "
        # token_slots: `slots` of the AppendOutput.
        "Tensor(e!) token_slots, Tensor(f!) copy_src, Tensor(g!) copy_dst, Tensor(h!) status) -> ()"
    ),
    "kv_scrub": (
        # Without seq_lens, num_rejected and block_table the pages that went back to the free list alone.
        "(Tensor(a!)[] caches, Tensor free_pages, Tensor before, Tensor num_free, Tensor? seq_lens, Tensor? num_rejected, "
        "Tensor? block_table, Tensor? ref_counts, Tensor? slots, int null_page) -> ()"
    ),
    "kv_copy_pages": "(Tensor(a!)[] caches, Tensor src, Tensor dst) -> ()",
    "kv_compact": (
        "(Tensor(a!)[] caches, Tensor path, Tensor seq_lens, Tensor? block_table, Tensor? slots, int null_page) -> ()"
    ),
    "state_select": (
        # Without `out` the states are moved in place.
        "(Tensor(a!)[] states, Tensor(b!)[] out, Tensor num_accepted, Tensor? indices) -> ()"
    ),
    "filter_probs": (
        f"(Tensor logits, {_PARAMS}, Tensor? slots, Tensor? rows, int filter_order, "
        "Tensor(a!) probs, Tensor(b!) status) -> ()"
    ),
}

FILTER_ORDERS = ("hf", "vllm", "joint")
RULES = ("token", "block", "coupled")
TREE_RULES = ("target_only", "recursive", "traversal", "greedy_draft")
LOSSY_RULES = ("typical", "threshold", "synthetic")
"""In the op these follow TREE_RULES: 4, 5 and 6. They take `bound` and `factor` (typical: epsilon, delta; threshold:
threshold_single, threshold_acc), or `rates` (synthetic)."""

SUFFIXES = {"native": "", "triton": "_triton", "eager": "_eager"}

library = torch.library.Library(NAMESPACE, "DEF")


def _no_outputs(*args, **kwargs) -> None:
    """Fake of every op: outputs are arguments, shapes are checked by the public function."""


for _op, _schema in SCHEMAS.items():
    for _suffix in SUFFIXES.values():
        library.define(f"{_op}{_suffix}{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{_op}{_suffix}", _no_outputs, lib=library)
