// Attention over the paged KV cache on the CPU: for all tokens of a step and one layer, norm and rotate queries and
// keys, store keys and values, attend. What it means is `paged_attention_reference` in engine/attention.py; the layout
// of pages is in engine/kv_cache.py. Knows nothing about models.
//
// Letters: B sequences, N new tokens of one, H query heads, K key-value heads, G = H / K, D head dimension.
//
// The result of a query does not depend by a single bit on what else is in the step, on how its sequence was cut into
// steps, or on the number of threads. For each row (a query token and head) the order of operations follows from its
// position alone: products run over D in order; keys come in blocks of 64 at fixed places, blocks in splits of 256,
// and splits are merged in order, whether one thread does them all or each is a task. Hidden keys add exact zeros.
//
// A page is turned into floats once for all rows of a task, into memory of at most the second-level cache. Then both
// products, of queries with keys and of weights with values, are the same small matrix product: 6 rows by 4 vectors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace {

using namespace edge;

constexpr int kPage = 16;
constexpr int kBlockPages = 4;
constexpr int kBlock = kBlockPages * kPage;
constexpr int kSplit = 256;
constexpr int kMaxD = 256;
constexpr int kMaxRows = 48;
constexpr int kGroup = 6;             // rows of the small product
constexpr int kStride = kMaxD + 16;   // of rows in scratch memory; rows at a power of two would share cache sets
constexpr int kScoreStride = kBlock + 16;
constexpr int kStoreTokens = 64;     // tokens whose keys and values one task stores
constexpr float kSmallestScale = 1e-37f;  // as in engine/kv_cache.py
constexpr float kLog2E = 1.44269504088896340736f;

enum Format { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

}  // namespace

extern "C" {

struct EdgeAttentionLayer {
  void* keys;
  void* values;
  uint16_t* key_scales;
  uint16_t* value_scales;
  uint16_t* value_minimums;
  uint16_t* side_keys;
  uint16_t* side_values;
  const float* q_norm;  // (D,) weights, or null
  const float* k_norm;
  float q_eps, k_eps;
  float scale;
  float softcap;  // 0: none
  int32_t format, num_heads, num_kv_heads, head_dim;
  int32_t num_pages, num_side_pages;
  int32_t window;  // 0: none
  int32_t rotate_keys, rotate_values, sink_pages, window_pages;
};

struct EdgeAttentionStep {
  const int32_t* starts;
  const int32_t* lengths;
  const int32_t* page_table;
  const int32_t* side_of_page;  // int4 only
  int32_t num_sequences, max_pages;
};

}  // extern "C"

namespace {

typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef int8_t I8x16 __attribute__((vector_size(16)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));

inline Ints lanes() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

#if defined(__AVX512F__)
inline Floats floats(I8x16 x) { return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x)); }
inline Floats floats_of_nibbles(U8x16 x, bool high) {
  __m512i wide = _mm512_cvtepu8_epi32((__m128i)x);
  return (Floats)_mm512_cvtepi32_ps(high ? _mm512_srli_epi32(wide, 4) : _mm512_and_si512(wide, _mm512_set1_epi32(15)));
}
inline Floats floats(U16x16 x) { return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16); }
#else
inline Floats floats(I8x16 x) { return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats); }
inline Floats floats_of_nibbles(U8x16 x, bool high) {
  Ints wide = __builtin_convertvector(x, Ints);
  return __builtin_convertvector(high ? wide >> 4 : wide & 15, Floats);
}
inline Floats floats(U16x16 x) { return (Floats)(__builtin_convertvector(x, Bits) << 16); }
#endif

inline float float_of(uint16_t bfloat16) {
  const uint32_t raw = uint32_t(bfloat16) << 16;
  float x;
  std::memcpy(&x, &raw, sizeof x);
  return x;
}
inline U16x16 bfloat16s(Floats x) {  // to nearest, ties to even; NaN stays NaN
  Bits raw = (Bits)x;
  Bits rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16;
  return __builtin_convertvector(x != x ? (raw >> 16) | 0x40 : rounded, U16x16);
}

// Sums and maxima of 16 lanes, always as the same tree.
template <class Combine>
inline float reduce(Floats x, Combine combine) {
  x = combine(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  x = combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return x[0];
}
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline float total(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a + b; });
}
inline float maximum(Floats x) { return reduce(x, larger); }

