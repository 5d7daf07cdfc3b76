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

#include "linears.h"

namespace {

constexpr int kZero = 8;  // the code of zero
constexpr float kLeast = 1e-35f;  // rows below are zeros: 127 / kLeast is still a number
constexpr size_t kCodes = kBlock / 2 * kColumns;  // bytes of the codes of a block of a group; its scales follow
constexpr size_t kUnit = kCodes + 4 * kColumns;

// ---- Weights: columns side by side, four inputs of a column in a row, so that sums need no shuffling -------------------

// For each group of columns and each block: 4 rows of 4 * kColumns bytes and the scales. Byte 4 * c + j of row i holds input
// 4 * i + j of column c in its low half and input 16 + 4 * i + j in its high half.
Weights Packed(int64_t outputs, int64_t inputs, const uint8_t* codes, const float* scales) {
  const int blocks = Blocks(inputs);
  Weights made("Int4Linear", outputs, inputs, kUnit * static_cast<size_t>(blocks));
  for (int64_t n = 0; n < outputs; ++n) {
    const int c = static_cast<int>(n % kColumns);
    for (int b = 0; b < blocks; ++b) {
      uint8_t* unit = made.Group(n / kColumns) + kUnit * static_cast<size_t>(b);
      const uint8_t* from = codes + (n * blocks + b) * 16;  // two inputs a byte, the first in the low half
      for (int k = 0; k < 16; ++k) {
        const uint8_t low = from[k / 2] >> (4 * (k % 2)) & 15;
        const uint8_t high = from[8 + k / 2] >> (4 * (k % 2)) & 15;
        unit[4 * kColumns * (k / 4) + 4 * c + k % 4] = static_cast<uint8_t>(low | high << 4);
      }
      std::memcpy(unit + kCodes + 4 * c, scales + n * blocks + b, 4);
    }
  }
  return made;
}

// ---- Rows ------------------------------------------------------------------------------------------------------------

// Rows in eight bits: [blocks, R], each with its codes, the scale, and the amount that the zero code takes from a product.
struct Rows {
  struct Part {
    int8_t codes[kBlock];
    float scale;
    int32_t zero;
  };
  std::vector<Part> parts;
};

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

// ---- Products: R rows with a group of columns ---------------------------------------------------------------------------

using Tile = TileOf<Rows>;

template <int R>
void Portable(const Tile& t, float (*out)[kColumns]) {
  for (int r = 0; r < R; ++r) std::fill(out[r], out[r] + kColumns, 0.0f);
  for (int b = 0; b < t.blocks; ++b) {
    const uint8_t* unit = t.weights + static_cast<size_t>(b) * kUnit;
    float scales[kColumns];
    std::memcpy(scales, unit + kCodes, sizeof scales);
    for (int r = 0; r < R; ++r) {
      const auto& [q, scale, zero] = t.At(b)[r];
      for (int c = 0; c < kColumns; ++c) {
        int32_t d = zero;
        for (int k = 0; k < 16; ++k) {
          const uint8_t both = unit[4 * kColumns * (k / 4) + 4 * c + k % 4];
          d += q[k] * (both & 15) + q[16 + k] * (both >> 4);
        }
        out[r][c] += static_cast<float>(d) * (scales[c] * scale);
      }
    }
  }
}

#ifdef SSDEVICE_AVX2
// Eight products of codes up to 15 with codes up to 127, two by two, add up to at most 30480: sixteen bits hold them. The sums
// of all rows and vectors stay in registers while weights are unpacked: with 5 rows and 2 vectors that takes all sixteen.
template <int R>
__attribute__((target("avx2"))) void Avx2(const Tile& t, float (*out)[kColumns]) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256 sums[R][kVectors];
  SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
    SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm256_setzero_ps();
  const uint8_t* unit = t.weights;
  for (int b = 0; b < t.blocks; ++b, unit += kUnit) {
    Prefetch(unit, kUnit);
    const Rows::Part* rows = t.At(b);
    __m256i pairs[R][kVectors];
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
      SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) pairs[r][v] = _mm256_setzero_si256();
    SSDEVICE_UNROLL for (int i = 0; i < 4; ++i) {
      SSDEVICE_UNROLL for (int half = 0; half < 2; ++half) {
        __m256i w[kVectors];
        SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
          const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(unit + 4 * kColumns * i + 32 * v));
          w[v] = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, low);
        }
        SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, rows[r].codes + 16 * half + 4 * i, 4);
          SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
            pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(w[v], _mm256_set1_epi32(four)));
            InOrder(pairs[r][v]);
          }
        }
      }
    }
    const float* scales = reinterpret_cast<const float*>(unit + kCodes);
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
      const __m256i zero = _mm256_set1_epi32(rows[r].zero);
      const __m256 scale = _mm256_set1_ps(rows[r].scale);
      SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
        const __m256 d = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(pairs[r][v], ones), zero));
        const __m256 both = _mm256_mul_ps(_mm256_load_ps(scales + kLanes * v), scale);
        sums[r][v] = _mm256_add_ps(sums[r][v], _mm256_mul_ps(d, both));
      }
    }
  }
  SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
    SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(out[r] + kLanes * v, sums[r][v]);
}

