// build_tree: the best candidates by cumulative log q, numbered in the order in which they were drafted.
#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/tensors.h"

namespace specdec {
namespace {

constexpr float kAbsent = -std::numeric_limits<float>::infinity();

struct BuildTreeArgs {
  const float* log_probs;
  IndexView tokens, parents;  // [B, C]
  int64_t candidates, nodes, words;
  int32_t *node_tokens, *node_parents, *depth, *index, *packed_mask;
  bool* mask;
};

// Scores of the root and of each candidate, in their order: what one hangs from comes before it.
std::vector<float> scores(const BuildTreeArgs& a, int64_t first) {
  std::vector<float> score(a.candidates + 1);
  for (int64_t c = 0; c < a.candidates; ++c) {
    const int64_t up = a.parents[first + c], token = a.tokens[first + c];
    const float x = a.log_probs[first + c];
    const bool sound = up >= 0 && up <= c && token >= 0 && token <= std::numeric_limits<int32_t>::max() && x == x;
    score[c + 1] = sound ? score[up] + (x < 0.0f ? x : 0.0f) : kAbsent;
  }
  return score;
}

void build_request(const BuildTreeArgs& a, int64_t b) {
  const int64_t first = b * a.candidates, n = a.nodes, side = n + 1;
  const std::vector<float> score = scores(a, first);
  std::vector<int32_t> kept;
  for (int64_t c = 0; c < a.candidates; ++c)
    if (score[c + 1] > kAbsent) kept.push_back(static_cast<int32_t>(c));
  const int64_t count = std::min<int64_t>(n, kept.size());
  std::nth_element(kept.begin(), kept.begin() + count, kept.end(), [&](int32_t x, int32_t y) {
    return score[x + 1] != score[y + 1] ? score[x + 1] > score[y + 1] : x < y;
  });
  kept.resize(count);
  std::sort(kept.begin(), kept.end());

  std::vector<int32_t> number(a.candidates + 1);  // node of the root and of each candidate
  int32_t *node_tokens = a.node_tokens + b * n, *node_parents = a.node_parents + b * n, *index = a.index + b * n;
  int32_t *depth = a.depth + b * side, *words = a.packed_mask + b * side * a.words;
  bool* mask = a.mask + b * side * side;
  std::fill_n(mask, side * side, false);
  std::fill_n(words, side * a.words, 0);
  for (int64_t node = 0; node < side; ++node) {
    if (node == 0) {
      depth[0] = 0;
    } else if (node > count) {
      node_tokens[node - 1] = node_parents[node - 1] = index[node - 1] = depth[node] = -1;
    } else {
      const int32_t c = kept[node - 1], parent = number[a.parents[first + c]];
      number[c + 1] = static_cast<int32_t>(node);
      node_tokens[node - 1] = static_cast<int32_t>(a.tokens[first + c]);
      node_parents[node - 1] = parent;
      index[node - 1] = c;
      depth[node] = depth[parent] + 1;
      std::copy_n(mask + parent * side, side, mask + node * side);
      std::copy_n(words + parent * a.words, a.words, words + node * a.words);
    }
    mask[node * side + node] = true;
    words[node * a.words + node / 32] |= static_cast<int32_t>(1u << (node % 32));
  }
}

IndexView matrix_view(const char* op, const char* name, const Tensor& t, int64_t size) {
  const ScalarType type = t.scalar_type();
  require((type == ScalarType::Int || type == ScalarType::Long) && t.is_contiguous() && t.numel() == size, op, name,
          "int32 or int64 [B, C], contiguous");
  return {t.const_data_ptr(), type == ScalarType::Long, size};
}

void build_tree(Tensor log_probs, Tensor tokens, Tensor parents, Tensor node_tokens, Tensor node_parents, Tensor depth,
                Tensor index, Tensor mask, Tensor packed_mask) {
  constexpr const char* op = "build_tree";
  require(log_probs.dim() == 2, op, "log_probs", "[B, C]");
  require(node_tokens.dim() == 2 && node_tokens.size(0) == log_probs.size(0), op, "node_tokens", "[B, n]");
  const int64_t batch = log_probs.size(0), given = log_probs.numel();
  BuildTreeArgs a;
  a.candidates = log_probs.size(1);
  a.nodes = node_tokens.size(1);
  a.words = (a.nodes + 32) / 32;
  const int64_t drafts = batch * a.nodes, rows = batch * (a.nodes + 1);
  a.log_probs = vector_data<float>(op, "log_probs", log_probs, ScalarType::Float, given);
  a.tokens = matrix_view(op, "tokens", tokens, given);
  a.parents = matrix_view(op, "parents", parents, given);
  a.node_tokens = ints(op, "node_tokens", node_tokens, drafts);
  a.node_parents = ints(op, "node_parents", node_parents, drafts);
  a.depth = ints(op, "depth", depth, rows);
  a.index = ints(op, "index", index, drafts);
  a.mask = vector_data<bool>(op, "mask", mask, ScalarType::Bool, rows * (a.nodes + 1));
  a.packed_mask = ints(op, "packed_mask", packed_mask, rows * a.words);
  parallel_for_each(batch, given + rows * (a.nodes + 1), [&](int64_t b) { build_request(a, b); });
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) { m.impl("build_tree", TORCH_BOX(&specdec::build_tree)); }