// 2^x for x <= 0, exact at 0; 0 below -126; NaN stays NaN.
inline Floats exp2_(Floats x) {
  Floats clamped = x < -126.0f ? splat(-126.0f) : x;
  Ints whole = round_to_ints(clamped);
  Floats f = clamped - to_floats(whole);  // -0.5 to 0.5
  Floats p = splat(1.5403530e-4f);        // ln(2)^n / n!
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  Floats power = (Floats)((whole + 127) << 23);
  return x < -126.0f ? Floats{} : p * power;
}
inline float exp2_(float x) { return exp2_(splat(x))[0]; }

// tanh(x) = sign(x) * (1 - e) / (1 + e), e = exp(-2 |x|)
inline Floats tanh_(Floats x) {
  Floats magnitude = x < 0.0f ? -x : x;
  Floats e = exp2_(magnitude * (-2.0f * kLog2E));
  Floats t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

struct Scratch {
  alignas(64) float q[kMaxRows * kStride];
  alignas(64) float acc[kMaxRows * kStride];
  alignas(64) float total[kMaxRows * kStride];
  alignas(64) float keys[kBlockPages * kMaxD * kPage];
  alignas(64) float values[kBlock * kMaxD];
  alignas(64) float scores[kMaxRows * kScoreStride];
  alignas(64) float head[kMaxD];
  float max[kMaxRows], sum[kMaxRows], total_max[kMaxRows], total_sum[kMaxRows];
  int position[kMaxRows];
};

struct Task {
  int sequence, kv_head;
  int first_row, num_rows;  // of the N * G rows of this sequence and head: token * G + head in group
  int split;                // of the keys; -1: all, and the results are final
  int partial;              // where the results of a split go
  long cost;
};

struct Call {
  const EdgeAttentionLayer& layer;
  const EdgeAttentionStep& step;
  const float* qkv;
  const float* cos;
  const float* sin;
  int half_rotary;
  float* out;

  int G() const { return layer.num_heads / layer.num_kv_heads; }
  int num_new(int b) const { return step.starts[b + 1] - step.starts[b]; }
  int position(int b, int token) const { return step.lengths[b] - num_new(b) + token; }
  const int32_t* pages(int b) const { return step.page_table + size_t(b) * step.max_pages; }
};

// ---- queries, keys and values of one token ----

void norm(float* x, int D, const float* weight, float eps) {
  Floats squares{};
  for (int d = 0; d < D; d += 16) squares += load<Floats>(x + d) * load<Floats>(x + d);
  float factor = 1.0f / std::sqrt(total(squares) / D + eps);
  for (int d = 0; d < D; d += 16) store(x + d, load<Floats>(x + d) * factor * load<Floats>(weight + d));
}

void rotate(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i++) {
    float low = x[i], high = x[i + half];
    x[i] = low * cos[i] - high * sin[i];
    x[i + half] = high * cos[i] + low * sin[i];
  }
}

// x times the normalised Hadamard matrix of the largest power of two that divides D, block by block.
void hadamard(float* x, int D) {
  const int block = D & -D;
  const Ints lane = lanes();
  const auto negated = [&](Floats v, int32_t bit) { return (lane & bit) != 0 ? -v : v; };
  for (int d = 0; d < D; d += 16) {
    Floats v = load<Floats>(x + d);
    v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) + negated(v, 1);
    v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13) + negated(v, 2);
    v = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11) + negated(v, 4);
    v = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7) + negated(v, 8);
    store(x + d, v);
  }
  for (int width = 16; width < block; width *= 2)
    for (int start = 0; start < D; start += 2 * width)
      for (int d = start; d < start + width; d += 16) {
        Floats low = load<Floats>(x + d), high = load<Floats>(x + d + width);
        store(x + d, low + high);
        store(x + d + width, low - high);
      }
  const float factor = 1.0f / std::sqrt(float(block));
  for (int d = 0; d < D; d += 16) store(x + d, load<Floats>(x + d) * factor);
}

// Never inlined: one piece of code for every caller, so that rounding is the same everywhere.
__attribute__((noinline)) void prepare(
  const Call& call, int row, const float* from, float* to, const float* weight, float eps) {
  const int D = call.layer.head_dim;
  std::memcpy(to, from, D * sizeof(float));
  if (weight) norm(to, D, weight, eps);
  const size_t at = size_t(row) * call.half_rotary;
  rotate(to, call.cos + at, call.sin + at, call.half_rotary);
  if (call.layer.format == kInt4 && call.layer.rotate_keys) hadamard(to, D);
}

// ---- storing ----

