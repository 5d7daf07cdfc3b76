// Rows in eight bits with one scale each: what products with weights of eight bits take.
#pragma once

#include <cmath>
#include <type_traits>

#include "linears.h"

constexpr float kLevel = 1.0f / 127.0f;
constexpr int kShift = 128;                               // makes a row's codes unsigned
constexpr int64_t kMostSummed = INT32_MAX / (128 * 128);  // products of two codes, in 32 bits

// Rows in eight bits: [blocks, R, 32] codes, as integers of a type, and a scale for each row.
template <typename Code>
struct RowsAs {
  struct Part {
    Code codes[kBlock];
  };
  std::vector<Part> parts;
  std::vector<float> scales;
};

template <typename Code>
void QuantizeBlock(const float* x, int count, float scale, Code* codes) {
  constexpr int shift = std::is_unsigned_v<Code> ? kShift : 0;
  std::fill(codes, codes + kBlock, static_cast<Code>(shift));
  for (int k = 0; k < count; ++k) {
    const float q = x[k] / scale;  // no number if all are 0; then the scale makes the product 0
    codes[k] = static_cast<Code>(
        static_cast<int>(std::nearbyint(q > -128.0f ? (q < 127.0f ? q : 127.0f) : -128.0f)) +
        shift);
  }
}

inline float PeakOf(const float* x, int64_t count) {
  float peak = 0;
  for (int64_t k = 0; k < count; ++k) peak = std::max(peak, std::fabs(x[k]));
  return peak;
}

#ifdef SSDEVICE_EIGHT
SSDEVICE_EACH float PeakEight(const float* x, int64_t count) {
  Eight most = All(0.0f);
  for (int64_t k = 0; k < count; k += kLanes) most = Max(most, Abs(Load(x + k)));
  return Largest(most);
}

template <typename Code>
SSDEVICE_EIGHT void QuantizeEight(const float* x, float scale, Code* codes) {
  const Eight divisor = All(scale);
  const Eight least = All(-128.0f);
  const Eight most = All(127.0f);
  EightInts q[4];
  for (int i = 0; i < 4; ++i)
    q[i] = Nearest(Min(Max(Div(Load(x + kLanes * i), divisor), least), most));
  Store(q, codes);
}
#endif

// Fills ``parts`` and ``scales`` from [count, inputs] floats.
template <typename Rows>
void Quantize(Context& context, const float* all, int64_t count, int64_t inputs, Rows* out) {
  out->parts.resize(static_cast<size_t>(count) * Blocks(inputs));
  out->scales.resize(static_cast<size_t>(count));
  context.EachRow(count, inputs, [=](int64_t row) {
    const float* x = all + row * inputs;
    int64_t done = 0;
    float peak = 0;
#ifdef SSDEVICE_EIGHT
    if (kEight) {
      done = inputs / kLanes * kLanes;
      peak = PeakEight(x, done);
    }
#endif
    const float scale = out->scales[static_cast<size_t>(row)] =
        std::max(peak, PeakOf(x + done, inputs - done)) * kLevel;
    auto* part = out->parts.data() + row;
    for (int64_t at = 0; at < inputs; at += kBlock, part += count) {
      const int full = static_cast<int>(std::min<int64_t>(kBlock, inputs - at));
#ifdef SSDEVICE_EIGHT
      if (kEight && full == kBlock) {
        QuantizeEight(x + at, scale, part->codes);
        continue;
      }
#endif
      QuantizeBlock(x + at, full, scale, part->codes);
    }
  });
}

// Constants [K, N] int8 and [N] float.
struct Columned {
  int64_t inputs, outputs;
  const int8_t* codes;
  const float* scales;

  explicit Columned(const Info& info) {
    const auto [values, factors] = Constants(info);
    const Shape& sizes = values.shape;
    Require(sizes.Rank() == 2 && factors.shape == Shape{sizes[1]},
            "expected codes [K, N] and scales [N]");
    Require(sizes[0] <= kMostSummed, "its rows are too wide");
    inputs = sizes[0];
    outputs = sizes[1];
    codes = values.As<int8_t>();
    scales = factors.As<float>();
  }
};

// Calls pack(k, n, codes) for every block of inputs, which begins with k, and column n: with the 32
// codes of [K, N] there, zeros past the end. They are copied a cache line at a time: lines of a
// column are many pages apart and drive each other out of a cache.
template <typename Pack>
void EachBlock(const int8_t* codes, int64_t inputs, int64_t outputs, Pack pack) {
  constexpr int64_t kWide = kLine;
  int8_t rows[kBlock][kWide], column[kBlock];
  for (int64_t first = 0; first < outputs; first += kWide) {
    const int64_t columns = std::min(kWide, outputs - first);
    for (int64_t k = 0; k < inputs; k += kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) {
        if (k + i < inputs) std::copy_n(codes + (k + i) * outputs + first, columns, rows[i]);
        if (k + i >= inputs) std::fill_n(rows[i], kWide, 0);
      }
      for (int64_t n = 0; n < columns; ++n) {
        for (int i = 0; i < kBlock; ++i) column[i] = rows[i][n];
        pack(k, first + n, column);
      }
    }
  }
}

// Input 0, ids [..] int32, to output 0, [.., K] float: write(id, y) writes the K numbers of an id.
template <typename Write>
void LookUp(Context& context, const Weights& weights, Write write) {
  const Tensor ids = context.Input(0);
  Shape shape = ids.shape;
  shape.Append(weights.inputs);
  float* y = context.Output<float>(0, shape);
  for (int64_t i = 0; i < ids.shape.Count(); ++i) {
    const int32_t id = ids.As<int32_t>()[i];
    Require(0 <= id && id < weights.outputs, "an id is none of the vocabulary");
    write(static_cast<int64_t>(id), y + i * weights.inputs);
  }
}
