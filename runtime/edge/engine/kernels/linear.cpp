// Matrix products of float rows with 4 and 8 bit weights, and what surrounds them in a layer.
//
// The weights are in panels of 16 outputs (`edge.engine.kernels.linear` packs them). The inputs are rounded to 8 bits
// with a scale per 32 columns, so that the products are of integers; everything else is float32. Where a block's scale
// is large beside the row, because of an outlier in it, the block is held in 16 bits as two numbers of 8: these few
// blocks would make most of the error. A row's sums have one order, whatever the number of rows and threads: block by
// block of 32 columns, from the first to the last.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "pool.h"
#include "simd.h"

using edge::Bytes;
using edge::Floats;
using edge::Ints;
using edge::kLanes;
using edge::unrolled;

namespace {

constexpr int kBlock = 32;      // columns of an input row that share a scale
#if defined(__AVX512F__)
constexpr int kTile = 12;  // rows that are multiplied at a time, at most: as many as the registers hold
constexpr bool kSpreads = false;  // whether it is worth the memory, for many rows, to hold each code in a byte
#else
constexpr int kTile = 6;
constexpr bool kSpreads = true;
#endif
constexpr int64_t kSpreadTiles = 4;  // how many are many
constexpr int kSpreadBytes = 512;  // of a block's codes in a panel, where every code has a byte of its own
constexpr int kRowBytes = 84;  // of a row's block in `Tile`, apart from the flags
// A block with a number so many times the row's root mean square is held in 16 bits. What a gate gives has long tails:
// with the first limit half of its blocks would be, for little.
constexpr float kOutlier = 6.0f, kGatedOutlier = 10.0f;
constexpr int64_t kAheadBytes = 12 << 10;    // between what is read from memory and what is asked for
constexpr int64_t kInputsBytes = 384 << 10;  // inputs that stay in a core's cache while the weights pass by

struct Part {
  const uint8_t* panels;  // each: codes (blocks, bits, 64), scales (groups, 16), and minimums likewise if not symmetric
  int64_t num_outputs;
  int64_t panel_bytes;
  int64_t scales_at;    // where they begin in a panel, in bytes
  int64_t minimums_at;  // likewise
  int32_t bits;
  int32_t group;  // columns that share a scale: 16, or a multiple of 32
  int32_t symmetric;  // whether the minimum is -2^(bits - 1) scales
};

struct Matrix {
  const Part* parts;
  int64_t num_parts;
  int64_t num_inputs;
  const float* bias;  // for the outputs of all parts, or null
};

enum Prologue : int32_t { kNone = 0, kNorm = 1, kSilu = 2, kGelu = 3 };

struct Inputs {
  const float* x;
  int64_t stride;
  int32_t prologue;
  const float* norm;
  float eps;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- Inputs: rows of floats to tiles of codes

// A tile's rows side by side, block by block, so that a product reads memory in order.
struct Tile {
  Tile(uint8_t* memory, int64_t num_blocks, int M)
      : codes(reinterpret_cast<int8_t*>(memory)),
        fine_codes(codes + num_blocks * M * kBlock),
        scales(reinterpret_cast<float*>(fine_codes + num_blocks * M * kBlock)),
        sums(scales + num_blocks * M),
        half_sums(sums + num_blocks * M),
        counts(reinterpret_cast<int32_t*>(half_sums + num_blocks * M * 2)),
        is_fine(reinterpret_cast<uint8_t*>(counts + num_blocks * M)) {}

  static int64_t size_bytes(int64_t num_blocks, int M) { return ceil_div(num_blocks * (M * kRowBytes + 1), 64) * 64; }

