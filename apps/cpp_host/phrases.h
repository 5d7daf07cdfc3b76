// Phrases that a model says often: ssdevice/runtime/phrases.py in C++, which describes their table.
#pragma once

#include <optional>

#include "processors.h"

class Phrases {
 public:
  static constexpr uintmax_t kMostBytes = 4 << 17;

  Phrases() = default;  // none

  // `entries`: as many as a power of two. `vocab`: the model's tokens.
  Phrases(std::vector<uint32_t> entries, int64_t vocab)
      : entries_(std::move(entries)), vocab_(vocab) {
    while (vocab >> bits_) ++bits_;
  }

  // The token that mostly follows the longest phrase at the end of a text. The table is not
  // trusted: it may name any.
  std::optional<int32_t> after(const Ids& text) const {
    std::optional<int32_t> found;
    if (entries_.empty()) return found;
    uint32_t state = 0;
    for (size_t length = 1; length <= std::min(kMost, text.size()); ++length) {
      state = (state ^ static_cast<uint32_t>(text[text.size() - length])) * 0x01000193u;
      state ^= state >> 15;
      if (length < kFewest) continue;
      const uint32_t entry = entries_[state & (entries_.size() - 1)];
      const uint32_t check = state * 0x9E3779B1u;
      const int64_t token = int64_t{entry & ((1u << bits_) - 1)} - 1;
      const bool known = token >= 0 && token < vocab_;
      if (known && entry >> bits_ == check >> bits_) found = static_cast<int32_t>(token);
    }
    return found;
  }

 private:
  static constexpr size_t kFewest = 2;
  static constexpr size_t kMost = 4;
  std::vector<uint32_t> entries_;
  int64_t vocab_ = 0;
  int bits_ = 0;  // of an entry: its token
};
