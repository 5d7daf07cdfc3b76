// How many conversions between float16 and float differ from what the format says: every number,
// and at every midpoint of two neighbours the float below it, the midpoint and the one above.

#include <cmath>
#include <cstdio>
#include <vector>

#include "eight.h"

int main() {
  constexpr uint16_t kLast = 0x7bff;
  int wrong = 0;
  const auto size = [](int bits) {  // 65536 for the first one that is too large
    const int exponent = bits >> 10, fraction = bits & 1023;
    return std::ldexp(static_cast<float>(exponent ? 1024 + fraction : fraction),
                      (exponent ? exponent : 1) - 25);
  };
  for (int bits = 0; bits <= kLast; ++bits) {
    const uint16_t down = static_cast<uint16_t>(bits), up = static_cast<uint16_t>(bits + 1);
    const float middle = (size(bits) + size(bits + 1)) / 2;
    const float from[] = {size(bits), std::nextafter(middle, 0.0f), middle,
                          std::nextafter(middle, INFINITY)};
    const uint16_t expected[] = {down, down, bits % 2 ? up : down, up};
    for (const uint16_t sign : {0x0000, 0x8000}) {
      const float factor = sign ? -1.0f : 1.0f;
      wrong += FloatOf(Half{static_cast<uint16_t>(sign | down)}) != factor * size(bits);
      std::vector<float> eight(8);
      for (int i = 0; i < 8; ++i) eight[static_cast<size_t>(i)] = factor * from[i % 4];
      std::vector<Half> found(8);
      HalvesOf(eight.data(), 7, found.data());
      for (int i = 0; i < 4; ++i)
        wrong += found[static_cast<size_t>(i)].bits != (sign | expected[i]);
      HalvesOf(eight.data(), 8, found.data());
      for (int i = 0; i < 4; ++i)
        wrong += found[static_cast<size_t>(i)].bits != (sign | expected[i]);
    }
  }
  for (const float none : {NAN, -NAN})
    wrong += (HalfOf(none).bits & 0x7fff) <= 0x7c00 || !std::isnan(FloatOf(HalfOf(none)));
  for (const float much : {65520.0f, 1e30f, INFINITY})
    wrong += HalfOf(much).bits != 0x7c00 || HalfOf(-much).bits != 0xfc00;
  std::printf("%d differ\n", wrong);
  return wrong != 0;
}