  int8_t* codes;       // (blocks, M, 32)
  int8_t* fine_codes;  // (blocks, M, 32): in 256ths of a code; 0 in rows whose block is held in 8 bits
  float* scales;       // (blocks, M)
  float* sums;         // (blocks, M): the sum of what is held
  float* half_sums;    // (blocks, 2, M): that of the first and of the last 16
  int32_t* counts;     // (blocks, M): minus the sum of the codes, in 256ths
  uint8_t* is_fine;    // (blocks,): whether some row's block is held in 16 bits
};

// The tile heights that there is code for; a last tile has rows of zeros up to the next.
int tile_height(int64_t num_rows) {
  for (int height : {1, 2, 4, 8})
    if (num_rows <= height && height < kTile) return height;
  return kTile;
}

EDGE_INLINE Floats load_some(const float* from, int64_t count) {
  if (count >= kLanes) return edge::load<Floats>(from);
  float lanes[kLanes] = {};
  if (count > 0) std::memcpy(lanes, from, count * sizeof(float));
  return edge::load<Floats>(lanes);
}

float inverse_rms(const float* x, int64_t n, float eps) {
  Floats squares = {};
  for (int64_t k = 0; k < n; k += kLanes) {
    const Floats v = load_some(x + k, n - k);
    squares = edge::multiply_add(v, v, squares);
  }
  return 1.0f / std::sqrt(edge::sum(squares) / float(n) + eps);
}

// gate * sigmoid(z) * up, with z the gate itself or what makes that the tanh form of gelu.
EDGE_INLINE Floats gated(Floats gate, Floats up, bool gelu) {
  Floats z = gate;
  if (gelu) z = gate * (1.5957691216f + 0.0713548163f * gate * gate);  // 2 sqrt(2 / pi) (x + 0.044715 x^3)
  const Floats most = edge::splat(86.0f);
  z = edge::select(z > most, most, edge::select(z < -most, -most, z));  // NaN stays
  return gate / (1.0f + edge::exp(-z)) * up;
}

// p(x) of one row to `to`, filled up with zeros to whole blocks.
template <Prologue PROLOGUE>
void prepare_row(const Inputs& in, const float* x, int64_t K, float* to) {
  const float factor = PROLOGUE == kNorm ? inverse_rms(x, K, in.eps) : 1.0f;
  for (int64_t k = 0; k < ceil_div(K, kBlock) * kBlock; k += kLanes) {
    Floats v = load_some(x + k, K - k);
    if constexpr (PROLOGUE == kNorm) v = v * factor * load_some(in.norm + k, K - k);
    if constexpr (PROLOGUE == kSilu || PROLOGUE == kGelu)
      v = gated(v, load_some(x + K + k, K - k), PROLOGUE == kGelu);
    edge::store(to + k, v);
  }
}

using PrepareRow = void (*)(const Inputs&, const float*, int64_t, float*);
constexpr PrepareRow kPrepareRow[] = {prepare_row<kNone>, prepare_row<kNorm>, prepare_row<kSilu>, prepare_row<kGelu>};

// Row m of a tile, from its numbers `x`.
void quantize_row(const float* x, int64_t K, bool is_gated, const Tile& tile, int m, int M) {
  const float outlier = (is_gated ? kGatedOutlier : kOutlier) / inverse_rms(x, K, 0.0f);
  for (int64_t k = 0, b = 0; k < K; k += kBlock, ++b) {
    Floats low = edge::load<Floats>(x + k), high = edge::load<Floats>(x + k + kLanes);
    // The bits of floats without signs are in order, NaN above all: a NaN or infinity becomes the scale, so that it
    // reaches every output of this row.
    const Ints low_bits = (Ints)low & 0x7fffffff, high_bits = (Ints)high & 0x7fffffff;
    const int32_t bits = edge::largest(edge::select(low_bits > high_bits, low_bits, high_bits));
    float most;
    std::memcpy(&most, &bits, sizeof most);
    const float inverse = most > 1e-30f ? 127.0f / most : 0.0f, scale = most / 127.0f;
    low *= inverse;
    high *= inverse;
    Ints low_codes = edge::round_to_ints(low), high_codes = edge::round_to_ints(high);
    Ints low_fine = {}, high_fine = {};
    if (most > outlier) {
      low_fine = edge::round_to_ints((low - edge::to_floats(low_codes)) * 256.0f);
      high_fine = edge::round_to_ints((high - edge::to_floats(high_codes)) * 256.0f);
      const Ints most_fine = edge::splat(127);
      low_fine = edge::select(low_fine > 127, most_fine, low_fine);
      high_fine = edge::select(high_fine > 127, most_fine, high_fine);
      __atomic_store_n(tile.is_fine + b, 1, __ATOMIC_RELAXED);  // other threads have other rows of the tile
    }
    const int64_t at = (b * M + m) * kBlock;
    edge::store_bytes(tile.codes + at, low_codes);
    edge::store_bytes(tile.codes + at + kLanes, high_codes);
    edge::store_bytes(tile.fine_codes + at, low_fine);
    edge::store_bytes(tile.fine_codes + at + kLanes, high_fine);
    const int32_t low_count = edge::sum((low_codes << 8) + low_fine);
    const int32_t high_count = edge::sum((high_codes << 8) + high_fine);
    tile.scales[b * M + m] = scale;
    tile.sums[b * M + m] = scale * 0x1p-8f * float(low_count + high_count);
    tile.half_sums[b * M * 2 + m] = scale * 0x1p-8f * float(low_count);
    tile.half_sums[b * M * 2 + M + m] = scale * 0x1p-8f * float(high_count);
    tile.counts[b * M + m] = -(low_count + high_count);
  }
}

// ---- Products: one tile with one panel

// The columns of a block whose weights share a scale: all, or with groups of 16 one half.
enum Columns { kAll, kFirst, kLast };

EDGE_INLINE Bytes low_halves(Bytes v) { return v & 15; }
EDGE_INLINE Bytes high_halves(Bytes v) { return (Bytes)((edge::Words)v >> 4) & 15; }

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// There is no instruction that adds four products of bytes without cutting off large sums. So codes are taken in halves
// of 4 bits, whose products with a block's 32 numbers fit into 16 bits in sum.
#define EDGE_BY_HALVES
using Sums = edge::Shorts;

EDGE_INLINE Sums add_products(Sums sums, Bytes codes, const int8_t* four) {
  int32_t packed;
  std::memcpy(&packed, four, sizeof packed);
#if defined(__AVX512BW__)
  return sums + (Sums)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(packed));
#else
  const __m256i values = _mm256_set1_epi32(packed);
  EDGE_EACH_PART(sums.part[i] += (Sums::Part)_mm256_maddubs_epi16((__m256i)codes.part[i], values);
                 __asm__("" : "+x"(sums.part[i])))  // else all products are made first, and find no registers
  return sums;
#endif
}
EDGE_INLINE Ints add_neighbours(Sums sums) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#else
  Ints to;
  EDGE_EACH_PART(to.part[i] = (Ints::Part)_mm256_madd_epi16((__m256i)sums.part[i], _mm256_set1_epi16(1)))
  return to;
#endif
}

