// Int8Linear(x [.., R, K] float, codes [K, N] int8, scales [N] float, zero uint8) -> [.., R, N]
// float. ``zero`` is for the standard operators alone, which quantize rows to uint8. Per row r:
//   a[r] = max |x| * (1 / 127),  q = round to even(x / a[r]),  d[r, n] = sum of q * codes[., n], an
//   integer y[r, n] = d * scales[n] * a[r], from left to right, every operation rounded to float
// These are the bits of the standard operators, wherever their products of integers are exact.
//
// Int8Embedding(ids [..] int32, codes [K, N] int8, scales [N]) -> [.., K] float: codes[., id] *
// scales[id]. A head that is tied to the embedding has the same weights, which are in memory once.

#include "int8.h"

namespace {

constexpr size_t kUnit = kBlock * kColumns;  // bytes of a block of a group

// Inputs of a column that lie side by side: what an instruction multiplies and adds at once.
int Side() { return kVnni || kDot ? 4 : 2; }

// Where in a group the weight of input ``k`` and column ``c`` lies.
size_t At(int64_t k, int64_t c) {
  const int side = Side();
  return static_cast<size_t>(k / side * side * kColumns + side * c + k % side);
}

// For each group of columns its weights, then the scales, then what kShift in every code of a row
// adds to the sums.
Weights Packed(int64_t inputs, int64_t outputs, const int8_t* codes, const float* scales) {
  const size_t scales_at = kUnit * static_cast<size_t>(Blocks(inputs));
  const size_t shifts_at = scales_at + 4 * kColumns;
  Weights made("Int8Linear", outputs, inputs, shifts_at + 4 * kColumns);
  std::vector<int32_t> shifts(static_cast<size_t>(outputs));
  size_t places[kBlock];
  for (int k = 0; k < kBlock; ++k) places[k] = At(k, 0);
  EachBlock(codes, inputs, outputs, [&](int64_t first, int64_t n, const int8_t* block) {
    uint8_t* unit = made.Group(n / kColumns) + At(first, n % kColumns);
    int32_t sum = 0;
    for (int k = 0; k < kBlock; ++k) {
      unit[places[k]] = static_cast<uint8_t>(block[k]);
      sum += block[k];
    }
    shifts[static_cast<size_t>(n)] += kShift * sum;
  });
  for (int64_t n = 0; n < outputs; ++n) {
    const size_t column = 4 * static_cast<size_t>(n % kColumns);
    std::memcpy(made.Group(n / kColumns) + scales_at + column, scales + n, 4);
    std::memcpy(made.Group(n / kColumns) + shifts_at + column, &shifts[static_cast<size_t>(n)], 4);
  }
  return made;
}

using Rows = RowsAs<int16_t>;
using ShiftedRows = RowsAs<uint8_t>;
using ByteRows = RowsAs<int8_t>;

#ifdef SSDEVICE_AVX2
template <int R>
SSDEVICE_TARGET_AVX2 void Avx2(const TileOf<Rows>& t, float (*out)[kColumns]) {
  __m256i sums[R][kVectors] = {};
  const uint8_t* unit = t.weights[0];
  for (int b = 0; b < t.blocks; ++b, unit += kUnit) {
    Prefetch(unit + kAhead, kUnit);
    const Rows::Part* rows = t.At(b);
#pragma GCC unroll 4
    for (int i = 0; i < kBlock / 2; ++i) {
      __m256i w[kVectors];
      SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) w[v] = _mm256_cvtepi8_epi16(_mm_load_si128(
          reinterpret_cast<const __m128i*>(unit + 2 * kColumns * i + 2 * kLanes * v)));
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        const int32_t two = Word(rows[r].codes + 2 * i);
        SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
          sums[r][v] =
              _mm256_add_epi32(sums[r][v], _mm256_madd_epi16(w[v], _mm256_set1_epi32(two)));
          InOrder(sums[r][v]);
        }
      }
    }
  }
  SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
    const __m256 scales = _mm256_load_ps(reinterpret_cast<const float*>(unit) + kLanes * v);
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
      const __m256 y = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][v]), scales);
      _mm256_storeu_ps(
          out[r] + kLanes * v,
          _mm256_mul_ps(y, _mm256_set1_ps(t.rows.scales[static_cast<size_t>(t.first + r)])));
    }
  }
}

#ifdef SSDEVICE_VNNI
template <int R>
SSDEVICE_TARGET_VNNI void Vnni(const TileOf<ShiftedRows>& t, float (*out)[kColumns]) {
  __m512i sums[kStreams][R] = {};
  size_t at = 0;
  for (int b = 0; b < t.blocks; ++b, at += kUnit) {
    SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) Prefetch(t.weights[s] + at + kAhead, kUnit);
    const ShiftedRows::Part* rows = t.At(b);
    SSDEVICE_UNROLL for (int i = 0; i < kBlock / 4; ++i) {
      __m512i w[kStreams];
      SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) w[s] =
          _mm512_load_si512(t.weights[s] + at + 4 * kColumns * i);
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        const __m512i four = _mm512_set1_epi32(Word(rows[r].codes + 4 * i));
        SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) sums[s][r] =
            _mm512_dpbusd_epi32(sums[s][r], four, w[s]);
      }
    }
  }
  SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) {
    const __m512 scales = _mm512_load_ps(t.weights[s] + at);
    const __m512i shifts = _mm512_load_si512(t.weights[s] + at + 4 * kColumns);
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
      const __m512 y =
          _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[s][r], shifts)), scales);
      _mm512_storeu_ps(
          out[s * R + r],
          _mm512_mul_ps(y, _mm512_set1_ps(t.rows.scales[static_cast<size_t>(t.first + r)])));
    }
  }
}

