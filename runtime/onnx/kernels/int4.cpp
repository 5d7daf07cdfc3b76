// Products of few rows with quantized weights: what verifying a draft tree needs. The weights are read once for all
// rows, and every row is computed in the same way however many there are, so its bits do not depend on the others.
//
// Int4Linear(x [.., R, K] float, codes [N, K / 32, 16] uint8, scales [N, K / 32] float) -> [.., R, N] float: the operands of
// com.microsoft::MatMulNBits with bits = 4 and block_size = 32, zero at code 8. Per row r and block b of 32 inputs:
//   a[r, b] = max |x| / 127,  q = round to even(x * (127 / max |x|)),  d[r, n, b] = sum of q * (code - 8), an integer
//   y[r, n] = sum over b, in order, of d * (scales[n, b] * a[r, b]), every operation rounded to float
// Kernels for different CPUs only differ in how they compute d, so all give the same bits.

#include <cmath>
#include <cstring>

#include "int4.h"

namespace {

constexpr float kLeast = 1e-35f;  // rows below are zeros: 127 / kLeast is still a number

using Rows = BlockRows;

// ---- Weights -----------------------------------------------------------------------------------------------------------

// What a scale's upper half leaves out.
uint32_t LowerHalf(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  return bits & 0xFFFF;
}

Scales ScalesOf(const float* scales, int64_t count) {
  return std::all_of(scales, scales + count, [](float scale) { return LowerHalf(scale) == 0; }) ? Scales::kShort : Scales::kWhole;
}

Weights Packed(int64_t outputs, int64_t inputs, const uint8_t* codes, const float* scales, Scales kind) {
  const int blocks = Blocks(inputs);
  Weights made(kind == Scales::kShort ? "Int4Linear, short" : "Int4Linear", outputs, inputs, UnitsOf(inputs, kind));
  const size_t bytes = static_cast<size_t>(kind) / kColumns;
  for (int64_t n = 0; n < outputs; ++n) {
    const int c = static_cast<int>(n % kColumns);
    uint8_t* group = made.Group(n / kColumns);
    for (int b = 0; b < blocks; ++b) {
      uint8_t* block = group + CodesAt(b, kind);
      const uint8_t* from = codes + (n * blocks + b) * 16;  // two inputs a byte, the first in the low half
      for (int k = 0; k < 16; ++k) {
        const uint8_t low = from[k / 2] >> (4 * (k % 2)) & 15;
        const uint8_t high = from[8 + k / 2] >> (4 * (k % 2)) & 15;
        block[ByteAt(k, c)] = static_cast<uint8_t>(low | high << 4);
      }
      uint32_t bits;
      std::memcpy(&bits, scales + n * blocks + b, 4);
      if (kind == Scales::kShort) bits >>= 16;
      std::memcpy(group + ScalesAt(b, kind) + bytes * static_cast<size_t>(c), &bits, bytes);
    }
  }
  return made;
}

// ---- Rows ------------------------------------------------------------------------------------------------------------

void QuantizeBlock(const float* x, int count, Rows::Part* out) {
  float peak = 0;
  for (int k = 0; k < count; ++k) peak = std::max(peak, std::fabs(x[k]));
  const float inverse = peak > kLeast ? 127.0f / peak : 0.0f;
  int32_t sum = 0;
  for (int k = 0; k < kBlock; ++k) {
    out->codes[k] = k < count ? static_cast<int8_t>(std::nearbyint(x[k] * inverse)) : 0;
    sum += out->codes[k];
  }
  out->scale = peak * (1.0f / 127.0f);
  out->zero = -kZero * sum;
}

#ifdef SSDEVICE_AVX2
__attribute__((target("avx2"))) void QuantizeBlockAvx2(const float* x, Rows::Part* out) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 v[4], most = _mm256_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v[i]));
  }
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  half = _mm_max_ss(half, _mm_movehdup_ps(half));
  const float peak = _mm_cvtss_f32(half);
  const __m256 inverse = _mm256_set1_ps(peak > kLeast ? 127.0f / peak : 0.0f);
  __m256i q[4];
  for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  const __m256i total = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1));
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->codes), _mm256_permutevar8x32_epi32(bytes, order));
  out->scale = peak * (1.0f / 127.0f);
  out->zero = -kZero * _mm_cvtsi128_si32(sum);
}
#endif

void QuantizeRow(const float* x, int64_t inputs, int64_t stride, Rows::Part* to) {
  for (int64_t at = 0; at < inputs; at += kBlock, to += stride) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, inputs - at));
#ifdef SSDEVICE_AVX2
    if (kAvx2 && count == kBlock) {
      QuantizeBlockAvx2(x + at, to);
      continue;
    }
#endif
    QuantizeBlock(x + at, count, to);
  }
}

// ---- The operator ------------------------------------------------------------------------------------------------------

class Int4 : public Kernel {
 public:
  explicit Int4(const Info& info) {
    const auto [codes, scales] = Constants(info);
    const Shape& sizes = codes.shape;
    Require(sizes.Rank() == 3 && sizes[2] == kBlock / 2 && scales.shape.Count() == sizes[0] * sizes[1],
            "expected codes [N, K / 32, 16] and scales [N, K / 32]");
    kind_ = ScalesOf(scales.As<float>(), scales.shape.Count());
    weights_ = Shared(Packed(sizes[0], sizes[1] * kBlock, codes.As<uint8_t>(), scales.As<float>(), kind_));
  }

  void Compute(Context& context) const override { Multiply(*weights_, context, Int4Products(kind_)); }

 private:
  Scales kind_;
  std::shared_ptr<const Weights> weights_;
};

}  // namespace

void BlockRows::Fill(Context& context, const float* x, int64_t count, int64_t inputs) {
  parts.resize(static_cast<size_t>(count) * Blocks(inputs));
  context.EachRow(count, inputs, [=](int64_t row) { QuantizeRow(x + row * inputs, inputs, count, parts.data() + row); });
}

Operator Int4Linear() { return {"Int4Linear", Make<Int4>, {Type::kFloat, Type::kUint8, Type::kFloat}}; }