#else
using Sums = Ints;

// For each of 16 outputs: sums + the product of its four codes with the same four values.
EDGE_INLINE Sums add_products(Sums sums, Bytes codes, const int8_t* four) {
#if defined(__AVX512VNNI__)
  int32_t packed;
  std::memcpy(&packed, four, sizeof packed);
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(packed));
#else
  uint8_t of[64];
  int32_t lanes[kLanes];
  edge::store(of, codes);
  edge::store(lanes, sums);
  for (int i = 0; i < kLanes; ++i)
    for (int k = 0; k < 4; ++k) lanes[i] += of[4 * i + k] * four[k];
  return edge::load<Ints>(lanes);
#endif
}
#endif

// Adds to `sums` (M,) the products of a block's weights with `codes` (M, 32); `first` and `last` give the weights of
// columns 4 i and 16 + 4 i. All rows side by side, so that no sum waits for the one before it.
template <int M, Columns COLUMNS, class First, class Last>
EDGE_INLINE void add_block(const First& first, const Last& last, const int8_t* codes, Sums* sums) {
  unrolled<4>([&](auto i) EDGE_INLINED {
    const Bytes of_first = first(i), of_last = last(i);
    unrolled<COLUMNS == kLast ? 0 : M>([&](auto m) EDGE_INLINED {
      sums[m] = add_products(sums[m], of_first, codes + m * kBlock + 4 * i);
    });
    unrolled<COLUMNS == kFirst ? 0 : M>([&](auto m) EDGE_INLINED {
      sums[m] = add_products(sums[m], of_last, codes + m * kBlock + 16 + 4 * i);
    });
  });
}

