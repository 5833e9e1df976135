// All kernels of one instruction set, and the table of them.
#pragma once

#include "cpu/filter_probs_kernel.h"
#include "cpu/markov_step_kernel.h"
#include "cpu/nucleus_kernel.h"
#include "cpu/sample_kernel.h"
#include "cpu/verify_chain_kernel.h"
#include "cpu/verify_tree_kernel.h"

#define SPECDEC_KERNELS                                                                                              \
  {SPECDEC_ISA::nucleus,        SPECDEC_ISA::filter_probs,   SPECDEC_ISA::sample,        SPECDEC_ISA::markov_logits, \
   SPECDEC_ISA::verify_request, SPECDEC_ISA::look_at_target, SPECDEC_ISA::look_at_draft, SPECDEC_ISA::decide_row,    \
   SPECDEC_ISA::verify_tree,    SPECDEC_ISA::verify_finish}
