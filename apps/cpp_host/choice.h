// The choice of a token from a row of logits, with what changes them before:
// ssdevice/runtime/sampling/choice.py in C++.
#pragma once

#include "processors.h"

// Chooses the tokens of one answer. `sampling` must outlive it.
class Chooser {
 public:
  // `source`: the bundle, for messages.
  Chooser(const Sampling& sampling, const Ids& prompt, const Ids& stops, int64_t vocab,
          std::string source = "the bundle")
      : s_(sampling),
        source_(std::move(source)),
        vocab_(vocab),
        position_(prompt.size()),
        process_(sampling, prompt, stops, vocab) {
    for (const auto& entry : s_.logit_bias) check(entry.first);
    for (const int32_t id : s_.suppress) check(id);
    for (const int32_t id : s_.begin_suppress) check(id);
    for (const Ids& word : s_.bad_words) {
      for (const int32_t id : word) check(id);
    }
  }

  // The token after the text so far, which it then belongs to. Changes the logits, of which
  // -infinity rules a token out. Throws an Error for logits that are not numbers, or of which the
  // best score is not finite, and if every token is forbidden.
  int32_t operator()(float* logits) {
    process_(logits);
    const int32_t token = sampler_(logits, vocab_, s_, position_);
    if (token == Sampler::kNoToken && process_.forbade()) {
      throw Error("the request forbids every token that the model could choose");
    }
    if (token < 0) {
      throw Error(source_ +
                  ": the model returned logits that are not numbers, or too large to choose from; "
                  "`ssdevice verify` tells whether the bundle is damaged");
    }
    process_.accept(token);
    ++position_;
    return token;
  }

  // How many tokens truncation left for the last choice, whose logits are still there.
  int64_t left() { return sampler_.left(); }

 private:
  void check(int32_t id) const {
    if (id < 0 || id >= vocab_) {
      throw Error("token " + std::to_string(id) + " is not one of the model's " +
                  std::to_string(vocab_));
    }
  }

  const Sampling& s_;
  const std::string source_;
  const int64_t vocab_;
  int64_t position_;
  Processors process_;
  Sampler sampler_;
};