uint16_t rounded_up(float x) {  // bfloat16; away from 0 if positive, towards 0 if negative
  uint32_t raw;
  std::memcpy(&raw, &x, sizeof raw);
  return uint16_t((x > 0 ? raw + 0xFFFF : raw) >> 16);
}
float inverse(float scale) { return scale < kSmallestScale ? 0.0f : 1.0f / scale; }

struct Range {
  float low, high;
  float poison;  // NaN if any number is not finite, else 0: comparisons would drop it
};
Range range_of(const float* x, int D) {
  Floats low = load<Floats>(x), high = low, poison = low * 0.0f;
  for (int d = 16; d < D; d += 16) {
    Floats v = load<Floats>(x + d);
    low = v < low ? v : low;
    high = v > high ? v : high;
    poison += v * 0.0f;
  }
  return {-maximum(-low), maximum(high), total(poison)};
}
inline Ints rounded(Floats x, float low, float high) {
  x = x < low ? splat(low) : x;
  x = x > high ? splat(high) : x;
  return round_to_ints(x);
}

// Codes of x, D of them, in `codes`; returns the scale.
uint16_t quantize_int8(const float* x, int D, int32_t* codes) {
  Range range = range_of(x, D);
  uint16_t scale = rounded_up(std::max(range.high, -range.low) / 127.0f + range.poison);
  float factor = inverse(float_of(scale));
  for (int d = 0; d < D; d += 16) store(codes + d, rounded(load<Floats>(x + d) * factor, -127.0f, 127.0f));
  return scale;
}
uint16_t quantize_key_int4(const float* x, int D, int32_t* codes) {
  Range range = range_of(x, D);
  uint16_t scale = rounded_up(std::max(range.high, -range.low) / 7.5f + range.poison);
  float factor = inverse(float_of(scale));
  for (int d = 0; d < D; d += 16) store(codes + d, rounded(load<Floats>(x + d) * factor + 7.5f, 0.0f, 15.0f));
  return scale;
}
uint16_t quantize_value_int4(const float* x, int D, int32_t* codes, uint16_t* minimum) {
  Range range = range_of(x, D);
  *minimum = rounded_up(-range.low) ^ 0x8000;
  float low = float_of(*minimum);
  uint16_t scale = rounded_up((range.high - low) / 15.0f + range.poison);
  float factor = inverse(float_of(scale));
  for (int d = 0; d < D; d += 16) store(codes + d, rounded((load<Floats>(x + d) - low) * factor, 0.0f, 15.0f));
  return scale;
}

void store_bfloat16(const float* k, const float* v, int D, uint16_t* keys, uint16_t* values, int offset) {
  alignas(32) uint16_t narrow[kMaxD];
  for (int d = 0; d < D; d += 16) {
    store(narrow + d, bfloat16s(load<Floats>(k + d)));
    store(values + offset * D + d, bfloat16s(load<Floats>(v + d)));
  }
  for (int d = 0; d < D; d++) keys[d * kPage + offset] = narrow[d];
}

void store_int8(const EdgeAttentionLayer& layer, const float* k, const float* v, size_t page, int offset) {
  const int D = layer.head_dim;
  alignas(64) int32_t codes[kMaxD];
  layer.key_scales[page * kPage + offset] = quantize_int8(k, D, codes);
  int8_t* keys = static_cast<int8_t*>(layer.keys) + page * D * kPage;
  for (int d = 0; d < D; d++) keys[d * kPage + offset] = int8_t(codes[d]);
  layer.value_scales[page * kPage + offset] = quantize_int8(v, D, codes);
  int8_t* values = static_cast<int8_t*>(layer.values) + (page * kPage + offset) * D;
  for (int d = 0; d < D; d++) values[d] = int8_t(codes[d]);
}

void store_int4(const EdgeAttentionLayer& layer, const float* k, const float* v, size_t page, int offset) {
  const int D = layer.head_dim, half = D / 2;
  alignas(64) int32_t codes[kMaxD];
  layer.key_scales[page * kPage + offset] = quantize_key_int4(k, D, codes);
  uint8_t* keys = static_cast<uint8_t*>(layer.keys) + page * half * kPage;
  for (int d = 0; d < half; d++) keys[d * kPage + offset] = uint8_t(codes[d] | codes[d + half] << 4);
  uint16_t* minimum = layer.value_minimums + page * kPage + offset;
  layer.value_scales[page * kPage + offset] = quantize_value_int4(v, D, codes, minimum);
  uint8_t* values = static_cast<uint8_t*>(layer.values) + (page * kPage + offset) * half;
  for (int d = 0; d < half; d++) values[d] = uint8_t(codes[d] | codes[d + half] << 4);
}

