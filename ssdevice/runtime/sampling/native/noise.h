// The noise of sampling: a function of seed, position and token, the same in every host.
// ssdevice/runtime/sampling/noise.py in C++.
#pragma once

#include <array>
#include <vector>

#include "scan.h"

// Philox 4x32-10 of a counter, or of one of several side by side: the next round of its words.
SSDEVICE_INLINE inline void philox_round(int round, uint64_t seed, uint32_t& a, uint32_t& b,
                                         uint32_t& c, uint32_t& d) {
  const uint32_t key = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
  const uint32_t other = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
  const uint64_t p = uint64_t{0xD2511F53} * a;
  const uint64_t q = uint64_t{0xCD9E8D57} * c;
  a = static_cast<uint32_t>(q >> 32) ^ b ^ key;
  b = static_cast<uint32_t>(q);
  c = static_cast<uint32_t>(p >> 32) ^ d ^ other;
  d = static_cast<uint32_t>(p);
}

// The 32-bit words of Philox 4x32-10 for the counter (number, position, kind, 0).
inline std::array<uint32_t, 4> philox(uint32_t number, uint32_t position, uint32_t kind,
                                      uint64_t seed) {
  std::array<uint32_t, 4> words{number, position, kind, 0};
  for (int round = 0; round < 10; ++round)
    philox_round(round, seed, words[0], words[1], words[2], words[3]);
  return words;
}

// The Gumbel numbers of all tokens at a position; ssdevice/runtime/sampling/noise.py says what they
// are and why.
class Noise {
 public:
  void at(uint64_t seed, int64_t position, int64_t vocab) {
    seed_ = seed;
    position_ = static_cast<uint32_t>(position);
    const size_t groups = (vocab + kGroup - 1) / kGroup;
    words_.resize((groups + kLanes - 1) / kLanes);
    most_.resize(words_.size() * kLanes);
    smallest_.assign(groups, 0);
    fastest([this](auto) SSDEVICE_INLINE {
      for (size_t at = 0; at < words_.size(); ++at) {
        Words& words = words_[at];
        for (int lane = 0; lane < kLanes; ++lane) {
          words.of[0][lane] = static_cast<uint32_t>(at * kLanes + lane);
          words.of[1][lane] = position_;
          words.of[2][lane] = 0;
          words.of[3][lane] = 0;
        }
        for (int round = 0; round < 10; ++round) {
          for (int lane = 0; lane < kLanes; ++lane) {
            philox_round(round, seed_, words.of[0][lane], words.of[1][lane], words.of[2][lane],
                         words.of[3][lane]);
          }
        }
        for (int lane = 0; lane < kLanes; ++lane)
          most_[at * kLanes + lane] = bound(words.of[0][lane]) + 5.5452f;  // log(kGroup)
      }
    });
  }

  // That of a token; if it is less than what is wanted, a number from it to that may be returned,
  // which is known sooner.
  double of(int32_t token, double wanted = -std::numeric_limits<double>::infinity()) {
    const int32_t group = token / kGroup;
    const bool first = lucky(group) == token;
    const auto words = first ? std::array<uint32_t, 4>{}
                             : philox(static_cast<uint32_t>(token) >> 1, position_, 1, seed_);
    const int at = 2 * (token & 1);
    if (const float most = first ? most_[group] : bound(words[at]); most < wanted) return most;
    double& smallest = smallest_[group];
    if (smallest == 0) smallest = exponential(word(0, group), word(1, group)) / kGroup;
    return -std::log(first ? smallest : smallest + exponential(words[at], words[at + 1]));
  }

  // No token of a group has more noise.
  float most(int32_t group) const { return most_[group]; }
  // The token of a group that has the most, which may lie beyond the last group's tokens.
  int32_t lucky(int32_t group) const {
    return group * kGroup + static_cast<int32_t>(word(2, group) % kGroup);
  }

 private:
  struct Words {
    uint32_t of[4][kLanes];
  };

  uint32_t word(int number, int32_t group) const {
    return words_[group / kLanes].of[number][group % kLanes];
  }

  static double exponential(uint32_t high, uint32_t low) {
    return -std::log((static_cast<double>(uint64_t{high} << 20 | low >> 12) + 0.5) * 0x1p-52);
  }

  // What -log(-log(u)) is not above, but for rounding, for any u that begins with a word: with d =
  // 1 - u, -log(u) is at least the first terms of its series, and log2 of that at least the float's
  // exponent and, for its logarithm, its fraction.
  SSDEVICE_INLINE static float bound(uint32_t high) {
    const float d = static_cast<float>(static_cast<int32_t>(~high >> 1)) * 0x1p-31f;
    const float e = d * (1 + d * (0.5f + d * (0.333333f + d * 0.25f)));
    return -0.69314718f * (static_cast<float>(bits_of<int32_t>(e)) * 0x1p-23f - 127);
  }

  uint64_t seed_ = 0;
  uint32_t position_ = 0;
  std::vector<Words> words_;  // of the groups' counters
  std::vector<float> most_;
  std::vector<double> smallest_;  // exponential numbers of groups, 0 before they are known
};
