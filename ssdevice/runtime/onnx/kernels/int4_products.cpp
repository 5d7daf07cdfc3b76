// Products of rows in eight bits with a group of columns in four (int4.h), as the CPUs have
// instructions for them. Kernels only differ in how they compute a block's sum of integers, so all
// give the same bits.

#include <cstring>

#include "int4.h"

namespace {

// The scale of column ``c``.
inline float ScaleOf(const uint8_t* from, int c, Scales kind) {
  if (kind == Scales::kNone) return 1.0f;
  const size_t bytes = static_cast<size_t>(kind) / kColumns;
  uint32_t bits = 0;
  std::memcpy(&bits, from + bytes * static_cast<size_t>(c), bytes);
  return BitCast<float>(kind == Scales::kShort ? bits << 16 : bits);
}

template <int R, Scales S>
void Portable(const TileOf<BlockRows>& t, float (*out)[kColumns]) {
  for (int r = 0; r < R; ++r) std::fill(out[r], out[r] + kColumns, 0.0f);
  for (int b = 0; b < t.blocks; ++b) {
    const uint8_t* codes = t.weights[0] + CodesAt(b, S);
    const uint8_t* from = t.weights[0] + ScalesAt(b, S);
    float scales[kColumns];
    for (int c = 0; c < kColumns; ++c) scales[c] = ScaleOf(from, c, S);
    for (int r = 0; r < R; ++r) {
      const auto& [q, scale, zero] = t.At(b)[r];
      for (int c = 0; c < kColumns; ++c) {
        int32_t d = zero;
        for (int k = 0; k < 16; ++k) {
          const uint8_t both = codes[ByteAt(k, c)];
          d += q[k] * (both & 15) + q[16 + k] * (both >> 4);
        }
        out[r][c] += static_cast<float>(d) * (scales[c] * scale);
      }
    }
  }
}

#ifdef SSDEVICE_AVX2
template <Scales S>
__attribute__((target("avx2"), always_inline)) inline __m256 EightScales(const uint8_t* from,
                                                                         int v) {
  if (S == Scales::kNone) return _mm256_set1_ps(1.0f);
  if (S == Scales::kWhole) return _mm256_load_ps(reinterpret_cast<const float*>(from) + kLanes * v);
  const __m128i halves = _mm_load_si128(reinterpret_cast<const __m128i*>(from) + v);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Eight products of codes up to 15 with codes up to 127, two by two, add up to at most 30480:
// sixteen bits hold them. The sums of all rows and vectors stay in registers while weights are
// unpacked: with 5 rows and 2 vectors that takes all sixteen.
template <int R, Scales S>
SSDEVICE_TARGET_AVX2 void Avx2(const TileOf<BlockRows>& t, float (*out)[kColumns]) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 sums[R][kVectors] = {};
  const uint8_t* unit = t.weights[0];
  for (int b = 0; b < t.blocks; b += 2, unit += UnitOf(S)) {
    Prefetch(unit + kAhead, UnitOf(S));
    SSDEVICE_UNROLL for (int second = 0; second < 2; ++second) {
      if (b + second == t.blocks) break;
      const uint8_t* codes = unit + CodesAt(second, S);
      const uint8_t* from = unit + ScalesAt(second, S);
      const BlockRows::Part* rows = t.At(b + second);
      __m256i pairs[R][kVectors] = {};
      SSDEVICE_UNROLL for (int i = 0; i < 4; ++i) {
        SSDEVICE_UNROLL for (int half = 0; half < 2; ++half) {
          __m256i w[kVectors];
          SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
            const __m256i both = _mm256_load_si256(
                reinterpret_cast<const __m256i*>(codes + 4 * kColumns * i + 32 * v));
            w[v] = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, low);
          }
          SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
            const int32_t four = Word(rows[r].codes + 16 * half + 4 * i);
            SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
              pairs[r][v] = _mm256_add_epi16(pairs[r][v],
                                             _mm256_maddubs_epi16(w[v], _mm256_set1_epi32(four)));
              InOrder(pairs[r][v]);
            }
          }
        }
      }
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        const __m256i zero = _mm256_set1_epi32(rows[r].zero);
        const __m256 scale = _mm256_set1_ps(rows[r].scale);
        SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v) {
          const __m256 d =
              _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(pairs[r][v], ones), zero));
          const __m256 both = _mm256_mul_ps(EightScales<S>(from, v), scale);
          sums[r][v] = _mm256_add_ps(sums[r][v], _mm256_mul_ps(d, both));
        }
      }
    }
  }
  SSDEVICE_UNROLL for (int r = 0; r < R; ++r) SSDEVICE_UNROLL for (int v = 0; v < kVectors; ++v)
      _mm256_storeu_ps(out[r] + kLanes * v, sums[r][v]);
}

