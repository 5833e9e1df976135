// Per-thread working memory, grown on demand and kept: one row's worth, never [rows, vocab].
#pragma once

#include <cstdint>

namespace specdec {

constexpr int64_t kTile = 4096;  // tokens

struct Scratch {
  float* lane_max;      // [tiles, 16] maximum of each lane of a tile
  float* tile_max;      // [tiles]
  float* tile_sum;      // [tiles]
  float* tile_above;    // [tiles] the part of tile_sum that is above the bracket, if there is one
  float* values;        // [V + 16] candidates of the nucleus
  float* weights;       // [V + 16] their exp((z - row_max) / T)
  float* work_values;   // [V + 16]
  float* work_weights;  // [V + 16]
};

// The calling thread's scratch for rows of up to `vocab` tokens. Defined in library.cpp: allocation is not specific to
// an instruction set.
Scratch& thread_scratch(int64_t vocab);

// Room for `count` row decisions of one request, likewise.
struct RowDecision;
RowDecision* decision_scratch(int64_t count);

}  // namespace specdec