constexpr ProductOf<ShiftedRows> kVnniProducts[] = {Vnni<1>, Vnni<2>, Vnni<3>, Vnni<4>, Vnni<5>,
                                                    Vnni<6>, Vnni<7>, Vnni<8>, Vnni<9>, Vnni<10>};
#endif

constexpr ProductOf<Rows> kAvx2Products[] = {Avx2<1>, Avx2<2>, Avx2<3>, Avx2<4>, Avx2<5>};
#endif

#ifdef SSDEVICE_DOT
template <int R>
SSDEVICE_TARGET_DOT void Dot(const TileOf<ByteRows>& t, float (*out)[kColumns]) {
  int32x4_t sums[R][kQuarters] = {};
  const uint8_t* unit = t.weights[0];
  for (int b = 0; b < t.blocks; ++b) {
    const ByteRows::Part* rows = t.At(b);
    for (int i = 0; i < kBlock / 4; ++i, unit += 4 * kColumns) {
      int8x16_t w[kQuarters];
      SSDEVICE_UNROLL for (int v = 0; v < kQuarters; ++v) w[v] =
          vreinterpretq_s8_u8(vld1q_u8(unit + 16 * v));
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        const int8x16_t four = Four(rows[r].codes + 4 * i);
        SSDEVICE_UNROLL for (int v = 0; v < kQuarters; ++v) {
          sums[r][v] = vdotq_s32(sums[r][v], w[v], four);
          InOrder(sums[r][v]);
        }
      }
    }
  }
  SSDEVICE_UNROLL for (int v = 0; v < kQuarters; ++v) {
    const float32x4_t scales = vld1q_f32(reinterpret_cast<const float*>(unit) + 4 * v);
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
      const float32x4_t y = vmulq_f32(vcvtq_f32_s32(sums[r][v]), scales);
      vst1q_f32(out[r] + 4 * v,
                vmulq_f32(y, vdupq_n_f32(t.rows.scales[static_cast<size_t>(t.first + r)])));
    }
  }
}

constexpr ProductOf<ByteRows> kDotProducts[] = {Dot<1>, Dot<2>, Dot<3>, Dot<4>, Dot<5>};
#endif

template <int R>
void Portable(const TileOf<Rows>& t, float (*out)[kColumns]) {
  int32_t sums[R][kColumns] = {};
  const uint8_t* unit = t.weights[0];
  for (int b = 0; b < t.blocks; ++b) {
    for (int i = 0; i < kBlock / 2; ++i, unit += 2 * kColumns) {
      for (int r = 0; r < R; ++r) {
        const int16_t* q = t.At(b)[r].codes + 2 * i;
        for (int c = 0; c < kColumns; ++c)
          sums[r][c] +=
              q[0] * static_cast<int8_t>(unit[2 * c]) + q[1] * static_cast<int8_t>(unit[2 * c + 1]);
      }
    }
  }
  float scales[kColumns];
  std::memcpy(scales, unit, sizeof scales);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kColumns; ++c)
      out[r][c] = static_cast<float>(sums[r][c]) * scales[c] *
                  t.rows.scales[static_cast<size_t>(t.first + r)];
}

constexpr ProductOf<Rows> kPortableProducts[] = {Portable<1>, Portable<2>, Portable<3>, Portable<4>,
                                                 Portable<5>};

class Int8 : public Kernel {
 public:
  explicit Int8(const Info& info) {
    const Columned given(info);
    weights_ = Shared(Packed(given.inputs, given.outputs, given.codes, given.scales));
  }

  void Compute(Context& context) const override {
#ifdef SSDEVICE_VNNI
    if (kVnni)
      return Multiply<ShiftedRows>(*weights_, context, {kVnniProducts, kWideTile, kStreams});
#endif
#ifdef SSDEVICE_DOT
    if (kDot) return Multiply<ByteRows>(*weights_, context, {kDotProducts, kTile});
#endif
#ifdef SSDEVICE_AVX2
    if (kAvx2) return Multiply<Rows>(*weights_, context, {kAvx2Products, kTile});
#endif
    Multiply<Rows>(*weights_, context, {kPortableProducts, kTile});
  }

 protected:
  std::shared_ptr<const Weights> weights_;
};

class Embedding : public Int8 {
 public:
  using Int8::Int8;

  void Compute(Context& context) const override {
    const Weights& weights = *weights_;
    LookUp(context, weights, [&](int64_t id, float* y) {
      const uint8_t* group = weights.Group(id / kColumns);
      const int64_t column = id % kColumns;
      const auto scale = Word<float>(group + kUnit * static_cast<size_t>(Blocks(weights.inputs)) +
                                     static_cast<size_t>(4 * column));
      for (int64_t k = 0; k < weights.inputs; ++k)
        y[k] = static_cast<int8_t>(group[At(k, column)]) * scale;
    });
  }
};

}  // namespace

Operator Int8Linear() {
  return {"Int8Linear", Make<Int8>, {Type::kFloat, Type::kInt8, Type::kFloat, Type::kUint8}};
}
Operator Int8Embedding() {
  return {"Int8Embedding", Make<Embedding>, {Type::kInt32, Type::kInt8, Type::kFloat}};
}