#ifdef SSDEVICE_VNNI
template <Scales S>
SSDEVICE_TARGET_VNNI
    __attribute__((always_inline)) inline __m512 SixteenScales(const uint8_t* from) {
  if (S == Scales::kWhole) return _mm512_load_ps(from);
  const __m256i halves = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// A product of four codes with four is one instruction, and the sixteen sums of a row are one
// vector.
template <int R, Scales S>
SSDEVICE_TARGET_VNNI void Vnni(const TileOf<BlockRows>& t, float (*out)[kColumns]) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sums[kStreams][R] = {};
  __m512i d[kStreams][R] = {};  // without scales of all blocks, else of one
  const uint8_t* units[kStreams] = {t.weights[0], t.weights[1]};
  for (int b = 0; b < t.blocks; b += 2) {
    SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) Prefetch(units[s] + kAhead, UnitOf(S));
    SSDEVICE_UNROLL for (int second = 0; second < 2; ++second) {
      if (b + second == t.blocks) break;
      const BlockRows::Part* rows = t.At(b + second);
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        const __m512i zero = _mm512_set1_epi32(rows[r].zero);
        SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) d[s][r] =
            S == Scales::kNone ? _mm512_add_epi32(d[s][r], zero) : zero;
      }
      SSDEVICE_UNROLL for (int i = 0; i < 4; ++i) {
        SSDEVICE_UNROLL for (int half = 0; half < 2; ++half) {
          __m512i w[kStreams];
          SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) {
            const __m512i both =
                _mm512_load_si512(units[s] + CodesAt(second, S) + 4 * kColumns * i);
            w[s] = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, low);
          }
          SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
            const __m512i four = _mm512_set1_epi32(Word(rows[r].codes + 16 * half + 4 * i));
            SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) d[s][r] =
                _mm512_dpbusd_epi32(d[s][r], w[s], four);
          }
        }
      }
      SSDEVICE_UNROLL for (int s = 0; s < kStreams && S != Scales::kNone; ++s) {
        const __m512 scales = SixteenScales<S>(units[s] + ScalesAt(second, S));
        SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
          const __m512 both = _mm512_mul_ps(scales, _mm512_set1_ps(rows[r].scale));
          sums[s][r] = _mm512_add_ps(sums[s][r], _mm512_mul_ps(_mm512_cvtepi32_ps(d[s][r]), both));
        }
      }
    }
    SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) units[s] += UnitOf(S);
  }
  SSDEVICE_UNROLL for (int s = 0; s < kStreams; ++s) SSDEVICE_UNROLL for (int r = 0; r < R; ++r)
      _mm512_storeu_ps(out[s * R + r],
                       S == Scales::kNone ? _mm512_cvtepi32_ps(d[s][r]) : sums[s][r]);
}

template <Scales S>
constexpr ProductOf<BlockRows> kVnniProducts[] = {Vnni<1, S>, Vnni<2, S>, Vnni<3, S>,
                                                  Vnni<4, S>, Vnni<5, S>, Vnni<6, S>};
#endif

template <Scales S>
constexpr ProductOf<BlockRows> kAvx2Products[] = {Avx2<1, S>, Avx2<2, S>, Avx2<3, S>, Avx2<4, S>,
                                                  Avx2<5, S>};
#endif

#ifdef SSDEVICE_DOT
template <Scales S>
SSDEVICE_TARGET_DOT inline float32x4_t FourScales(const uint8_t* from, int v) {
  if (S == Scales::kNone) return vdupq_n_f32(1.0f);
  if (S == Scales::kWhole) return vld1q_f32(reinterpret_cast<const float*>(from) + 4 * v);
  return vreinterpretq_f32_u32(
      vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from) + 4 * v), 16));
}

// Two vectors of columns at a time: with five rows their sums and products are twenty of 32
// registers.
template <int R, Scales S>
SSDEVICE_TARGET_DOT void Dot(const TileOf<BlockRows>& t, float (*out)[kColumns]) {
  for (int first = 0; first < kQuarters; first += 2) {
    float32x4_t sums[R][2] = {};
    for (int b = 0; b < t.blocks; ++b) {
      const uint8_t* codes = t.weights[0] + CodesAt(b, S);
      const uint8_t* from = t.weights[0] + ScalesAt(b, S);
      const BlockRows::Part* rows = t.At(b);
      int32x4_t d[R][2];
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) SSDEVICE_UNROLL for (int v = 0; v < 2; ++v)
          d[r][v] = vdupq_n_s32(rows[r].zero);
      SSDEVICE_UNROLL for (int i = 0; i < 4; ++i) {
        int8x16_t w[2][2];
        SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) {
          const uint8x16_t both = vld1q_u8(codes + 4 * kColumns * i + 16 * (first + v));
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
      SSDEVICE_UNROLL for (int r = 0; r < R; ++r) {
        SSDEVICE_UNROLL for (int v = 0; v < 2; ++v) {
          const float32x4_t both =
              vmulq_f32(FourScales<S>(from, first + v), vdupq_n_f32(rows[r].scale));
          sums[r][v] = vaddq_f32(sums[r][v], vmulq_f32(vcvtq_f32_s32(d[r][v]), both));
        }
      }
    }
    SSDEVICE_UNROLL for (int r = 0; r < R; ++r) SSDEVICE_UNROLL for (int v = 0; v < 2; ++v)
        vst1q_f32(out[r] + 4 * (first + v), sums[r][v]);
  }
}

template <Scales S>
constexpr ProductOf<BlockRows> kDotProducts[] = {Dot<1, S>, Dot<2, S>, Dot<3, S>, Dot<4, S>,
                                                 Dot<5, S>};
#endif

template <Scales S>
constexpr ProductOf<BlockRows> kPortableProducts[] = {
    Portable<1, S>, Portable<2, S>, Portable<3, S>, Portable<4, S>, Portable<5, S>};

template <Scales S>
ProductsOf<BlockRows> Products() {
#ifdef SSDEVICE_VNNI
  if (kVnni) return {kVnniProducts<S>, std::size(kVnniProducts<S>), kStreams};
#endif
#ifdef SSDEVICE_AVX2
  if (kAvx2) return {kAvx2Products<S>, kTile};
#endif
#ifdef SSDEVICE_DOT
  if (kDot) return {kDotProducts<S>, kTile};
#endif
  return {kPortableProducts<S>, kTile};
}

}  // namespace

ProductsOf<BlockRows> Int4Products(Scales scales) {
  if (scales == Scales::kNone) return Products<Scales::kNone>();
  return scales == Scales::kShort ? Products<Scales::kShort>() : Products<Scales::kWhole>();
}