void store_float32(const EdgeAttentionLayer& layer, const float* k, const float* v, size_t page, int offset) {
  const int D = layer.head_dim;
  float* keys = static_cast<float*>(layer.keys) + page * D * kPage;
  for (int d = 0; d < D; d++) keys[d * kPage + offset] = k[d];
  std::memcpy(static_cast<float*>(layer.values) + (page * kPage + offset) * D, v, D * sizeof(float));
}

// Keys and values of some new tokens of sequence b for one key-value head.
void store_tokens(const Call& call, int b, int kv_head, int first, int end) {
  const EdgeAttentionLayer& layer = call.layer;
  const int H = layer.num_heads, K = layer.num_kv_heads, D = layer.head_dim;
  alignas(64) float k[kMaxD], v[kMaxD];
  for (int token = first; token < end; token++) {
    const int row = call.step.starts[b] + token, position = call.position(b, token);
    const float* from = call.qkv + size_t(row) * (H + 2 * K) * D;
    prepare(call, row, from + (H + kv_head) * D, k, layer.k_norm, layer.k_eps);
    std::memcpy(v, from + (H + K + kv_head) * D, D * sizeof(float));
    const int number = call.pages(b)[position / kPage], offset = position % kPage;
    const size_t page = size_t(kv_head) * layer.num_pages + number;  // in units of a page of one head
    switch (layer.format) {
      case kFloat32: store_float32(layer, k, v, page, offset); break;
      case kBfloat16: {
        const size_t at = page * D * kPage;
        store_bfloat16(
          k, v, D, static_cast<uint16_t*>(layer.keys) + at, static_cast<uint16_t*>(layer.values) + at, offset);
        break;
      }
      case kInt8: store_int8(layer, k, v, page, offset); break;
      case kInt4: {
        if (layer.rotate_values) hadamard(v, D);
        store_int4(layer, k, v, page, offset);
        const int side = call.step.side_of_page[number];
        if (side >= 0) {
          const size_t at = (size_t(kv_head) * layer.num_side_pages + side) * D * kPage;
          store_bfloat16(k, v, D, layer.side_keys + at, layer.side_values + at, offset);
        }
        break;
      }
    }
  }
}

// ---- pages to floats ----

void expand_bfloat16(const uint16_t* from, float* to, int count) {
  for (int i = 0; i < count; i += 16) store(to + i, floats(load<U16x16>(from + i)));
}

void expand_keys(const EdgeAttentionLayer& layer, size_t page, float* to) {  // (D, 16)
  const int D = layer.head_dim;
  switch (layer.format) {
    case kFloat32:
      std::memcpy(to, static_cast<const float*>(layer.keys) + page * D * kPage, D * kPage * sizeof(float));
      break;
    case kBfloat16:
      expand_bfloat16(static_cast<const uint16_t*>(layer.keys) + page * D * kPage, to, D * kPage);
      break;
    case kInt8: {
      const int8_t* codes = static_cast<const int8_t*>(layer.keys) + page * D * kPage;
      const Floats scale = floats(load<U16x16>(layer.key_scales + page * kPage));
      for (int i = 0; i < D * kPage; i += kPage) store(to + i, floats(load<I8x16>(codes + i)) * scale);
      break;
    }
    case kInt4: {
      const int half = D / 2 * kPage;
      const uint8_t* codes = static_cast<const uint8_t*>(layer.keys) + page * half;
      const Floats scale = floats(load<U16x16>(layer.key_scales + page * kPage));
      for (int i = 0; i < half; i += kPage) {
        U8x16 packed = load<U8x16>(codes + i);
        store(to + i, (floats_of_nibbles(packed, false) - 7.5f) * scale);
        store(to + half + i, (floats_of_nibbles(packed, true) - 7.5f) * scale);
      }
      break;
    }
  }
}

