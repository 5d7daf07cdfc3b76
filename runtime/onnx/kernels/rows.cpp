// What stands between the linears of a layer, one node for each.
//
// GatedSilu(x [.., 2 F]) -> [.., F] float: g * sigmoid(g) * u from left to right, where g is the first half of a row and u the
// other. sigmoid(g) = 1 / (1 + e) or, for g < 0, e / (1 + e), with e = e^-|g|.
//
// RotarySplit(x [1, R, (H + 2 N) D], cos [1, R, E], sin [1, R, E]; heads = H, kv_heads = N)
//     -> queries [1, R, H D], keys [1, R, N D], values [1, R, N D]
// Of every head of queries and keys, the halves of the first 2 E of its D elements are rotated:
// (a, b) -> (a cos - b sin, b cos + a sin), every operation rounded to float.

#include <algorithm>
#include <cmath>

#include "exponential.h"

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
    for (int64_t row = 0; row < rows; ++row, x += 2 * width, y += width) {
      const float *gate = x, *up = x + width;
      int64_t done = 0;
#ifdef SSDEVICE_AVX2
      if (kFusedAvx2) SiluAvx2(gate, up, done = width / 8 * 8, y);
#endif
      for (; done < width; ++done) y[done] = Silu(gate[done], up[done]);
    }
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

}  // namespace

const ort::CustomOp* GatedSilu() {
  static const ort::CustomOp op = [] {
    ort::CustomOp made = Operator<ort::kFloat>(CreateGate, ComputeGate, Destroy<Gate>);
    made.GetName = [](const ort::CustomOp*) { return "GatedSilu"; };
    return made;
  }();
  return &op;
}

const ort::CustomOp* RotarySplit() {
  static const ort::CustomOp op = [] {
    ort::CustomOp made = Operator<ort::kFloat, ort::kFloat, ort::kFloat>(CreateSplit, ComputeSplit, Destroy<Split>);
    made.GetName = [](const ort::CustomOp*) { return "RotarySplit"; };
    made.GetOutputTypeCount = [](const ort::CustomOp*) -> size_t { return 3; };
    return made;
  }();
  return &op;
}
