// Int8Linear(x [.., R, K] float, codes [K, N] int8, scales [N] float, zero uint8) -> [.., R, N] float. ``zero`` is for the
// standard operators alone, which quantize rows to uint8. Per row r:
//   a[r] = max |x| * (1 / 127),  q = round to even(x / a[r]),  d[r, n] = sum of q * codes[., n], an integer
//   y[r, n] = d * scales[n] * a[r], from left to right, every operation rounded to float
// These are the bits of the standard operators, wherever their products of integers are exact.
//
// Int8Embedding(ids [..] int32, codes [K, N] int8, scales [N]) -> [.., K] float: codes[., id] * scales[id]. A head that is tied to the
// embedding has the same weights, which are in memory once.

#include <cmath>
#include <cstring>

#include "linears.h"

namespace {

constexpr float kLevel = 1.0f / 127.0f;
constexpr int kPairs = kBlock / 2;
constexpr size_t kUnit = kBlock * kColumns;  // bytes of a block of a group

// For each group of columns: by block 16 times 2 * kColumns bytes, of which byte 2 * c + j of item i is input 2 * i + j of
// column c; then the scales.
Weights Packed(int64_t inputs, int64_t outputs, const int8_t* codes, const float* scales) {
  Weights made("Int8Linear", outputs, inputs, kUnit * static_cast<size_t>(Blocks(inputs)) + 4 * kColumns);
  for (int64_t k = 0; k < inputs; ++k) {
    const size_t at = 2 * kColumns * static_cast<size_t>(k / 2) + static_cast<size_t>(k % 2);
    for (int64_t n = 0; n < outputs; ++n)
      made.Group(n / kColumns)[at + 2 * static_cast<size_t>(n % kColumns)] = static_cast<uint8_t>(codes[k * outputs + n]);
  }
  for (int64_t n = 0; n < outputs; ++n)
    std::memcpy(made.Group(n / kColumns) + made.bytes - 4 * kColumns + 4 * (n % kColumns), scales + n, 4);
  return made;
}

// Rows in eight bits, each code in sixteen: [R, blocks * 32], and a scale for each row.
struct Rows {
  std::vector<int16_t> codes;
  std::vector<float> scales;
};
using Tile = TileOf<Rows>;

void QuantizeRow(const float* x, int64_t from, int64_t to, float scale, int16_t* codes) {
  for (int64_t k = from; k < to; ++k) {
    const float q = x[k] / scale;  // no number if all are 0; then the scale makes the product 0
    codes[k] = static_cast<int16_t>(std::nearbyint(q > -128.0f ? (q < 127.0f ? q : 127.0f) : -128.0f));
  }
}

float PeakOf(const float* x, int64_t count) {
  float peak = 0;
  for (int64_t k = 0; k < count; ++k) peak = std::max(peak, std::fabs(x[k]));
  return peak;
}

#ifdef SSDEVICE_AVX2
#define SSDEVICE_TARGET __attribute__((target("avx2")))

SSDEVICE_TARGET float PeakAvx2(const float* x, int64_t count) {
  __m256 most = _mm256_setzero_ps();
  for (int64_t k = 0; k < count; k += 8)
    most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x + k)));
  float lanes[8];
  _mm256_storeu_ps(lanes, most);
  return *std::max_element(lanes, lanes + 8);
}

SSDEVICE_TARGET void QuantizeRowAvx2(const float* x, int64_t count, float scale, int16_t* codes) {
  const __m256 divisor = _mm256_set1_ps(scale), least = _mm256_set1_ps(-128.0f), most = _mm256_set1_ps(127.0f);
  for (int64_t k = 0; k < count; k += 16) {
    __m256i q[2];
    for (int i = 0; i < 2; ++i) {
      const __m256 value = _mm256_div_ps(_mm256_loadu_ps(x + k + 8 * i), divisor);
      q[i] = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(value, least), most));
    }
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + k), both);
  }
}

template <int R>
SSDEVICE_TARGET void Avx2(const Tile& t, float (*out)[kColumns]) {
  __m256i sums[R][kVectors];
  SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
    SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm256_setzero_si256();
  const uint8_t* unit = t.weights;
  for (int b = 0; b < t.blocks; ++b, unit += kUnit) {
    Prefetch(unit, kUnit);
    const int16_t* codes[R];
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) codes[r] = t.rows.codes.data() + t.At(r, b) * kBlock;
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      __m256i w[kVectors];
      SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v)
        w[v] = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(unit + 2 * kColumns * i + 2 * kLanes * v)));
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, codes[r] + 2 * i, 4);
        SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(w[v], _mm256_set1_epi32(two)));
          InOrder(sums[r][v]);
        }
      }
    }
  }
  SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
    const __m256 scales = _mm256_load_ps(reinterpret_cast<const float*>(unit) + kLanes * v);
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
      const __m256 y = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][v]), scales);
      _mm256_storeu_ps(out[r] + kLanes * v, _mm256_mul_ps(y, _mm256_set1_ps(t.rows.scales[static_cast<size_t>(t.first + r)])));
    }
  }
}

const bool kAvx2 = __builtin_cpu_supports("avx2");
constexpr ProductOf<Rows> kAvx2Products[] = {Avx2<1>, Avx2<2>, Avx2<3>, Avx2<4>, Avx2<5>};
#endif