// How a panel's codes are held: as they are kept, or spread, which is one of 4 bits in every byte.
enum Held { kKept, kSpread };

// Adds to `totals` (M,) the products of a block's weights with `codes` (M, 32).
template <int M, int BITS, Held HELD, Columns COLUMNS>
EDGE_INLINE void multiply_codes(const uint8_t* weights, const int8_t* codes, Ints* totals) {
  const auto vector = [=](int i) { return edge::load<Bytes>(weights + 64 * i); };
  const auto low = [=](int i) { return low_halves(vector(i)); };
  const auto high = [=](int i) { return high_halves(vector(i)); };
#if defined(EDGE_BY_HALVES)
  Sums sums[M] = {};
  if (HELD == kSpread) {
    add_block<M, COLUMNS>(vector, [=](int i) { return vector(i + 4); }, codes, sums);
  } else if (BITS == 8) {
    add_block<M, COLUMNS>(high, [=](int i) { return high_halves(vector(i + 4)); }, codes, sums);
    unrolled<M>([&](auto m) EDGE_INLINED {
      totals[m] += add_neighbours(sums[m]) << 4;
      sums[m] = Sums{};
    });
    add_block<M, COLUMNS>(low, [=](int i) { return low_halves(vector(i + 4)); }, codes, sums);
  } else {
    add_block<M, COLUMNS>(low, high, codes, sums);
  }
  unrolled<M>([&](auto m) EDGE_INLINED { totals[m] += add_neighbours(sums[m]); });
#else
  if (BITS == 8 || HELD == kSpread)
    add_block<M, COLUMNS>(vector, [=](int i) { return vector(i + 4); }, codes, totals);
  else
    add_block<M, COLUMNS>(low, high, codes, totals);
#endif
}

// Adds to `out` (M,) what COLUMNS of block b contribute. A row that is held in 8 bits gets the same bits whether or not
// another row of the tile is held in 16.
template <int M, int BITS, Held HELD, bool SYMMETRIC, Columns COLUMNS>
EDGE_INLINE void multiply_block(const uint8_t* weights, const uint16_t* scales, const uint16_t* minimums,
                                const Tile& tile, int64_t b, Floats* out) {
  constexpr int kMiddle = BITS - 1;  // the middle code of symmetric weights is 1 << kMiddle
  constexpr bool kCounted = SYMMETRIC && COLUMNS == kAll;  // whether it is taken off the integers, or in the end
  const int64_t row = b * M;
  const int32_t* counts = tile.counts + row;
  const float* row_scales = tile.scales + row;
  const float* sums = COLUMNS == kAll ? tile.sums + row : tile.half_sums + 2 * row + (COLUMNS == kLast ? M : 0);
  Ints totals[M];
  unrolled<M>([&](auto m) EDGE_INLINED {
    totals[m] = kCounted ? edge::splat(counts[m]) >> (8 - kMiddle) : Ints{};
  });
  multiply_codes<M, BITS, HELD, COLUMNS>(weights, tile.codes + row * kBlock, totals);
  Floats scale = edge::load_halves(scales);
  const Floats minimum = SYMMETRIC ? scale * -float(1 << kMiddle) : edge::load_halves(minimums);
  if (__builtin_expect(tile.is_fine[b], false)) {
    scale *= 0x1p-8f;
    unrolled<M>([&](auto m) EDGE_INLINED {
      totals[m] <<= 8;
      if (kCounted) totals[m] += edge::splat(counts[m]) << kMiddle & 255;  // what the shift to the right has lost
    });
    const uint8_t* again = weights;
    __asm__("" : "+r"(again));  // else what was unpacked above is kept for here, in memory, in every block
    multiply_codes<M, BITS, HELD, COLUMNS>(again, tile.fine_codes + row * kBlock, totals);
  }
  unrolled<M>([&](auto m) EDGE_INLINED {
    if (!kCounted) out[m] = edge::multiply_add(minimum, edge::splat(sums[m]), out[m]);
    out[m] = edge::multiply_add(edge::to_floats(totals[m]), scale * row_scales[m], out[m]);
  });
}

