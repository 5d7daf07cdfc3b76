// What the linears share: the constants they are made from, and the division of a call's work.
#pragma once

#include <algorithm>
#include <cstring>

#include "weights.h"

constexpr int kBlock = 32;  // inputs are padded to whole blocks
constexpr int kVectors = kColumns / kLanes;
constexpr int kTile = 5;       // rows whose sums stay in sixteen registers
constexpr int kWideTile = 10;  // and in thirty-two

inline int Blocks(int64_t inputs) { return static_cast<int>((inputs + kBlock - 1) / kBlock); }

#define SSDEVICE_UNROLL _Pragma("GCC unroll 10")

#ifdef SSDEVICE_VNNI
#define SSDEVICE_TARGET_VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))
static_assert(kColumns == 16, "the columns of a group are the floats of 512 bits");
inline const bool kVnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vnni");
#else
constexpr bool kVnni = false;
#endif

#ifdef SSDEVICE_DOT
constexpr int kQuarters = kColumns / 4;  // vectors of four columns
#ifdef __ARM_FEATURE_DOTPROD
#define SSDEVICE_TARGET_DOT
constexpr bool kDot = true;
#else
#define SSDEVICE_TARGET_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
inline const bool kDot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif

// Four codes of a row, for each of four columns.
SSDEVICE_TARGET_DOT inline int8x16_t Four(const int8_t* codes) {
  return vreinterpretq_s8_s32(vdupq_n_s32(Word(codes)));
}
#else
constexpr bool kDot = false;
#endif

// Keeps a sum in its register, and a compiler from computing all products first and spilling the
// sums.
#ifdef SSDEVICE_DOT
SSDEVICE_TARGET_DOT inline void InOrder(int32x4_t& sum) { asm volatile("" : "+w"(sum)); }
#endif
#ifdef SSDEVICE_AVX2
__attribute__((target("avx2"), always_inline)) inline void InOrder(__m256i& sum) {
  asm volatile("" : "+x"(sum));
}
#endif

// Asks for bytes. Kernels ask for those kAhead later: a processor's own guesses end with a page.
// One row is a sixth faster. On AMD's processors weights are kept out of the large caches (NTA),
// which activations and the host need: on Zen 4 a step of SmolLM2 is 5 % faster and the host 10 %.
// Intel's read them twice as fast into L2 (T1), from further ahead.
#ifdef SSDEVICE_AVX2
inline const bool kIntel = __builtin_cpu_is("intel");
#else
constexpr bool kIntel = false;
#endif
inline const size_t kAhead = kIntel ? 4096 : 1024;
inline void Prefetch([[maybe_unused]] const uint8_t* bytes, [[maybe_unused]] size_t count) {
#ifdef SSDEVICE_AVX2
  for (size_t at = 0; at < count; at += kLine) {
    const auto* line = reinterpret_cast<const char*>(bytes + at);
    kIntel ? _mm_prefetch(line, _MM_HINT_T1) : _mm_prefetch(line, _MM_HINT_NTA);
  }
#endif
}

// Kernels that have the registers multiply so many groups at once: one processor reads 11 instead
// of 10 GB/s in two places.
constexpr int kStreams = 2;

// Some quantized rows, from row ``first`` of ``count`` on, with the weights of one group of
// columns, or of several.
template <typename Rows>
struct TileOf {
  const uint8_t* weights[kStreams];
  int blocks;
  const Rows& rows;
  int64_t first, count;

  // The rows' parts in a block, side by side: kernels find all of them by one address.
  const typename Rows::Part* At(int block) const {
    return rows.parts.data() + block * count + first;
  }
};

template <typename Rows>
using ProductOf = void (*)(const TileOf<Rows>&, float (*out)[kColumns]);

// How a kind of processor multiplies 1, 2 .. ``tile`` rows with ``streams`` groups; its products
// are those of the first group first.
template <typename Rows>
struct ProductsOf {
  const ProductOf<Rows>* of;
  int64_t tile;
  int64_t streams = 1;
};

// Into how many parts of neighbouring groups of columns a call's work is cut.
inline int64_t PartsOf(int64_t groups) { return std::clamp<int64_t>(groups / 2, 1, 32); }

// Multiplies all rows with the groups of a part, tile by tile, and calls take(row, group, products,
// columns): how many of kColumns there are. Groups that are multiplied at once are far apart, in
// streams: whoever takes parts in order reads each in order.
template <typename Rows, typename Take>
void EachProduct(const Weights& weights, int64_t part, const Rows& rows, ProductsOf<Rows> products,
                 int64_t count, Take take) {
  const int64_t groups = weights.Groups();
  const int64_t parts = PartsOf(groups);
  const int64_t stream = (groups + products.streams - 1) / products.streams;
  const int64_t tiles = (count + products.tile - 1) / products.tile;
  TileOf<Rows> t{{}, Blocks(weights.inputs), rows, 0, count};
  float out[kStreams * kWideTile][kColumns];
  for (int64_t group = stream * part / parts; group < stream * (part + 1) / parts; ++group) {
    for (int i = 0; i < kStreams; ++i)
      t.weights[i] = weights.Group(group + i * stream < groups ? group + i * stream : group);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      t.first = count * tile / tiles;
      const int64_t size = count * (tile + 1) / tiles - t.first;
      products.of[size - 1](t, out);
      for (int64_t g = group, i = 0; g < groups && i < products.streams; g += stream, ++i)
        for (int64_t r = 0; r < size; ++r)
          take(t.first + r, g, out[i * size + r],
               std::min<int64_t>(kColumns, weights.outputs - g * kColumns));
    }
  }
}

// The two constants of a linear, inputs 1 and 2.
struct Constants {
  Tensor codes, scales;

  explicit Constants(const Info& info) : codes(info.Constant(1)), scales(info.Constant(2)) {
    Require(codes.data && scales.data, "its weights are no constants");
  }
};

// How many rows [.., K] there are for such weights, whose blocks they fill.
inline int64_t RowsFor(const Weights& weights, const Shape& x) {
  Require(x.Last() <= kMostInputs && Blocks(x.Last()) == Blocks(weights.inputs),
          "the rows have another width than the weights");
  const int64_t count = x.Rows();
  Times(count, count);  // tiles are found by such products
  return count;
}

// Rows [.., K] times the weights, of which ``Rows`` has what Quantize makes of them.
template <typename Rows>
void Multiply(const Weights& weights, Context& context, ProductsOf<Rows> products) {
  const Tensor x = context.Input(0);
  const int64_t count = RowsFor(weights, x.shape);
  float* y = context.Output<float>(0, x.shape.WithLast(weights.outputs));
  if (count == 0) return;
  thread_local Rows room;
  Rows& rows = room;  // that of this thread, for all that work on it
  Quantize(context, x.As<float>(), count, x.shape.Last(), &rows);
  context.Each(PartsOf(weights.Groups()), [&](int64_t part) {
    EachProduct(weights, part, rows, products, count,
                [&](int64_t r, int64_t g, const float* out, int64_t columns) {
                  std::copy(out, out + columns, y + r * weights.outputs + g * kColumns);
                });
  });
}
