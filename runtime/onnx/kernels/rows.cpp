// What stands between the linears of a layer, one node for each.
//
// GatedSilu(x [.., 2 F]) -> [.., F] float: g * sigmoid(g) * u from left to right, where g is the first half of a row and u the
// other. sigmoid(g) = 1 / (1 + e) or, for g < 0, e / (1 + e), with e = e^-|g|.
//
// RotarySplit(x [1, R, (H + 2 N) D], cos [1, R, E], sin [1, R, E]; heads = H, kv_heads = N)
//     -> queries [1, R, H D], keys [1, R, N D], values [1, R, N D]
// Of every head of queries and keys, the halves of the first 2 E of its D elements are rotated:
// (a, b) -> (a cos - b sin, b cos + a sin), every operation rounded to float.
//
// AddNorm(x [.., F], y [.., F], weight [F]; epsilon) -> normed [.., F], sum [.., F] float: sum = x + y, and
// normed = sum * scale * weight from left to right with scale = 1 / sqrt(squares / F + epsilon). The squares are added by
// fused multiply-adds in eight lanes (element i in lane i % 8), and the lanes pairwise.

#include <algorithm>
#include <cmath>

#include "exponential.h"
#include "rows.h"

namespace {

struct Gate {
  ort::Api api;
};

float Silu(float g, float u) {
  const float e = Exp(-std::fabs(g));
  return g * ((g < 0 ? e : 1.0f) / (1.0f + e)) * u;
}

#ifdef SSDEVICE_AVX2
__attribute__((target("avx2,fma"))) void SiluAvx2(const float* gate, const float* up, int64_t count, float* y) {
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < count; i += 8) {
    const __m256 g = _mm256_loadu_ps(gate + i), e = Exp(_mm256_or_ps(g, sign));
    const __m256 below = _mm256_cmp_ps(g, _mm256_setzero_ps(), _CMP_LT_OQ);
    const __m256 share = _mm256_div_ps(_mm256_blendv_ps(one, e, below), _mm256_add_ps(one, e));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(g, share), _mm256_loadu_ps(up + i)));
  }
}
#endif

ort::Status* CreateGate(const ort::CustomOp*, const void* const* table, const ort::KernelInfo*, void** out) {
  const ort::Api api(table);
  return Guarded(api, [&] {
    *out = new Gate{api};
  });
}

ort::Status* ComputeGate(void* self, ort::KernelContext* context) {
  const Gate& kernel = *static_cast<const Gate*>(self);
  const ort::Api& api = kernel.api;
  return Guarded(api, [&] {
    const ort::Value* input = InputOf(api, context, 0);
    auto sizes = SizesOf(api, input);
    Require(api, !sizes.empty() && sizes.back() % 2 == 0, "GatedSilu: its rows have no two halves");
    const int64_t width = sizes.back() / 2;
    sizes.pop_back();
    const int64_t rows = CountOf(sizes);
    sizes.push_back(width);
    ort::Value* output = nullptr;
    Check(api.Output(context, 0, sizes.data(), sizes.size(), &output));
    const float* x = DataOf<const float>(api, input);
    float* y = DataOf<float>(api, output);
    GateRows(x, rows, width, y);
  });
}

struct Split {
  ort::Api api;
  int64_t heads, kv_heads;
};

void Rotate(const float* x, int64_t heads, int64_t dim, int64_t half, const float* cos, const float* sin, float* y) {
  for (int64_t head = 0; head < heads; ++head, x += dim, y += dim) {
    for (int64_t i = 0; i < half; ++i) {
      y[i] = x[i] * cos[i] - x[half + i] * sin[i];
      y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    std::copy(x + 2 * half, x + dim, y + 2 * half);
  }
}

ort::Status* CreateSplit(const ort::CustomOp*, const void* const* table, const ort::KernelInfo* info, void** out) {
  const ort::Api api(table);
  return Guarded(api, [&] {
    Split made{api, 0, 0};
    Check(api.Attribute(info, "heads", &made.heads));
    Check(api.Attribute(info, "kv_heads", &made.kv_heads));
    Require(api, made.heads > 0 && made.kv_heads > 0, "RotarySplit: a number of heads is not positive");
    *out = new Split(made);
  });
}

ort::Status* ComputeSplit(void* self, ort::KernelContext* context) {
  const Split& kernel = *static_cast<const Split*>(self);
  const ort::Api& api = kernel.api;
  return Guarded(api, [&] {
    const ort::Value* inputs[3];
    const float* data[3];
    std::vector<int64_t> sizes[3];
    for (size_t i = 0; i < 3; ++i) {
      inputs[i] = InputOf(api, context, i);
      sizes[i] = SizesOf(api, inputs[i]);
      data[i] = DataOf<const float>(api, inputs[i]);
      Require(api, sizes[i].size() == 3 && sizes[i][0] == 1 && sizes[i][1] == sizes[0][1],
              "RotarySplit: the angles do not fit the rows");
    }
    const int64_t rows = sizes[0][1], width = sizes[0][2], all = kernel.heads + 2 * kernel.kv_heads;
    const int64_t dim = width / all, half = sizes[1][2];
    Require(api, width % all == 0 && sizes[1] == sizes[2] && 2 * half <= dim, "RotarySplit: the angles do not fit the rows");
    const int64_t counts[] = {kernel.heads, kernel.kv_heads, kernel.kv_heads};
    float* outputs[3];
    for (size_t i = 0; i < 3; ++i) {
      const int64_t shape[] = {1, rows, counts[i] * dim};
      ort::Value* value = nullptr;
      Check(api.Output(context, i, shape, 3, &value));
      outputs[i] = DataOf<float>(api, value);
    }
    const float *x = data[0], *cos = data[1], *sin = data[2];
    for (int64_t row = 0; row < rows; ++row, cos += half, sin += half) {
      for (size_t i = 0; i < 3; ++i) {
        const int64_t size = counts[i] * dim;
        if (i < 2) Rotate(x, counts[i], dim, half, cos, sin, outputs[i]);
        if (i == 2) std::copy(x, x + size, outputs[i]);
        x += size;
        outputs[i] += size;
      }
    }
  });
}

struct Norm {
  ort::Api api;
  float epsilon;
};

void AddScalar(const float* x, const float* y, int64_t first, int64_t end, float* sum, float* lanes) {
  for (int64_t i = first; i < end; ++i) {
    sum[i] = x[i] + y[i];
    lanes[i % 8] = std::fma(sum[i], sum[i], lanes[i % 8]);
  }
}

void ScaleScalar(const float* sum, const float* weight, float scale, int64_t first, int64_t end, float* normed) {
  for (int64_t i = first; i < end; ++i) normed[i] = sum[i] * scale * weight[i];
}

#ifdef SSDEVICE_AVX2
__attribute__((target("avx2,fma"))) void AddAvx2(const float* x, const float* y, int64_t end, float* sum, float* lanes) {
  __m256 squares = _mm256_setzero_ps();
  for (int64_t i = 0; i < end; i += 8) {
    const __m256 total = _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i));
    _mm256_storeu_ps(sum + i, total);
    squares = _mm256_fmadd_ps(total, total, squares);
  }
  _mm256_storeu_ps(lanes, squares);
}

