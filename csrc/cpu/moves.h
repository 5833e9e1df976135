// What kv_compact and state_select share: lists of tensors of one layout, moved as bytes.
#pragma once

#include <vector>

#include "cpu/tensors.h"

namespace specdec {

using Tensors = std::vector<Tensor>;

inline std::vector<char*> addresses(const char* op, const char* name, const Tensors& tensors) {
  std::vector<char*> out;
  for (const Tensor& t : tensors) {
    bool alike = t.dim() == tensors[0].dim() && t.element_size() == tensors[0].element_size();
    for (int64_t d = 0; alike && d < t.dim(); ++d)
      alike = t.size(d) == tensors[0].size(d) && t.stride(d) == tensors[0].stride(d);
    require(alike, op, name, "of one element size, shape and strides");
    out.push_back(static_cast<char*>(const_cast<void*>(t.const_data_ptr())));
  }
  return out;
}

// Bytes of dimensions `first` and up, which lie contiguously.
inline int64_t dense_bytes(const char* op, const char* name, const Tensor& t, int64_t first) {
  int64_t expected = 1;
  for (int64_t d = t.dim() - 1; d >= first; --d) {
    require(t.size(d) == 1 || t.stride(d) == expected, op, name, "contiguous in its last dimensions");
    expected *= t.size(d);
  }
  return expected * static_cast<int64_t>(t.element_size());
}

}  // namespace specdec