// results (M, 16) = a tile times a panel, whose codes are at `codes`. HALVES: the weights' groups are of 16 columns.
// `ahead`, if any, is the panel that is wanted from memory meanwhile.
template <int M, int BITS, Held HELD, bool SYMMETRIC, bool HALVES>
void multiply(const Part& part, const uint8_t* panel, const uint8_t* codes, const uint8_t* ahead, const Tile& tile,
              int64_t num_blocks, Floats* results) {
  constexpr int kCodesBytes = HELD == kSpread ? kSpreadBytes : BITS * 64;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + part.scales_at);
  const uint16_t* minimums = reinterpret_cast<const uint16_t*>(panel + part.minimums_at);
  Floats out[M] = {};
  int32_t column = 0;  // in its group
  for (int64_t b = 0; b < num_blocks; ++b, codes += kCodesBytes) {
    if (ahead) {
#pragma GCC unroll 9
      for (int i = 0; i <= BITS; ++i) __builtin_prefetch(ahead + 64 * i);
      ahead += (BITS + 1) * 64;
    }
    if (HALVES) {
      multiply_block<M, BITS, HELD, SYMMETRIC, kFirst>(codes, scales, minimums, tile, b, out);
      multiply_block<M, BITS, HELD, SYMMETRIC, kLast>(codes, scales + kLanes, minimums + kLanes, tile, b, out);
      scales += 2 * kLanes;
      minimums += 2 * kLanes;
    } else {
      multiply_block<M, BITS, HELD, SYMMETRIC, kAll>(codes, scales, minimums, tile, b, out);
      column += kBlock;
      if (column == part.group) {
        column = 0;
        scales += kLanes;
        minimums += kLanes;
      }
    }
  }
  unrolled<M>([&](auto m) EDGE_INLINED { results[m] = out[m]; });
}

using Multiply = void (*)(const Part&, const uint8_t*, const uint8_t*, const uint8_t*, const Tile&, int64_t, Floats*);

template <int M, int BITS, Held HELD>
Multiply choose(const Part& part) {
  static constexpr Multiply kAll[] = {
      multiply<M, BITS, HELD, false, false>, multiply<M, BITS, HELD, false, true>,
      multiply<M, BITS, HELD, true, false>, multiply<M, BITS, HELD, true, true>,
  };
  return kAll[(part.symmetric != 0) * 2 + (part.group == 16)];
}

template <int M>
Multiply choose(const Part& part) {
  return part.bits == 8 ? choose<M, 8, kKept>(part) : choose<M, 4, kKept>(part);
}

Multiply choose(const Part& part, int height, Held held) {
  if (held == kSpread) return choose<kTile, 4, kSpread>(part);
  switch (height) {
    case 1: return choose<1>(part);
    case 2: return choose<2>(part);
    case 4: return choose<4>(part);
#if defined(__AVX512F__)
    case 8: return choose<8>(part);
#endif
    default: return choose<kTile>(part);
  }
}

// Codes of 4 bits, (blocks, 4, 64), spread.
void spread(const uint8_t* codes, int64_t num_blocks, uint8_t* to) {
  for (int64_t b = 0; b < num_blocks; ++b, to += kSpreadBytes) {
    unrolled<4>([&](auto i) EDGE_INLINED {
      const Bytes both = edge::load<Bytes>(codes);
      edge::store(to + 64 * i, low_halves(both));
      edge::store(to + 64 * (i + 4), high_halves(both));
      codes += 64;
    });
  }
}

// ---- A call

