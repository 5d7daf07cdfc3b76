// For processors with NEON's dot product: how many results of a linear differ in a bit from what
// its source says at the top. Compiled with INT4, INT4_WHOLE (scales of 32 bits), INT8 or ARGMAX,
// and run under an emulator, where there is no ONNX Runtime to call the kernels.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "linears.h"
#include "stand_in.h"

Operator Int4Linear();
Operator Int8Argmax();
Operator Int8Linear();

namespace {

using Floats = std::vector<float>;

float Peak(const float* x, int64_t count) {
  float peak = 0;
  for (int64_t k = 0; k < count; ++k) peak = std::fabs(x[k]) > peak ? std::fabs(x[k]) : peak;
  return peak;
}

int64_t Product(const float* x, float inverse, const int* levels, int64_t count, bool divide) {
  int64_t sum = 0;
  for (int64_t k = 0; k < count; ++k)
    sum +=
        static_cast<int64_t>(std::nearbyint(divide ? x[k] / inverse : x[k] * inverse)) * levels[k];
  return sum;
}

#if defined(INT8) || defined(ARGMAX)
constexpr int kLeastLevel = -128, kLevels = 256;

int64_t ScalesOf(int64_t outputs, int64_t) { return outputs; }

std::unique_ptr<Kernel> Made(int64_t outputs, int64_t inputs, const std::vector<int>& levels,
                             const Floats& scales) {
  std::vector<int8_t> codes(levels.size());
  for (int64_t n = 0; n < outputs; ++n)
    for (int64_t k = 0; k < inputs; ++k)
      codes[k * outputs + n] = static_cast<int8_t>(levels[n * inputs + k]);
  Given given;
  given.inputs = {{}, {codes.data(), {inputs, outputs}}, {scales.data(), {outputs}}};
#ifdef ARGMAX
  return Int8Argmax().make(given);
#else
  return Int8Linear().make(given);
#endif
}

float Expected(const float* x, const int* levels, int64_t inputs, int64_t column,
               const Floats& scales) {
  const float scale = Peak(x, inputs) * (1.0f / 127.0f);
  return static_cast<float>(Product(x, scale, levels, inputs, true)) * scales[column] * scale;
}
#else
constexpr int kLeastLevel = -8, kLevels = 16;

int64_t ScalesOf(int64_t outputs, int64_t inputs) { return outputs * (inputs / kBlock); }

std::unique_ptr<Kernel> Made(int64_t outputs, int64_t inputs, const std::vector<int>& levels,
                             const Floats& scales) {
  std::vector<uint8_t> codes(levels.size() / 2);
  for (size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<uint8_t>((levels[2 * i] - kLeastLevel) |
                                    ((levels[2 * i + 1] - kLeastLevel) << 4));
  Given given;
  given.inputs = {{},
                  {codes.data(), {outputs, inputs / kBlock, kBlock / 2}},
                  {scales.data(), {outputs, inputs / kBlock}}};
  return Int4Linear().make(given);
}

float Expected(const float* x, const int* levels, int64_t inputs, int64_t column,
               const Floats& scales) {
  float y = 0;
  for (int64_t b = 0; b < inputs / kBlock; ++b, x += kBlock, levels += kBlock) {
    const float peak = Peak(x, kBlock);
    const int64_t d = Product(x, 127.0f / peak, levels, kBlock, false);
    y +=
        static_cast<float>(d) * (scales[column * (inputs / kBlock) + b] * (peak * (1.0f / 127.0f)));
  }
  return y;
}
#endif

// How many of [count] rows, or of their products, differ, and of how many.
std::pair<int64_t, int64_t> Differ(const Kernel& kernel, const Floats& x, int64_t count,
                                   int64_t outputs, int64_t inputs, const std::vector<int>& levels,
                                   const Floats& scales) {
  Floats expected(count * outputs);
  for (int64_t i = 0; i < count * outputs; ++i)
    expected[i] = Expected(&x[i / outputs * inputs], &levels[i % outputs * inputs], inputs,
                           i % outputs, scales);
  int64_t wrong = 0;
#ifdef ARGMAX
  Call<int64_t> call;
#else
  Call<float> call;
#endif
  call.inputs = {{x.data(), {1, count, inputs}}};
  kernel.Compute(call);
  const auto& y = call.outputs[0];
#ifdef ARGMAX
  for (int64_t r = 0; r < count; ++r) {
    const float* row = &expected[r * outputs];
    wrong += y[r] != std::max_element(row, row + outputs) - row;
  }
#else
  for (int64_t i = 0; i < count * outputs; ++i) wrong += y[i] != expected[i];
#endif
  return {wrong, y.size()};
}

}  // namespace

int main() {
  std::mt19937 drawn(0);
  std::normal_distribution<float> normal;
  int64_t wrong = kDot ? 0 : 1, all = 0;
  for (const auto& [outputs, inputs] :
       {std::pair<int64_t, int64_t>{96, 576}, {37, 64}, {48, 1536}}) {
    std::vector<int> levels(outputs * inputs);
    for (int& level : levels) level = static_cast<int>(drawn() % kLevels) + kLeastLevel;
    Floats scales(ScalesOf(outputs, inputs));
    for (float& scale : scales) scale = std::exp(normal(drawn));
#ifdef INT4
    for (float& scale : scales) {  // bfloat16
      uint32_t bits;
      std::memcpy(&bits, &scale, 4);
      bits &= 0xFFFF0000;
      std::memcpy(&scale, &bits, 4);
    }
#endif
    const auto kernel = Made(outputs, inputs, levels, scales);
    for (const int64_t count : {1, 2, 3, 4, 5, 7, 11}) {
      Floats x(count * inputs);
      for (float& value : x) value = normal(drawn);
      const auto [differing, of] = Differ(*kernel, x, count, outputs, inputs, levels, scales);
      wrong += differing;
      all += of;
    }
  }
  std::printf("%lld of %lld differ\n", static_cast<long long>(wrong), static_cast<long long>(all));
  return wrong != 0;
}
