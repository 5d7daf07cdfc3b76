// The noise of sampling: a function of seed, position and token, the same in every host. runtime/sampling/noise.py in C++.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

// The 32-bit words of Philox 4x32-10 for the counter (number, position, kind, 0).
inline std::array<uint32_t, 4> philox(uint32_t number, uint32_t position, uint32_t kind, uint64_t seed) {
  std::array<uint32_t, 4> words{number, position, kind, 0};
  auto key = static_cast<uint32_t>(seed), other = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, key += 0x9E3779B9, other += 0xBB67AE85) {
    const uint64_t p = uint64_t{0xD2511F53} * words[0], q = uint64_t{0xCD9E8D57} * words[2];
    words = {static_cast<uint32_t>(q >> 32) ^ words[1] ^ key, static_cast<uint32_t>(q),
             static_cast<uint32_t>(p >> 32) ^ words[3] ^ other, static_cast<uint32_t>(p)};
  }
  return words;
}

// The Gumbel numbers of all tokens at a position; runtime/sampling/noise.py says what they are and why.
class Noise {
 public:
  static constexpr int32_t kGroup = 256;

  void at(uint64_t seed, int64_t position, int64_t vocab) {
    seed_ = seed, position_ = static_cast<uint32_t>(position);
    groups_.assign((vocab + kGroup - 1) / kGroup, {});
  }

  double of(int32_t token) {
    const Group& group = known(token / kGroup);
    if (group.lucky == token) return group.most;
    const auto words = philox(static_cast<uint32_t>(token) >> 1, position_, 1, seed_);
    const int at = 2 * (token & 1);
    return -std::log(group.smallest + exponential(words[at], words[at + 1]));
  }

  // The largest number of a group, and the token that has it, which may lie beyond the last group's tokens.
  double most(int32_t group) { return known(group).most; }
  int32_t lucky(int32_t group) { return known(group).lucky; }

 private:
  struct Group {
    double smallest = 0, most = 0;  // an exponential number, 0 before it is known, and the Gumbel number that it makes
    int32_t lucky = 0;
  };

  const Group& known(int32_t number) {
    Group& group = groups_[number];
    if (group.smallest == 0) {
      const auto words = philox(static_cast<uint32_t>(number), position_, 0, seed_);
      group.smallest = exponential(words[0], words[1]) / kGroup;
      group.most = -std::log(group.smallest);
      group.lucky = number * kGroup + static_cast<int32_t>(words[2] % kGroup);
    }
    return group;
  }

  static double exponential(uint32_t high, uint32_t low) {
    return -std::log((static_cast<double>(uint64_t{high} << 20 | low >> 12) + 0.5) * 0x1p-52);
  }

  uint64_t seed_ = 0;
  uint32_t position_ = 0;
  std::vector<Group> groups_;
};