// out (rows from `out` on) = or += results (rows, 16) + bias, the first `width` columns.
void put(const Floats* results, int64_t num_rows, int64_t width, const float* bias, bool add, float* out,
         int64_t stride) {
  const Floats shift = bias ? load_some(bias, width) : Floats{};
  for (int64_t m = 0; m < num_rows; ++m, out += stride) {
    Floats v = results[m];
    if (bias) v += shift;
    if (add) v += load_some(out, width);
    if (width >= kLanes)
      edge::store(out, v);
    else
      std::memcpy(out, &v, width * sizeof(float));
  }
}

// Memory of this thread, different for each USE, until the next call.
template <int USE>
uint8_t* scratch(int64_t size_bytes) {
  thread_local std::vector<uint8_t> memory;
  if (int64_t(memory.size()) < size_bytes + 63) memory.resize(size_bytes + 63);
  void* start = memory.data();
  size_t space = memory.size();
  return static_cast<uint8_t*>(std::align(64, size_bytes, start, space));
}

class Call {
 public:
  Call(const Matrix& matrix, const Inputs& in, int64_t num_rows, float* out, int64_t out_stride, bool add)
      : matrix_(matrix),
        in_(in),
        num_rows_(num_rows),
        num_blocks_(ceil_div(matrix.num_inputs, kBlock)),
        num_tiles_(ceil_div(num_rows, kTile)),
        last_height_(tile_height(num_rows - (num_tiles_ - 1) * kTile)),
        tile_bytes_(Tile::size_bytes(num_blocks_, kTile)),
        tiles_(scratch<0>((num_tiles_ - 1) * tile_bytes_ + Tile::size_bytes(num_blocks_, last_height_))),
        out_(out),
        out_stride_(out_stride),
        add_(add) {}

  void run(int num_threads) const {
    quantize(num_threads);
    int64_t num_panels = 0;
    for (int64_t i = 0; i < matrix_.num_parts; ++i) num_panels += ceil_div(matrix_.parts[i].num_outputs, kLanes);
    // Tasks: some rows with some panels. Small ones at the end even out what the threads get done.
    const int64_t num_row_tasks = ceil_div(num_tiles_ * tile_bytes_, kInputsBytes);
    const int64_t tiles_per_task = ceil_div(num_tiles_, num_row_tasks);
    const int64_t panels_per_task = std::max(num_rows_ <= 4 ? int64_t(2) : 1, num_panels / (32 * num_threads));
    const int64_t num_panel_tasks = ceil_div(num_panels, panels_per_task);
    edge::parallel(num_threads, num_row_tasks * num_panel_tasks, [&](int64_t task) {
      const int64_t tile = task / num_panel_tasks * tiles_per_task, panel = task % num_panel_tasks * panels_per_task;
      multiply_panels(tile, std::min(tile + tiles_per_task, num_tiles_), panel, panel + panels_per_task);
    });
  }

 private:
  int height(int64_t tile) const { return tile == num_tiles_ - 1 ? last_height_ : kTile; }
  Tile tile_at(int64_t tile) const { return Tile(tiles_ + tile * tile_bytes_, num_blocks_, height(tile)); }

  void quantize(int num_threads) const {
    for (int64_t tile = 0; tile < num_tiles_; ++tile) std::memset(tile_at(tile).is_fine, 0, num_blocks_);
    // What follows the last row of the last tile is multiplied too.
    const int64_t last = num_tiles_ - 1;
    if (num_rows_ < last * kTile + last_height_)
      std::memset(tiles_ + last * tile_bytes_, 0, Tile::size_bytes(num_blocks_, last_height_));
    // Few numbers are converted before a helper would have begun.
    const bool alone = num_rows_ * matrix_.num_inputs <= 4096;
    const int64_t rows_per_task = alone ? num_rows_ : ceil_div(num_rows_, 4 * num_threads);
    edge::parallel(num_threads, ceil_div(num_rows_, rows_per_task), [&](int64_t task) {
      const int64_t end = std::min(num_rows_, (task + 1) * rows_per_task);
      const int64_t K = matrix_.num_inputs;
      float* const prepared = reinterpret_cast<float*>(scratch<1>(num_blocks_ * kBlock * sizeof(float)));
      for (int64_t row = task * rows_per_task; row < end; ++row) {
        const int64_t tile = row / kTile;
        kPrepareRow[in_.prologue](in_, in_.x + row * in_.stride, K, prepared);
        quantize_row(prepared, K, in_.prologue >= kSilu, tile_at(tile), int(row % kTile), height(tile));
      }
    });
  }