template <int R>
void Portable(const Tile& t, float (*out)[kColumns]) {
  int32_t sums[R][kColumns] = {};
  const uint8_t* unit = t.weights;
  for (int b = 0; b < t.blocks; ++b) {
    for (int i = 0; i < kPairs; ++i, unit += 2 * kColumns) {
      for (int r = 0; r < R; ++r) {
        const int16_t* q = t.rows.codes.data() + t.At(r, b) * kBlock + 2 * i;
        for (int c = 0; c < kColumns; ++c)
          sums[r][c] += q[0] * static_cast<int8_t>(unit[2 * c]) + q[1] * static_cast<int8_t>(unit[2 * c + 1]);
      }
    }
  }
  float scales[kColumns];
  std::memcpy(scales, unit, sizeof scales);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kColumns; ++c)
      out[r][c] = static_cast<float>(sums[r][c]) * scales[c] * t.rows.scales[static_cast<size_t>(t.first + r)];
}

constexpr ProductOf<Rows> kPortableProducts[] = {Portable<1>, Portable<2>, Portable<3>, Portable<4>, Portable<5>};

const ProductOf<Rows>* Products() {
#ifdef SSDEVICE_AVX2
  if (kAvx2) return kAvx2Products;
#endif
  return kPortableProducts;
}

void Quantize(const float* x, int64_t count, int64_t inputs, Rows* out) {
  const int64_t width = static_cast<int64_t>(Blocks(inputs)) * kBlock;
  out->codes.assign(static_cast<size_t>(count * width), 0);
  out->scales.resize(static_cast<size_t>(count));
  for (int64_t r = 0; r < count; ++r, x += inputs) {
    int16_t* codes = out->codes.data() + r * width;
    int64_t done = 0;
    float peak = 0;
#ifdef SSDEVICE_AVX2
    if (kAvx2) {
      done = inputs / 16 * 16;
      peak = PeakAvx2(x, done);
    }
#endif
    const float scale = out->scales[static_cast<size_t>(r)] = std::max(peak, PeakOf(x + done, inputs - done)) * kLevel;
#ifdef SSDEVICE_AVX2
    if (kAvx2) QuantizeRowAvx2(x, done, scale, codes);
#endif
    QuantizeRow(x, done, inputs, scale, codes);
  }
}

ort::Status* Create(const ort::CustomOp*, const void* const* table, const ort::KernelInfo* info, void** out) {
  const ort::Api api(table);
  return Guarded(api, [&] {
    const auto [codes, scales] = Constants(api, info);
    const auto sizes = SizesOf(api, codes), columns = SizesOf(api, scales);
    Require(api, sizes.size() == 2 && columns.size() == 1 && columns[0] == sizes[1], "expected codes [K, N] and scales [N]");
    *out = new Linear{api, Shared(Packed(sizes[0], sizes[1], DataOf<const int8_t>(api, codes), DataOf<const float>(api, scales)))};
  });
}

ort::Status* Compute(void* self, ort::KernelContext* context) {
  return Multiply<Rows>(*static_cast<const Linear*>(self), context, Quantize, Products());
}

ort::Status* Embed(void* self, ort::KernelContext* context) {
  const Linear& kernel = *static_cast<const Linear*>(self);
  const ort::Api& api = kernel.api;
  return Guarded(api, [&] {
    const Weights& weights = *kernel.weights;
    const ort::Value* input = InputOf(api, context, 0);
    auto sizes = SizesOf(api, input);
    const int64_t count = CountOf(sizes);
    sizes.push_back(weights.inputs);
    ort::Value* output = nullptr;
    Check(api.Output(context, 0, sizes.data(), sizes.size(), &output));
    const int32_t* ids = DataOf<const int32_t>(api, input);
    float* y = DataOf<float>(api, output);
    for (int64_t i = 0; i < count; ++i) {
      Require(api, 0 <= ids[i] && ids[i] < weights.outputs, "an id is none of the vocabulary");
      const uint8_t* group = weights.Group(ids[i] / kColumns);
      const size_t column = static_cast<size_t>(ids[i] % kColumns);
      float scale;
      std::memcpy(&scale, group + weights.bytes - 4 * kColumns + 4 * column, 4);
      for (int64_t k = 0; k < weights.inputs; ++k)
        *y++ = static_cast<int8_t>(group[2 * kColumns * static_cast<size_t>(k / 2) + 2 * column + static_cast<size_t>(k % 2)]) * scale;
    }
  });
}

}  // namespace

const ort::CustomOp* Int8Linear() {
  static const ort::CustomOp op = [] {
    ort::CustomOp made = Operator<ort::kFloat, ort::kInt8, ort::kFloat, ort::kUint8>(Create, Compute, Destroy<Linear>);
    made.GetName = [](const ort::CustomOp*) { return "Int8Linear"; };
    return made;
  }();
  return &op;
}

const ort::CustomOp* Int8Embedding() {
  static const ort::CustomOp op = [] {
    ort::CustomOp made = Operator<ort::kInt32, ort::kInt8, ort::kFloat>(Create, Embed, Destroy<Linear>);
    made.GetName = [](const ort::CustomOp*) { return "Int8Embedding"; };
    return made;
  }();
  return &op;
}