#ifdef SSDEVICE_VNNI
// A product of four codes with four is one instruction, and the sixteen sums of a row are one vector.
template <int R>
SSDEVICE_TARGET_VNNI void Vnni(const Tile& t, float (*out)[kColumns]) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sums[R];
  SSDEVICE_UNROLL for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  const uint8_t* unit = t.weights;
  for (int b = 0; b < t.blocks; ++b, unit += kUnit) {
    Prefetch(unit, kUnit);
    const Rows::Part* rows = t.At(b);
    __m512i d[R];
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) d[r] = _mm512_set1_epi32(rows[r].zero);
    SSDEVICE_UNROLL for (int i = 0; i < 4; ++i) {
      const __m512i both = _mm512_load_si512(unit + 4 * kColumns * i);
      SSDEVICE_UNROLL for (int half = 0; half < 2; ++half) {
        const __m512i w = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, low);
        SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, rows[r].codes + 16 * half + 4 * i, 4);
          d[r] = _mm512_dpbusd_epi32(d[r], w, _mm512_set1_epi32(four));
        }
      }
    }
    const __m512 scales = _mm512_load_ps(unit + kCodes);
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
      const __m512 both = _mm512_mul_ps(scales, _mm512_set1_ps(rows[r].scale));
      sums[r] = _mm512_add_ps(sums[r], _mm512_mul_ps(_mm512_cvtepi32_ps(d[r]), both));
    }
  }
  SSDEVICE_UNROLL for (int r = 0; r < R; ++r) _mm512_storeu_ps(out[r], sums[r]);
}

constexpr ProductOf<Rows> kVnniProducts[] = {Vnni<1>, Vnni<2>, Vnni<3>, Vnni<4>, Vnni<5>,
                                                    Vnni<6>, Vnni<7>, Vnni<8>, Vnni<9>, Vnni<10>};
#endif

const bool kAvx2 = __builtin_cpu_supports("avx2");
constexpr ProductOf<Rows> kAvx2Products[] = {Avx2<1>, Avx2<2>, Avx2<3>, Avx2<4>, Avx2<5>};
#endif

