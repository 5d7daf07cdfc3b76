// For processors with NEON's dot product: how many results of a linear differ in a bit from what its source says at the top.
// Compiled with INT4 or INT8, and run under an emulator, where there is no ONNX Runtime to call the kernels.

#include <cstdio>
#include <random>

#include "crew.h"

#ifdef INT8
#include "int8.cpp"
#else
#include "int4.cpp"
#endif

// Nothing is called through ONNX Runtime here.
int CrewSize() { return 0; }
void For(const ort::Api&, ort::KernelContext*, int, size_t, Work, void*) {}

namespace {

using Floats = std::vector<float>;

float Peak(const float* x, int64_t count) {
  float peak = 0;
  for (int64_t k = 0; k < count; ++k) peak = std::fabs(x[k]) > peak ? std::fabs(x[k]) : peak;
  return peak;
}

int64_t Product(const float* x, float inverse, const int* levels, int64_t count, bool divide) {
  int64_t sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += static_cast<int64_t>(std::nearbyint(divide ? x[k] / inverse : x[k] * inverse)) * levels[k];
  return sum;
}

#ifdef INT8
using Quantized = ByteRows;
constexpr int kLeastLevel = -128, kLevels = 256;

int64_t ScalesOf(int64_t outputs, int64_t) { return outputs; }

Weights Made(int64_t outputs, int64_t inputs, const std::vector<int>& levels, const Floats& scales) {
  std::vector<int8_t> codes(levels.size());
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k) codes[k * outputs + n] = static_cast<int8_t>(levels[n * inputs + k]);
  return Packed(inputs, outputs, codes.data(), scales.data());
}

float Expected(const float* x, const int* levels, int64_t inputs, int64_t column, const Floats& scales) {
  const float scale = Peak(x, inputs) * (1.0f / 127.0f);
  return static_cast<float>(Product(x, scale, levels, inputs, true)) * scales[column] * scale;
}
#else
using Quantized = Rows;
constexpr int kLeastLevel = -8, kLevels = 16;

int64_t ScalesOf(int64_t outputs, int64_t inputs) { return outputs * (inputs / kBlock); }

Weights Made(int64_t outputs, int64_t inputs, const std::vector<int>& levels, const Floats& scales) {
  std::vector<uint8_t> codes(levels.size() / 2);
  for (size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<uint8_t>((levels[2 * i] + kZero) | ((levels[2 * i + 1] + kZero) << 4));
  return Packed(outputs, inputs, codes.data(), scales.data());
}

float Expected(const float* x, const int* levels, int64_t inputs, int64_t column, const Floats& scales) {
  float y = 0;
  for (int64_t b = 0; b < inputs / kBlock; ++b, x += kBlock, levels += kBlock) {
    const float peak = Peak(x, kBlock);
    const int64_t d = Product(x, 127.0f / peak, levels, kBlock, false);
    y += static_cast<float>(d) * (scales[column * (inputs / kBlock) + b] * (peak * (1.0f / 127.0f)));
  }
  return y;
}
#endif

}  // namespace

int main() {
  std::mt19937 drawn(0);
  std::normal_distribution<float> normal;
  int64_t wrong = kDot ? 0 : 1, all = 0;
  for (const auto& [outputs, inputs] : {std::pair<int64_t, int64_t>{96, 576}, {37, 64}, {48, 1536}}) {
    std::vector<int> levels(outputs * inputs);
    for (int& level : levels) level = static_cast<int>(drawn() % kLevels) + kLeastLevel;
    Floats scales(ScalesOf(outputs, inputs));
    for (float& scale : scales) scale = std::exp(normal(drawn));
    const Weights weights = Made(outputs, inputs, levels, scales);
    for (const int64_t count : {1, 2, 3, 4, 5, 7, 11}) {
      Floats x(count * inputs), y(count * outputs);
      for (float& value : x) value = normal(drawn);
      Quantized rows;
      Quantize(x.data(), count, inputs, &rows);
      CallOf<Quantized>{weights, rows, {kDotProducts, kTile}, count, 1, y.data()}.Run(0);
      for (int64_t i = 0; i < count * outputs; ++i, ++all) {
        const int64_t r = i / outputs, n = i % outputs;
        wrong += y[i] != Expected(&x[r * inputs], &levels[n * inputs], inputs, n, scales);
      }
    }
  }
  std::printf("%lld of %lld differ\n", static_cast<long long>(wrong), static_cast<long long>(all));
  return wrong != 0;
}
