// Speculative decoding where it pays: runtime/adaptive.py in C++, which has the reasons for the numbers.
#pragma once

#include <cmath>
#include <deque>
#include <functional>

#include "lookup.h"

// Pauses steps while they emit fewer tokens than they cost in plain calls. It serves one answer after another and remembers what it learned.
class Adaptive {
 public:
  Lookup lookup;

  // `clock`: in seconds.
  explicit Adaptive(std::function<double()> clock = now) : clock_(std::move(clock)) {}

  // The tokens after `last`, from a step or from a plain call.
  Ids next(Conversation& conversation, int32_t last) {
    const bool clear = emitted_ > (cost_ + 0.5) * count_;
    const size_t until = cost_ == 0 ? 1 : clear ? kRarely : kSteps * ratios_.size();
    if (steps_ >= until) steps_ = 0, probes_ = kProbe;
    if (!paused_ && !probes_) {
      const Ids tokens = by_step(conversation, last);
      return tokens.empty() ? plainly(conversation, last) : tokens;
    }
    const Ids tokens = plainly(conversation, last);
    probes_ = std::max(0, probes_ - 1);
    if (paused_) --paused_, steps_ = 0;
    return tokens;
  }

 private:
  Ids plainly(Conversation& conversation, int32_t last) {
    const double start = clock_();
    const Ids tokens = conversation.plain(last);
    time(false, start);
    Ids& drafts = conversation.drafts;  // what follows its first tokens still fits, if that is what the model said
    std::copy(drafts.begin() + conversation.candidates, drafts.end(), drafts.begin());
    return tokens;
  }

  Ids by_step(Conversation& conversation, int32_t last) {
    const double start = clock_();
    const Ids tokens = lookup.step(conversation, last);
    if (tokens.empty()) {
      steps_ = std::min<size_t>(steps_, 1);
      return tokens;
    }
    time(true, start);
    ++steps_;
    if (cost_ == 0) return tokens;
    lost_ = std::max(0.0, lost_ + cost_ - tokens.size());
    if (steps_ > 1) judge(tokens.size());  // the first draft after a plain call is an old one
    return tokens;
  }

  void judge(size_t tokens) {
    emitted_ += tokens;
    const double won = emitted_ - cost_ * ++count_, error = std::sqrt(std::max(0.0, cost_ - 1) * count_);
    if (won >= -kDoubt * error && lost_ <= kMost) return;
    paused_ = won > 0 ? kShort : static_cast<int>((cost_ - 1 - won) / kShare);
    emitted_ = count_ = 0, lost_ = 0;
  }

  void time(bool step, double start) {
    const double seconds = opened_[step] ? clock_() - start : 0, before = seconds_;
    const bool neighbours = step_ != step && seconds > 0 && before > 0;
    opened_[step] = true, step_ = step, seconds_ = seconds;
    if (!neighbours) return;
    ratios_.push_back(step ? seconds / before : before / seconds);
    if (ratios_.size() > kPairs) ratios_.pop_front();
    if (ratios_.size() < kEnough) return;
    auto sorted = ratios_;
    std::sort(sorted.begin(), sorted.end());
    cost_ = (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
  }

  static constexpr double kDoubt = 1.5, kMost = 24, kShare = 0.02;
  static constexpr size_t kPairs = 32, kEnough = 4, kSteps = 3, kRarely = 256;
  static constexpr int kShort = 32, kProbe = 2;
  std::function<double()> clock_;
  bool opened_[2] = {};              // plain calls, steps
  bool step_ = false;                // whether the last call was one
  double seconds_ = 0;               // of the last call, 0 if it opened a graph
  std::deque<double> ratios_;        // of neighbouring calls
  double cost_ = 0;                  // of a step, in plain calls; 0: not known yet
  size_t emitted_ = 8, count_ = 0;   // tokens and steps since the last pause
  double lost_ = 0;                  // plain calls that they have lost since their best moment
  size_t steps_ = 0;                 // since the last plain call
  int paused_ = 0, probes_ = 0;      // plain calls to make from now on
};