#ifdef SSDEVICE_DOT
// Two vectors of columns at a time: with five rows their sums and products are twenty of 32 registers.
template <int R>
SSDEVICE_TARGET_DOT void Dot(const Tile& t, float (*out)[kColumns]) {
  for (int first = 0; first < kQuarters; first += 2) {
    float32x4_t sums[R][2];
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
      SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) sums[r][v] = vdupq_n_f32(0);
    const uint8_t* unit = t.weights;
    for (int b = 0; b < t.blocks; ++b, unit += kUnit) {
      const Rows::Part* rows = t.At(b);
      int32x4_t d[R][2];
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
        SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) d[r][v] = vdupq_n_s32(rows[r].zero);
      SSDEVICE_UNROLL for (int i = 0; i < 4; ++i) {
        int8x16_t w[2][2];
        SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) {
          const uint8x16_t both = vld1q_u8(unit + 4 * kColumns * i + 16 * (first + v));
          w[0][v] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
          w[1][v] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
        SSDEVICE_UNROLL for (int half = 0; half < 2; ++half) {
          SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
            const int8x16_t four = Four(rows[r].codes + 16 * half + 4 * i);
            SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) {
              d[r][v] = vdotq_s32(d[r][v], w[half][v], four);
              InOrder(d[r][v]);
            }
          }
        }
      }
      const float* scales = reinterpret_cast<const float*>(unit + kCodes) + 4 * first;
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) {
          const float32x4_t both = vmulq_f32(vld1q_f32(scales + 4 * v), vdupq_n_f32(rows[r].scale));
          sums[r][v] = vaddq_f32(sums[r][v], vmulq_f32(vcvtq_f32_s32(d[r][v]), both));
        }
      }
    }
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
      SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) vst1q_f32(out[r] + 4 * (first + v), sums[r][v]);
  }
}

constexpr ProductOf<Rows> kDotProducts[] = {Dot<1>, Dot<2>, Dot<3>, Dot<4>, Dot<5>};
#endif

constexpr ProductOf<Rows> kPortableProducts[] = {Portable<1>, Portable<2>, Portable<3>, Portable<4>, Portable<5>};

ProductsOf<Rows> Products() {
#ifdef SSDEVICE_VNNI
  if (kVnni) return {kVnniProducts, kWideTile};
#endif
#ifdef SSDEVICE_AVX2
  if (kAvx2) return {kAvx2Products, kTile};
#endif
#ifdef SSDEVICE_DOT
  if (kDot) return {kDotProducts, kTile};
#endif
  return {kPortableProducts, kTile};
}

void Quantize(const float* x, int64_t rows, int64_t inputs, Rows* out) {
  const int blocks = Blocks(inputs);
  out->parts.resize(static_cast<size_t>(rows) * blocks);
  for (int64_t r = 0; r < rows; ++r) {
    for (int b = 0; b < blocks; ++b) {
      Rows::Part* to = &out->parts[static_cast<size_t>(b * rows + r)];
      const float* from = x + r * inputs + static_cast<int64_t>(b) * kBlock;
      const int count = static_cast<int>(std::min<int64_t>(kBlock, inputs - static_cast<int64_t>(b) * kBlock));
#ifdef SSDEVICE_AVX2
      if (kAvx2 && count == kBlock) {
        QuantizeBlockAvx2(from, to);
        continue;
      }
#endif
      QuantizeBlock(from, count, to);
    }
  }
}

// ---- The operator ------------------------------------------------------------------------------------------------------

ort::Status* Create(const ort::CustomOp*, const void* const* table, const ort::KernelInfo* info, void** out) {
  const ort::Api api(table);
  return Guarded(api, [&] {
    const auto [codes, scales] = Constants(api, info);
    const auto sizes = SizesOf(api, codes), scale_sizes = SizesOf(api, scales);
    Require(api, sizes.size() == 3 && sizes[2] == kBlock / 2 && CountOf(scale_sizes) == sizes[0] * sizes[1],
            "Int4Linear: expected codes [N, K / 32, 16] and scales [N, K / 32]");
    Weights made = Packed(sizes[0], sizes[1] * kBlock, DataOf<const uint8_t>(api, codes), DataOf<const float>(api, scales));
    *out = new Linear{api, Shared(std::move(made))};
  });
}

ort::Status* Compute(void* self, ort::KernelContext* context) {
  return Multiply<Rows>(*static_cast<const Linear*>(self), context, Quantize, Products());
}

}  // namespace

const ort::CustomOp* Int4Linear() {
  static const ort::CustomOp op = [] {
    ort::CustomOp made = Operator<ort::kFloat, ort::kUint8, ort::kFloat>(Create, Compute, Destroy<Linear>);
    made.GetName = [](const ort::CustomOp*) { return "Int4Linear"; };
    return made;
  }();
  return &op;
}
