// What the programs for test vectors (tests/vectors) share.
#pragma once

#include "choice.h"

// The logits of a row; tests/vectors/sampling.py has the formula.
inline std::vector<float> row_of(int64_t vocab, uint32_t number) {
  std::vector<float> made;
  for (uint32_t i = 0; i < vocab; ++i) {
    uint32_t x = (i + 1) * 2654435761u + (number + 1) * 2246822519u;
    x = (x ^ x >> 15) * 2246822519u;
    const double z = ((x ^ x >> 13) >> 8) / 16777216.0;
    made.push_back(static_cast<float>(16 * z * z - 8));
  }
  return made;
}

inline Sampling sampling_of(const Json& given) {
  Sampling sampling;
  sampling.take(given.at("sampling"));
  sampling.seed = std::stoull(given.at("seed").get<std::string>());
  return sampling;
}
