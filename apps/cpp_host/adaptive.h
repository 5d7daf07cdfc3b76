// Speculative decoding where it pays: ssdevice/runtime/adaptive.py in C++, which has the reasons
// for the numbers.
#pragma once

#include <cmath>
#include <deque>
#include <functional>
#include <optional>

#include "lookup.h"

// Pauses steps while they emit fewer tokens than they cost in plain calls. It serves one answer
// after another and remembers what it learned.
class Adaptive {
 public:
  Lookup lookup;

  // `clock`: in seconds.
  explicit Adaptive(std::function<double()> clock = now) : clock_(std::move(clock)) {}

  // The tokens after `last`, from a step or from a plain call.
  Ids next(Conversation& conversation, int32_t last) {
    const size_t rarely = won() > 0.5 * count_ ? kRarely : kSteps * prices_.size();
    if (steps_ >= (price_ ? rarely : 1)) steps_ = 0, probes_ = kProbe;
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
    time(0, start);
    Ids& drafts =
        conversation
            .drafts;  // what follows its first tokens still fits, if that is what the model said
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
    const size_t drafts = conversation.verified;
    time(drafts, start);
    ++steps_;
    if (!price_) return tokens;
    const double paid = *price_ * drafts;
    lost_ = std::max(0.0, lost_ + 1 + paid - tokens.size());
    if (steps_ > 1)
      judge(tokens.size(), drafts, paid);  // the first draft after a plain call is an old one
    return tokens;
  }

  // Plain calls that steps have saved since the last pause.
  double won() const {
    return static_cast<double>(emitted_ - count_) - price_.value_or(0) * drafted_;
  }

  void judge(size_t tokens, size_t drafts, double paid) {
    emitted_ += tokens, ++count_, drafted_ += drafts;
    const double won = this->won(), error = std::sqrt(std::max(0.0, *price_ * drafted_));
    if (won >= -kDoubt * error && lost_ <= kMost) return;
    paused_ = won > 0 ? kShort : static_cast<int>((paid - won) / kShare);
    emitted_ = count_ = drafted_ = 0, lost_ = 0;
  }

  // `drafts`: that the call verified; 0: it was a plain one.
  void time(size_t drafts, double start) {
    const double seconds = opened_.insert(drafts).second ? 0 : clock_() - start;
    const auto [other, before] = std::exchange(before_, {drafts, seconds});
    if (seconds <= 0 || before <= 0 || (drafts == 0) == (other == 0)) return;
    const double ratio = drafts ? seconds / before : before / seconds;
    prices_.push_back((ratio - 1) / std::max(drafts, other));
    if (prices_.size() > kPairs) prices_.pop_front();
    if (prices_.size() < kEnough) return;
    auto sorted = prices_;
    std::sort(sorted.begin(), sorted.end());
    price_ = (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
  }

  static constexpr double kDoubt = 1.5, kMost = 24, kShare = 0.02;
  static constexpr size_t kPairs = 32, kEnough = 4, kSteps = 3, kRarely = 256;
  static constexpr int kShort = 32, kProbe = 2;
  std::function<double()> clock_;
  std::set<size_t>
      opened_;  // kinds of calls that were made; here and below, the drafts that it verifies
  std::pair<size_t, double> before_;  // the last call's kind and seconds, 0 if it opened a graph
  std::deque<double> prices_;         // of drafts, by neighbouring calls
  std::optional<double>
      price_;  // of a draft, in plain calls, none: not known yet; a step costs one plus this
  size_t emitted_ = 8, count_ = 0;  // tokens and steps since the last pause
  size_t drafted_ = 0;              // drafts of these steps
  double lost_ = 0;                 // plain calls that they have lost since their best moment
  size_t steps_ = 0;                // since the last plain call
  int paused_ = 0, probes_ = 0;     // plain calls to make from now on
};