  // Panels are numbered through all parts.
  void multiply_panels(int64_t first_tile, int64_t last_tile, int64_t first_panel, int64_t last_panel) const {
    int64_t start = 0, column = 0;  // where the part begins
    for (int64_t i = 0; i < matrix_.num_parts; ++i) {
      const Part& part = matrix_.parts[i];
      const int64_t end = start + ceil_div(part.num_outputs, kLanes);
      for (int64_t p = std::max(first_panel, start); p < std::min(last_panel, end); ++p)
        multiply_panel(part, p - start, column, first_tile, last_tile);
      start = end;
      column += part.num_outputs;
    }
  }

  void multiply_panel(const Part& part, int64_t panel, int64_t column, int64_t first_tile, int64_t last_tile) const {
    const int64_t output = panel * kLanes, width = std::min<int64_t>(kLanes, part.num_outputs - output);
    column += output;
    const uint8_t* weights = part.panels + panel * part.panel_bytes;
    const uint8_t* ahead = weights + ceil_div(kAheadBytes, part.panel_bytes) * part.panel_bytes;
    // To take codes of 4 bits apart costs as much as an eighth of a product; with many rows it is done once for all.
    const bool is_spread = kSpreads && part.bits == 4 && last_tile - first_tile >= kSpreadTiles;
    uint8_t* const spread_codes = is_spread ? scratch<2>(num_blocks_ * kSpreadBytes) : nullptr;
    if (is_spread) spread(weights, num_blocks_, spread_codes);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const Held held = is_spread && height(tile) == kTile ? kSpread : kKept;
      Floats results[kTile];
      choose(part, height(tile), held)(part, weights, held == kSpread ? spread_codes : weights, ahead, tile_at(tile),
                                       num_blocks_, results);
      ahead = nullptr;
      const int64_t row = tile * kTile;
      put(results, std::min<int64_t>(kTile, num_rows_ - row), width, matrix_.bias ? matrix_.bias + column : nullptr,
          add_, out_ + row * out_stride_ + column, out_stride_);
    }
  }

  const Matrix& matrix_;
  const Inputs& in_;
  const int64_t num_rows_, num_blocks_, num_tiles_;
  const int last_height_;
  const int64_t tile_bytes_;
  uint8_t* const tiles_;
  float* const out_;
  const int64_t out_stride_;
  const bool add_;
};

}  // namespace

// out (rows, outputs) = or, with `add`, += W p(x) + bias. x (rows, K), or (rows, 2 K) for the gates.
extern "C" void edge_linear(const Matrix* matrix, const float* x, int64_t x_stride, int64_t num_rows, int32_t prologue,
                            const float* norm, float eps, float* out, int64_t out_stride, int32_t add,
                            int32_t num_threads) {
  const Inputs in{x, x_stride, prologue, norm, eps};
  if (num_rows > 0) Call(*matrix, in, num_rows, out, out_stride, add != 0).run(num_threads);
}

// out (rows, n) = x / rms(x) * weight, both contiguous.
extern "C" void edge_rms_norm(const float* x, int64_t num_rows, int64_t n, const float* weight, float eps, float* out,
                              int32_t num_threads) {
  const int64_t rows_per_task = std::max<int64_t>(1, 8192 / n);
  edge::parallel(num_threads, ceil_div(num_rows, rows_per_task), [&](int64_t task) {
    for (int64_t row = task * rows_per_task; row < std::min(num_rows, (task + 1) * rows_per_task); ++row) {
      const float* from = x + row * n;
      float* to = out + row * n;
      const float factor = inverse_rms(from, n, eps);
      for (int64_t k = 0; k < n; ++k) to[k] = from[k] * factor * weight[k];
    }
  });
}
