// Speculative decoding where it pays: runtime/adaptive.py in C++, which has the reasons for the numbers.
#pragma once

#include <functional>

#include "lookup.h"

// A cumulative sum test of what steps gain over plain calls pauses them while they lose. It serves one answer after another and remembers
// what it learned.
class Adaptive {
 public:
  Lookup lookup;

  // `clock`: in seconds.
  explicit Adaptive(std::function<double()> clock = now) : clock_(std::move(clock)) {}

  // The tokens after `last`, from a step or from a plain call.
  Ids next(Conversation& conversation, int32_t last) {
    const int until = !plain_.known() ? kCalibrated : gained_ > 0.5 * steps_ ? 4 * kStale : kStale;
    if (!paused_ && steps_ < until) {
      const Ids tokens = by_step(conversation, last);
      return tokens.empty() ? plainly(conversation, last) : tokens;
    }
    const Ids tokens = plainly(conversation, last);
    paused_ = std::max(0, paused_ - 1);
    if (plain_.known()) steps_ = 0, gained_ = 0;
    return tokens;
  }

 private:
  // Seconds of a kind of call: the median of the last eight, without the very first, which opens a graph.
  class Cost {
   public:
    bool known() const { return count_ > 3; }

    void add(double seconds) {
      if (count_++) times_[(count_ - 2) % times_.size()] = seconds;
    }

    double seconds() const {
      auto sorted = times_;
      const size_t size = std::min(count_ - 1, times_.size());
      if (!size) return 0;
      std::sort(sorted.begin(), sorted.begin() + size);
      return (sorted[(size - 1) / 2] + sorted[size / 2]) / 2;
    }

   private:
    std::array<double, 8> times_{};
    size_t count_ = 0;
  };

  Ids plainly(Conversation& conversation, int32_t last) {
    const double start = clock_();
    const Ids tokens = conversation.plain(last);
    plain_.add(clock_() - start);
    Ids& drafts = conversation.drafts;  // what follows its first tokens still fits, if that is what the model said
    std::copy(drafts.begin() + conversation.candidates, drafts.end(), drafts.begin());
    return tokens;
  }

  Ids by_step(Conversation& conversation, int32_t last) {
    const double start = clock_();
    const Ids tokens = lookup.step(conversation, last);
    if (tokens.empty()) return tokens;
    step_.add(clock_() - start);
    if (++steps_ < 2 || !plain_.known()) return tokens;  // after a plain call a draft is an old one
    const double gained = tokens.size() - step_.seconds() / plain_.seconds();
    gained_ += gained;
    lost_ = std::max(0.0, lost_ - gained);
    won_ = std::clamp(won_ + gained, -2 * kBudget, 2 * kBudget);
    if (won_ > 0) pause_ = kFirstPause;
    if (lost_ > (pause_ == kFirstPause ? kBudget : kTrial)) {
      lost_ = 0, paused_ = pause_;
      pause_ = std::min(4 * pause_, kLongestPause);
    }
    return tokens;
  }

  static constexpr double kBudget = 12, kTrial = 4;  // plain calls that may be lost before a pause
  static constexpr int kFirstPause = 32, kLongestPause = 1024, kCalibrated = 4, kStale = 64;
  std::function<double()> clock_;
  Cost plain_, step_;
  double lost_ = 0, won_ = 0, gained_ = 0;  // since the best moment, in the end, since the last plain call
  int steps_ = 0, pause_ = kFirstPause, paused_ = 0;
};