__attribute__((target("avx2,fma"))) void ScaleAvx2(const float* sum, const float* weight, float scale, int64_t end,
                                                   float* normed) {
  const __m256 by = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < end; i += 8)
    _mm256_storeu_ps(normed + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(sum + i), by), _mm256_loadu_ps(weight + i)));
}
#endif

void Normalize(const float* x, const float* y, const float* weight, int64_t width, float epsilon, float* normed, float* sum) {
  float lanes[8] = {};
  int64_t done = 0;
#ifdef SSDEVICE_AVX2
  if (kFusedAvx2) AddAvx2(x, y, done = width / 8 * 8, sum, lanes);
#endif
  AddScalar(x, y, done, width, sum, lanes);
  const float scale = 1.0f / std::sqrt(PairwiseSum(lanes) / static_cast<float>(width) + epsilon);
#ifdef SSDEVICE_AVX2
  if (kFusedAvx2) ScaleAvx2(sum, weight, scale, done, normed);
#endif
  ScaleScalar(sum, weight, scale, done, width, normed);
}

ort::Status* CreateNorm(const ort::CustomOp*, const void* const* table, const ort::KernelInfo* info, void** out) {
  const ort::Api api(table);
  return Guarded(api, [&] {
    Norm made{api, 0};
    Check(api.Attribute(info, "epsilon", &made.epsilon));
    *out = new Norm(made);
  });
}

ort::Status* ComputeNorm(void* self, ort::KernelContext* context) {
  const Norm& kernel = *static_cast<const Norm*>(self);
  const ort::Api& api = kernel.api;
  return Guarded(api, [&] {
    const ort::Value* inputs[3];
    std::vector<int64_t> sizes[3];
    for (size_t i = 0; i < 3; ++i) sizes[i] = SizesOf(api, inputs[i] = InputOf(api, context, i));
    Require(api, !sizes[0].empty() && sizes[0] == sizes[1] && sizes[2].size() == 1 && sizes[2][0] == sizes[0].back(),
            "AddNorm: its rows do not fit each other or the weight");
    ort::Value* outputs[2] = {};
    for (size_t i = 0; i < 2; ++i) Check(api.Output(context, i, sizes[0].data(), sizes[0].size(), &outputs[i]));
    const int64_t width = sizes[2][0];
    sizes[0].pop_back();
    const float *x = DataOf<const float>(api, inputs[0]), *y = DataOf<const float>(api, inputs[1]);
    const float* weight = DataOf<const float>(api, inputs[2]);
    float *normed = DataOf<float>(api, outputs[0]), *sum = DataOf<float>(api, outputs[1]);
    NormalizeRows(x, y, weight, CountOf(sizes[0]), width, kernel.epsilon, normed, sum);
  });
}

}  // namespace

void GateRows(const float* x, int64_t count, int64_t width, float* y) {
  for (int64_t row = 0; row < count; ++row, x += 2 * width, y += width) {
    const float *gate = x, *up = x + width;
    int64_t done = 0;
#ifdef SSDEVICE_AVX2
    if (kFusedAvx2) SiluAvx2(gate, up, done = width / 8 * 8, y);
#endif
    for (; done < width; ++done) y[done] = Silu(gate[done], up[done]);
  }
}

void NormalizeRows(const float* x, const float* y, const float* weight, int64_t count, int64_t width, float epsilon,
                   float* normed, float* sum) {
  for (int64_t row = 0; row < count; ++row, x += width, y += width, normed += width, sum += width)
    Normalize(x, y, weight, width, epsilon, normed, sum);
}

const ort::CustomOp* AddNorm() {
  static const NamedOp op = Operator<ort::kFloat, ort::kFloat, ort::kFloat>("AddNorm", CreateNorm, ComputeNorm, Destroy<Norm>, 2);
  return &op;
}

const ort::CustomOp* GatedSilu() {
  static const NamedOp op = Operator<ort::kFloat>("GatedSilu", CreateGate, ComputeGate, Destroy<Gate>);
  return &op;
}

const ort::CustomOp* RotarySplit() {
  static const NamedOp op = Operator<ort::kFloat, ort::kFloat, ort::kFloat>("RotarySplit", CreateSplit, ComputeSplit, Destroy<Split>, 3);
  return &op;
}