void expand_values(const EdgeAttentionLayer& layer, size_t page, int count, float* to) {  // (count, D)
  const int D = layer.head_dim;
  switch (layer.format) {
    case kFloat32:
      std::memcpy(to, static_cast<const float*>(layer.values) + page * D * kPage, count * D * sizeof(float));
      break;
    case kBfloat16:
      expand_bfloat16(static_cast<const uint16_t*>(layer.values) + page * D * kPage, to, count * D);
      break;
    case kInt8:
      for (int token = 0; token < count; token++) {
        const int8_t* codes = static_cast<const int8_t*>(layer.values) + (page * kPage + token) * D;
        const float scale = float_of(layer.value_scales[page * kPage + token]);
        for (int d = 0; d < D; d += 16) store(to + token * D + d, floats(load<I8x16>(codes + d)) * scale);
      }
      break;
    case kInt4:
      for (int token = 0; token < count; token++) {
        const size_t at = page * kPage + token;
        const int half = D / 2;
        const uint8_t* codes = static_cast<const uint8_t*>(layer.values) + at * half;
        const float scale = float_of(layer.value_scales[at]), minimum = float_of(layer.value_minimums[at]);
        float* row = to + token * D;
        for (int d = 0; d < half; d += 16) {
          U8x16 packed = load<U8x16>(codes + d);
          store(row + d, floats_of_nibbles(packed, false) * scale + minimum);
          store(row + half + d, floats_of_nibbles(packed, true) * scale + minimum);
        }
      }
      break;
  }
}

// Keys first_key to first_key + count of sequence b, as a query in page `query_page` sees them.
void expand_block(const Call& call, int b, int kv_head, int first_key, int count, int query_page, Scratch& s) {
  const EdgeAttentionLayer& layer = call.layer;
  const int D = layer.head_dim;
  for (int done = 0; done < count; done += kPage) {
    const int index = (first_key + done) / kPage, number = call.pages(b)[index];
    const int num_keys = std::min(kPage, count - done);
    float *keys = s.keys + done * D, *values = s.values + done * D;
    int side = -1;
    if (layer.format == kInt4 && (index < layer.sink_pages || index > query_page - layer.window_pages))
      side = call.step.side_of_page[number];
    if (side >= 0) {
      const size_t at = (size_t(kv_head) * layer.num_side_pages + side) * D * kPage;
      expand_bfloat16(layer.side_keys + at, keys, D * kPage);
      expand_bfloat16(layer.side_values + at, values, num_keys * D);
    } else {
      const size_t page = size_t(kv_head) * layer.num_pages + number;
      expand_keys(layer, page, keys);
      expand_values(layer, page, num_keys, values);
    }
  }
}

