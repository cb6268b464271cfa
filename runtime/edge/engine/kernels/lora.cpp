// Low-rank updates of single rows: out[row] += up^T (down x[row]), each row with the adapter it names.
//
// A row's sums have a fixed order, so that its result does not depend on the other rows or on the threads.

#include <cstdint>

#include "pool.h"

namespace {

constexpr int kLanes = 16;
constexpr int kMaxRank = 64;

float dot(const float* a, const float* b, int n) {
  float sums[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  float sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (float lane : sums) sum += lane;
  return sum;
}

}  // namespace

// x (num_rows, num_in); rows and adapters (num_rows,): where the row is in out, and which adapter it uses.
// down[a] (ranks[a], num_in), up[a] (ranks[a], num_out); a rank of 0 adds nothing. out (T, out_stride), from `column` on.
extern "C" void edge_lora(const float* x, const int32_t* rows, const int32_t* adapters, int32_t num_rows,
                          int32_t num_in, const float* const* down, const float* const* up, const int32_t* ranks,
                          float* out, int64_t out_stride, int32_t column, int32_t num_out, int32_t num_threads) {
  edge::parallel(num_threads, num_rows, [&](int64_t i) {
    const int32_t rank = ranks[adapters[i]];
    float inner[kMaxRank];
    for (int32_t r = 0; r < rank; ++r)
      inner[r] = dot(x + i * num_in, down[adapters[i]] + int64_t(r) * num_in, num_in);
    float* target = out + rows[i] * out_stride + column;
    for (int32_t r = 0; r < rank; ++r) {
      const float* column_of_up = up[adapters[i]] + int64_t(r) * num_out;
      for (int32_t j = 0; j < num_out; ++j) target[j] += inner[r] * column_of_up[j];
    }
  });
}
