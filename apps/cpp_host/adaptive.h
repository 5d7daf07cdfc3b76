// Speculative decoding where it pays: ssdevice/runtime/adaptive.py in C++, which has the reasons
// for the numbers.
#pragma once

#include <cmath>
#include <deque>
#include <functional>
#include <optional>

#include "lookup.h"

// Measures what a step costs and what it emits, and pauses steps that lose. It serves one answer
// after another and remembers what it learned.
class Adaptive {
 public:
  Lookup lookup;

  // `clock`: in seconds.
  explicit Adaptive(std::function<double()> clock = now) : clock_(std::move(clock)) {}

  // The tokens after `last`, from a step or from a plain call.
  Ids next(Conversation& conversation, int32_t last) {
    if (steps_ >= steps_before_probes()) {
      steps_ = 0;
      probes_ = kProbe;
    }
    if (!paused_ && !probes_) {
      const Ids tokens = by_step(conversation, last);
      return tokens.empty() ? plainly(conversation, last) : tokens;
    }
    const Ids tokens = plainly(conversation, last);
    probes_ = std::max(0, probes_ - 1);
    if (paused_) {
      --paused_;
      steps_ = 0;
    }
    return tokens;
  }

 private:
  size_t steps_before_probes() const {
    if (!price_) return 1;
    if (won() > kClear * count_) return kRarely;
    return kSteps * prices_.size();
  }

  Ids plainly(Conversation& conversation, int32_t last) {
    const double start = clock_();
    const Ids tokens = conversation.plain(last);
    time(0, start);
    // What follows the draft's first tokens still fits, if those are what the model said.
    Ids& drafts = conversation.drafts;
    std::copy(drafts.begin() + conversation.candidates, drafts.end(), drafts.begin());
    return tokens;
  }

  Ids by_step(Conversation& conversation, int32_t last) {
    const double start = clock_();
    const Ids tokens = lookup.step(conversation, last);
    if (tokens.empty()) {
      steps_ = std::min<size_t>(steps_, 1);  // the plain call that follows measures as a probe does
      return tokens;
    }
    const size_t drafts = conversation.verified;
    time(drafts, start);
    ++steps_;
    if (!price_) return tokens;
    const double paid = *price_ * drafts;
    lost_ = std::max(0.0, lost_ + 1 + paid - tokens.size());
    // The first draft after a plain call is an old one.
    if (steps_ > 1) judge(tokens.size(), drafts, paid);
    return tokens;
  }

  // Plain calls that steps have saved since the last pause.
  double won() const {
    return static_cast<double>(emitted_ - count_) - price_.value_or(0) * drafted_;
  }

  // Takes in what a step emitted, and pauses if steps lose.
  void judge(size_t tokens, size_t drafts, double paid) {
    emitted_ += tokens;
    count_ += 1;
    drafted_ += drafts;
    const double won = this->won();
    const double error = std::sqrt(std::max(0.0, *price_ * drafted_));
    if (won >= -kDoubt * error && lost_ <= kMost) return;
    paused_ = won > 0 ? kShort : static_cast<int>((paid - won) / kShare);
    emitted_ = 0;
    count_ = 0;
    drafted_ = 0;
    lost_ = 0;
  }

  // Takes in what a call took, and after a call of the other kind what a draft costs. `kind`: the
  // drafts that the call verified; 0 for a plain one.
  void time(size_t kind, double start) {
    const double seconds = opened_.insert(kind).second ? 0 : clock_() - start;
    const auto [other, before] = std::exchange(before_, {kind, seconds});
    const bool neighbours = (kind == 0) != (other == 0);
    if (!neighbours || seconds <= 0 || before <= 0) return;
    const double ratio = kind ? seconds / before : before / seconds;
    prices_.push_back((ratio - 1) / std::max(kind, other));
    if (prices_.size() > kPairs) prices_.pop_front();
    if (prices_.size() < kEnough) return;
    auto sorted = prices_;
    std::sort(sorted.begin(), sorted.end());
    price_ = (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
  }

  static constexpr double kDoubt = 1.5;
  static constexpr double kMost = 24;
  static constexpr size_t kCredit = 8;
  static constexpr double kShare = 0.02;
  static constexpr int kShort = 32;
  static constexpr size_t kPairs = 32;
  static constexpr size_t kEnough = 4;
  static constexpr int kProbe = 2;
  static constexpr size_t kSteps = 3;
  static constexpr double kClear = 0.5;
  static constexpr size_t kRarely = 256;

  std::function<double()> clock_;

  // What a draft costs, in plain calls; none: not known yet. A step costs one plus its drafts.
  std::optional<double> price_;
  std::deque<double> prices_;  // what pairs of neighbouring calls said of it
  std::set<size_t> opened_;    // kinds of calls that were made
  // The last call's kind and seconds; 0 seconds if it opened a graph.
  std::pair<size_t, double> before_;

  // Steps since the last pause: their tokens, how many they are, and their drafts.
  size_t emitted_ = kCredit;
  size_t count_ = 0;
  size_t drafted_ = 0;
  double lost_ = 0;  // plain calls that they have lost since their best moment

  int paused_ = 0;    // tokens to decode plainly from now on
  int probes_ = 0;    // plain calls to make from now on, to measure the cost
  size_t steps_ = 0;  // steps since the last plain call
};