// Inlined, because the compiler takes a function that only prefetches for one without effect, and drops calls of it.
EDGE_INLINE void prefetch(const char* from, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Ask for the keys, or the values, of a block ahead of their use. The processor's own prefetching starts too late in
// the few kilobytes that a block has in one place.
EDGE_INLINE void prefetch_block(const Call& call, const Task& task, bool values, int first_key, int end) {
  const EdgeAttentionLayer& layer = call.layer;
  static constexpr int kBits[] = {32, 16, 8, 4};
  const size_t num_bytes = size_t(kPage) * layer.head_dim * kBits[layer.format] / 8;
  const char* plane = static_cast<const char*>(values ? layer.values : layer.keys);
  const uint16_t* scales = values ? layer.value_scales : layer.key_scales;
  for (int key = first_key; key < std::min(first_key + kBlock, end); key += kPage) {
    const size_t page = size_t(task.kv_head) * layer.num_pages + call.pages(task.sequence)[key / kPage];
    prefetch(plane + page * num_bytes, num_bytes);
    if (scales) __builtin_prefetch(scales + page * kPage);
    if (values && layer.value_minimums) __builtin_prefetch(layer.value_minimums + page * kPage);
  }
}

// ---- the small matrix product ----

// c (R, N vectors) [+]= a (R, steps) times b (steps, N vectors): vector j of step t of b is at
// b + j * b_stride + t * b_step.
// Otherwise the compiler loads a vector again for every row, and loads are what this is short of.
#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define KEEP_IN_REGISTER(v)
#endif

template <int R, int N>
void product(const float* a, int a_stride, const float* b, int b_stride, int b_step, int steps, float* c, int c_stride,
      bool add) {
  Floats acc[R][N];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) acc[r][j] = add ? load<Floats>(c + r * c_stride + j * 16) : Floats{};
  for (int t = 0; t < steps; t++) {
    Floats v[N];
    for (int j = 0; j < N; j++) {
      v[j] = load<Floats>(b + j * b_stride + size_t(t) * b_step);
      KEEP_IN_REGISTER(v[j]);
    }
    for (int r = 0; r < R; r++) {
      const Floats weight = splat(a[r * a_stride + t]);
      for (int j = 0; j < N; j++) acc[r][j] += weight * v[j];
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) store(c + r * c_stride + j * 16, acc[r][j]);
}

using Product = void (*)(const float*, int, const float*, int, int, int, float*, int, bool);
template <int R>
constexpr Product kProductsOf[4] = {product<R, 1>, product<R, 2>, product<R, 3>, product<R, 4>};
constexpr const Product* kProducts[kGroup] = {kProductsOf<1>, kProductsOf<2>, kProductsOf<3>,
                      kProductsOf<4>, kProductsOf<5>, kProductsOf<6>};

// ---- attending ----

void load_queries(const Call& call, const Task& task, Scratch& s) {
  const EdgeAttentionLayer& layer = call.layer;
  const int H = layer.num_heads, K = layer.num_kv_heads, D = layer.head_dim, G = call.G();
  const float factor = layer.softcap > 0 ? layer.scale / layer.softcap : layer.scale * kLog2E;
  for (int r = 0; r < task.num_rows; r++) {
    const int token = (task.first_row + r) / G, head = task.kv_head * G + (task.first_row + r) % G;
    const int row = call.step.starts[task.sequence] + token;
    float* q = s.q + r * kStride;
    prepare(call, row, call.qkv + (size_t(row) * (H + 2 * K) + head) * D, q, layer.q_norm, layer.q_eps);
    for (int d = 0; d < D; d += 16) store(q + d, load<Floats>(q + d) * factor);
    s.position[r] = call.position(task.sequence, token);
  }
}

// Scores of one row over a block to weights; running maximum and sum, and the row's results so far scaled to them.
void soften(const EdgeAttentionLayer& layer, Scratch& s, int r, int first_key, int count) {
  const int D = layer.head_dim, num_vectors = (count + kPage - 1) / kPage;
  float* scores = s.scores + r * kScoreStride;
  const int last = s.position[r] - first_key;  // of the keys that the row sees, in this block
  const int first = layer.window > 0 ? last - layer.window + 1 : 0;
  Floats x[kBlockPages], top = splat(-INFINITY);
  for (int j = 0; j < num_vectors; j++) {
    x[j] = load<Floats>(scores + j * 16);
    if (layer.softcap > 0) x[j] = tanh_(x[j]) * (layer.softcap * kLog2E);
    if (last < j * 16 + 15 || first > j * 16) {
      const Ints key = lanes() + j * 16;
      x[j] = key <= last ? x[j] : splat(-INFINITY);
      x[j] = key >= first ? x[j] : splat(-INFINITY);
    }
    top = x[j] > top ? x[j] : top;
  }
  const float before = s.max[r], now = std::max(before, maximum(top));
  const float finite = now == -INFINITY ? 0.0f : now;
  Floats sums[kBlockPages] = {};
  for (int j = 0; j < num_vectors; j++) {
    sums[j] = exp2_(x[j] - finite);
    store(scores + j * 16, sums[j]);
  }
  const float block_sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (now == before) {
    s.sum[r] += block_sum;
    return;
  }
  const float factor = exp2_(before - finite);
  s.max[r] = now;
  s.sum[r] = s.sum[r] * factor + block_sum;
  float* acc = s.acc + r * kStride;
  for (int d = 0; d < D; d += 16) store(acc + d, load<Floats>(acc + d) * factor);
}

void attend_block(const Call& call, const Task& task, Scratch& s, int first_key, int count) {
  const int D = call.layer.head_dim, num_pages = (count + kPage - 1) / kPage;
  const int last_key = s.position[task.num_rows - 1] + 1;
  prefetch_block(call, task, false, first_key + kBlock, last_key);
  expand_block(call, task.sequence, task.kv_head, first_key, count, s.position[task.num_rows - 1] / kPage, s);
  for (int r = 0; r < task.num_rows; r += kGroup) {
    const int rows = std::min(kGroup, task.num_rows - r);
    float* scores = s.scores + r * kScoreStride;
    kProducts[rows - 1][num_pages - 1](
      s.q + r * kStride, kStride, s.keys, D * kPage, kPage, D, scores, kScoreStride, false);
  }
  prefetch_block(call, task, true, first_key + kBlock, last_key);
  for (int r = 0; r < task.num_rows; r++) soften(call.layer, s, r, first_key, count);
  for (int r = 0; r < task.num_rows; r += kGroup) {
    const int rows = std::min(kGroup, task.num_rows - r);
    const float* weights = s.scores + r * kScoreStride;
    for (int d = 0; d < D; d += 64) {
      const int vectors = std::min(4, (D - d) / 16);
      kProducts[rows - 1][vectors - 1](
        weights, kScoreStride, s.values + d, 16, D, count, s.acc + r * kStride + d, kStride, true);
    }
  }
}

// Maximum, sum and results of the task's rows over the keys of one split.
void attend_split(const Call& call, const Task& task, Scratch& s, int split) {
  const int D = call.layer.head_dim;
  for (int r = 0; r < task.num_rows; r++) {
    s.max[r] = -INFINITY;
    s.sum[r] = 0;
    std::memset(s.acc + r * kStride, 0, D * sizeof(float));
  }
  int first_key = split * kSplit;
  if (call.layer.window > 0) {  // blocks that not even the first row sees
    const int seen = s.position[0] - call.layer.window + 1;
    if (seen > first_key) first_key = seen / kBlock * kBlock;
  }
  const int end = std::min((split + 1) * kSplit, s.position[task.num_rows - 1] + 1);
  for (; first_key < end; first_key += kBlock) {
    attend_block(call, task, s, first_key, std::min(kBlock, end - first_key));
  }
}

// Add the results of a further split to those of the splits before it.
void merge(int D, float& total_max, float& total_sum, float* total, float max, float sum, const float* acc) {
  const float now = std::max(total_max, max), finite = now == -INFINITY ? 0.0f : now;
  const float old_factor = exp2_(total_max - finite), factor = exp2_(max - finite);
  total_max = now;
  total_sum = total_sum * old_factor + sum * factor;
  for (int d = 0; d < D; d += 16)
    store(total + d, load<Floats>(total + d) * old_factor + load<Floats>(acc + d) * factor);
}

void finish(const Call& call, const Task& task, int r, float sum, float* total) {
  const EdgeAttentionLayer& layer = call.layer;
  const int D = layer.head_dim, G = call.G();
  const int token = (task.first_row + r) / G, head = task.kv_head * G + (task.first_row + r) % G;
  const float factor = 1.0f / sum;
  for (int d = 0; d < D; d += 16) store(total + d, load<Floats>(total + d) * factor);
  if (layer.format == kInt4 && layer.rotate_values) hadamard(total, D);
  const size_t row = call.step.starts[task.sequence] + token;
  std::memcpy(call.out + (row * layer.num_heads + head) * D, total, D * sizeof(float));
}

int first_split(const Call& call, const Task& task) {
  if (call.layer.window <= 0) return 0;
  const int position = call.position(task.sequence, task.first_row / call.G());
  return std::max(0, position - call.layer.window + 1) / kSplit;
}
int last_split(const Call& call, const Task& task) {
  return call.position(task.sequence, (task.first_row + task.num_rows - 1) / call.G()) / kSplit;
}

void attend(const Call& call, const Task& task, Scratch& s) {
  const int D = call.layer.head_dim;
  load_queries(call, task, s);
  const int first = first_split(call, task), last = last_split(call, task);
  for (int split = first; split <= last; split++) {
    attend_split(call, task, s, split);
    for (int r = 0; r < task.num_rows; r++) {
      float* total = s.total + r * kStride;
      if (split == first) {
        s.total_max[r] = -INFINITY;
        s.total_sum[r] = 0;
        std::memset(total, 0, D * sizeof(float));
      }
      merge(D, s.total_max[r], s.total_sum[r], total, s.max[r], s.sum[r], s.acc + r * kStride);
    }
  }
  for (int r = 0; r < task.num_rows; r++) finish(call, task, r, s.total_sum[r], s.total + r * kStride);
}

// Results of the splits of one task that were computed apart; a row in it is maximum, sum, D results.
struct Partials {
  int D;
  std::vector<float> memory;
  float* row(int partial, int r) { return memory.data() + (size_t(partial) * kMaxRows + r) * (D + 16); }
};

void attend_apart(const Call& call, const Task& task, Scratch& s, Partials& partials) {
  load_queries(call, task, s);
  attend_split(call, task, s, task.split);
  for (int r = 0; r < task.num_rows; r++) {
    float* to = partials.row(task.partial, r);
    to[0] = s.max[r];
    to[1] = s.sum[r];
    std::memcpy(to + 16, s.acc + r * kStride, call.layer.head_dim * sizeof(float));
  }
}

void merge_apart(const Call& call, const Task& task, Scratch& s, Partials& partials) {
  const int num_splits = last_split(call, task) - first_split(call, task) + 1;
  for (int r = 0; r < task.num_rows; r++) {
    float max = -INFINITY, sum = 0;
    std::memset(s.total, 0, call.layer.head_dim * sizeof(float));
    for (int i = 0; i < num_splits; i++) {
      const float* part = partials.row(task.partial + i, r);
      merge(call.layer.head_dim, max, sum, s.total, part[0], part[1], part + 16);
    }
    finish(call, task, r, sum, s.total);
  }
}

// ---- tasks ----

struct StoreTask {
  int sequence, kv_head, first, end;
};

struct Plan {
  std::vector<StoreTask> stores;  // all done before any of `tasks`
  std::vector<Task> tasks;        // a task that is alone with its sequence and head stores for itself
  std::vector<Task> merges;       // done after all of `tasks`
  int num_partials = 0;
};

// The tasks of one sequence and head: rows in tiles.
void plan_tiles(const Call& call, int b, int kv_head, std::vector<Task>& tiles) {
  const int G = call.G(), num_rows = call.num_new(b) * G;
  for (int row = 0; row < num_rows;) {
    int count = std::min(kMaxRows, num_rows - row);
    if (call.layer.format == kInt4) {  // queries of another page see other pages in full precision
      const int token = row / G, left = kPage - call.position(b, token) % kPage;
      count = std::min(count, (token + left) * G - row);
    }
    const long num_keys = call.position(b, (row + count - 1) / G) + 1;
    tiles.push_back({b, kv_head, row, count, -1, 0, num_keys * (count + 8)});
    row += count;
  }
}

Plan make_plan(const Call& call, int num_threads) {
  Plan plan;
  std::vector<Task> tiles;
  const int B = call.step.num_sequences, K = call.layer.num_kv_heads;
  for (int b = 0; b < B; b++)
    for (int kv_head = 0; kv_head < K; kv_head++) plan_tiles(call, b, kv_head, tiles);
  const bool apart = num_threads > 1 && int(tiles.size()) < 4 * num_threads;
  for (Task& tile : tiles) {
    const int first = first_split(call, tile), num_splits = last_split(call, tile) - first + 1;
    const bool split = apart && num_splits > 1;
    const bool alone = !split && tile.num_rows == call.num_new(tile.sequence) * call.G();
    if (!alone && tile.first_row == 0) {
      const int num_new = call.num_new(tile.sequence);
      for (int at = 0; at < num_new; at += kStoreTokens)
        plan.stores.push_back({tile.sequence, tile.kv_head, at, std::min(at + kStoreTokens, num_new)});
    }
    if (!split) {
      plan.tasks.push_back(tile);
      continue;
    }
    tile.partial = plan.num_partials;
    plan.num_partials += num_splits;
    plan.merges.push_back(tile);
    for (int i = 0; i < num_splits; i++) {
      plan.tasks.push_back(tile);
      plan.tasks.back().split = first + i;
      plan.tasks.back().partial = tile.partial + i;
      plan.tasks.back().cost = tile.num_rows * kSplit;
    }
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return plan;
}

void run(const Call& call, const Task& task, Scratch& s, Partials& partials) {
  if (task.split >= 0) {
    attend_apart(call, task, s, partials);
    return;
  }
  const int num_new = call.num_new(task.sequence);
  if (task.num_rows == num_new * call.G()) store_tokens(call, task.sequence, task.kv_head, 0, num_new);
  attend(call, task, s);
}

Scratch& scratch() {
  static thread_local Scratch s;
  return s;
}

}  // namespace

extern "C" void edge_attention(const EdgeAttentionLayer* layer, const EdgeAttentionStep* step, const float* qkv,
               const float* cos, const float* sin, int32_t half_rotary, float* out,
               int32_t num_threads) {
  const Call call{*layer, *step, qkv, cos, sin, half_rotary, out};
  const Plan plan = make_plan(call, num_threads);
  Partials partials{layer->head_dim, {}};
  partials.memory.resize(size_t(plan.num_partials) * kMaxRows * (layer->head_dim + 16));
  parallel(num_threads, int64_t(plan.stores.size()), [&](int64_t i) {
    const StoreTask& task = plan.stores[i];
    store_tokens(call, task.sequence, task.kv_head, task.first, task.end);
  });
  parallel(num_threads, int64_t(plan.tasks.size()), [&](int64_t i) { run(call, plan.tasks[i], scratch(), partials); });
  parallel(num_threads, int64_t(plan.merges.size()),
           [&](int64_t i) { merge_apart(call, plan.merges[i], scratch(), partials); });
}
