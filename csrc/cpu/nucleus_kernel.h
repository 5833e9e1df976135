// nucleus: one row to three numbers. Reads the row from memory once; what it collects of it comes from the cache.
#pragma once

#include "cpu/dist.h"
#include "cpu/row.h"

namespace specdec::SPECDEC_ISA {

inline Filter filter_of(const ParamsView& params, int64_t request) {
  const int64_t s = params.slot(request);
  return make_filter(params.temperature[s], params.top_p[s], params.top_k[s], params.min_p[s]);
}

inline int64_t request_of(const RowOpArgs& a, int64_t row) { return a.rows ? a.rows[row] : row; }

inline Nucleus row_nucleus(const RowsView& view, int64_t row, const Filter& filter, int32_t order, int32_t& status) {
  Scratch& scratch = thread_scratch(view.width);
  return with_row(view, row, [&](const auto* z) { return row_nucleus(z, view.width, filter, order, scratch, status); });
}

inline void write(const NucleusView& out, int64_t i, const Nucleus& n) {
  out.cutoff[i] = n.cutoff;
  out.row_max[i] = n.row_max;
  out.log_mass[i] = n.log_mass;
}

inline void nucleus(const RowOpArgs& a, int64_t row) {
  int32_t status = 0;
  write(a.nucleus, row, row_nucleus(a.logits, row, filter_of(a.params, request_of(a, row)), a.filter_order, status));
  a.status[row] = status;
}

}  // namespace specdec::SPECDEC_ISA
