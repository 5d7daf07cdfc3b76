// The choice of a token from a row of processed logits: the rest of
// ssdevice/runtime/sampling/choice.py in C++, for hosts in C++ and, as a function of the kernels'
// library, for Python's. Hosts agree on it for a seed, so precisions are part of the definition:
// the division by the temperature is in float, without fused multiply-adds, the rest is in double.
#pragma once

#include <limits>
#include <utility>

#include "noise.h"
#include "scan.h"

// How a token is drawn; by default the likeliest is taken. Names and meaning are those of Python's
// Sampling.
struct Draw {
  double temperature = 0, top_p = 1, min_p = 0, typical_p = 1;
  int64_t top_k = 0;
  uint64_t seed = 0;
};

// Draws tokens; its memory serves one row after another.
class Sampler {
 public:
  // What there is instead of a token: a score is NaN, or the best one is not finite; all scores are
  // -infinity.
  static constexpr int32_t kNoNumbers = -1;
  static constexpr int32_t kNoToken = -2;

  // The token of logits [vocab] at a position, or one of the constants. What follows needs a finite
  // best score: without one, no token would be above any bound. Scores that overflow to -infinity
  // are fine.
  int32_t operator()(const float* logits, int64_t vocab, const Draw& draw, int64_t position) {
    s_ = draw;
    vocab_ = static_cast<int32_t>(vocab);
    temperature_ = static_cast<float>(draw.temperature);
    all_ = true;
    if (!measure(logits)) return kNoNumbers;
    if (best_ == -kInfinity) return kNoToken;
    if (draw.temperature <= 0) return first_of(best_);
    if (!std::isfinite(score(best_))) return kNoNumbers;
    return sample(position);
  }

  // The logarithm of the sum of exp(logit), and the `ids` of as many tokens as it has, the
  // likeliest first, ties by id. NaN, and no ids, if a logit is NaN or infinity.
  double log_total(const float* logits, int64_t vocab, int32_t* ids, int64_t count) {
    vocab_ = static_cast<int32_t>(vocab);
    temperature_ = 1;
    all_ = true;
    if (!measure(logits)) return std::numeric_limits<double>::quiet_NaN();
    kept_.clear();
    if (count > 0) gather(nth_of_groups(count));
    const auto end = kept_.begin() + std::min<int64_t>(count, kept_.size());
    std::partial_sort(kept_.begin(), end, kept_.end(), [](const Candidate& a, const Candidate& b) {
      return a.score != b.score ? a.score > b.score : a.id < b.id;
    });
    std::transform(kept_.begin(), end, ids, [](const Candidate& each) { return each.id; });
    return best_ + std::log(sums_of<false, false>(row()).weight);
  }

  // How many tokens truncation left for the last choice, whose logits are still there.
  int64_t left() {
    if (all_) truncate();
    return all_ ? std::count_if(row_, row_ + vocab_, [](float x) { return std::isfinite(x); })
                : std::count_if(kept_.begin(), kept_.end(),
                                [](const Candidate& each) { return std::isfinite(each.score); });
  }

 private:
  // Surprises are as far from the entropy if they differ by less: it is a sum, which is rounded
  // differently in another order.
  static constexpr double kTie = 1e-12;

  struct Candidate {
    float score;
    int32_t id;
    double weight, key;  // exp(score - the largest); what `border` sorts by
  };

  // Finds the largest logit, of each group and of all. Whether none is NaN or infinity.
  bool measure(const float* logits) {
    row_ = logits;
    highest_.resize((vocab_ + kGroup - 1) / kGroup);
    of_lanes_.resize(highest_.size() * kLanes);
    const bool wrong = set_largest(logits, vocab_, highest_.data(), of_lanes_.data());
    best_ = *std::max_element(highest_.begin(), highest_.end());
    return !wrong && best_ < kInfinity;
  }

  int32_t first_of(float logit) const {
    const auto group = std::find(highest_.begin(), highest_.end(), logit) - highest_.begin();
    return static_cast<int32_t>(std::find(row_ + group * kGroup, row_ + vocab_, logit) - row_);
  }

  float score(float logit) const { return logit / temperature_; }
  Row row() const { return {row_, highest_.data(), vocab_, best_, temperature_}; }

  // The best of all tokens, if top-p or typical-p certainly leaves it. If it certainly does not,
  // none is left that it comes before, and the best of the others is next. After another truncation
  // it would not be so simple.
  int32_t sample(int64_t position) {
    noise_.at(s_.seed, position, vocab_);
    hopes_.resize(highest_.size());
    for (size_t group = 0; group < highest_.size(); ++group)
      hopes_[group] = score(highest_[group]) + noise_.most(group);
    least_ = s_.min_p > 0 ? score(best_) + std::log(s_.min_p) : -kInfinity;
    const bool nucleus = s_.top_p < 1;
    const bool typical = s_.typical_p < 1;
    const bool simple = !s_.top_k && !(typical && (nucleus || s_.min_p > 0));
    const double mass = typical ? s_.typical_p : s_.top_p;
    Range range{below(least_), kInfinity};
    for (cap_ = kInfinity; simple; cap_ = reached_) {
      const int32_t token = best_between(range);
      if (token < 0) break;  // all others tie with one that is not left
      if (!typical && !nucleus) return token;
      const double own = score(row_[token]);
      const double mine = std::exp(own - score(best_));
      const double near = 2 * error();
      const float first = below(own - blur());
      Sums sums =
          typical ? sums_of<true, true>(row(), first) : sums_of<false, true>(row(), first, first);
      if (nucleus) {
        if (sums.above - mine < (mass - near) * sums.weight) return token;
        sums.weight += sums_of<false, false>(row(), 0, -kInfinity, first).weight;
      }
      range = before(own, sums, 1);
      const double most = range.low == first ? sums.above : above(range.low);
      if (most - above(range.high) - mine < (mass - near) * sums.weight) return token;
      const Range least = before(own, sums, -1);
      if (above(least.low) - above(least.high) < (mass + near) * sums.weight) break;
    }
    cap_ = kInfinity;
    least_ = -kInfinity;
    truncate();
    return all_ ? best_between({-kInfinity, kInfinity}) : best_of_kept();
  }

  struct Range {
    float low, high;
  };

  // How much the order of typical-p is not known for rounding: that of scores is, but not what they
  // are from the entropy.
  double blur() const { return s_.typical_p < 1 ? 4 * error() * (1 + std::log(vocab_)) : 0; }

  // The logits of tokens that come before that of a score; `side`: 1 for all that may, and its own,
  // -1 for only those that certainly do.
  Range before(double own, const Sums& sums, int side) const {
    if (s_.typical_p == 1) return {side > 0 ? below(own) : -below(-own), kInfinity};
    const double mirrored = 2 * (score(best_) + sums.moment / sums.weight) - own;
    const double wider = side * blur();
    const double low = std::min(own, mirrored) - wider;
    const double high = std::max(own, mirrored) + wider;
    return side > 0 ? Range{below(low), -below(-high)} : Range{-below(-low), below(high)};
  }

  // The weight of logits that are not below a bound.
  double above(float bound) const {
    return bound < kInfinity ? sums_of<false, true>(row(), bound, bound).above : 0;
  }

  void truncate() {
    kept_.clear();
    if (s_.top_k > 0 && s_.top_k < vocab_) keep_top_k();
    if (s_.top_p < 1) keep_nucleus();
    if (s_.min_p > 0) keep_above(score(best_) + std::log(s_.min_p));
    if (s_.typical_p < 1) keep_typical();
  }

  // Sums of score and noise that are below do not matter; rounding is less than the margin.
  double floor() const { return reached_ - 1e-4 - 1e-6 * std::abs(reached_); }

  // Takes a token if its score and noise are more than those of the best one before; the noise of
  // most tokens need not be known.
  void consider(int32_t id, float score) {
    if (score < least_ || score + noise_.most(id / kGroup) < floor()) return;
    const double sum = score + noise_.of(id, floor() - score);
    if (sum < cap_ && (sum > reached_ || (sum == reached_ && id < winner_))) {
      winner_ = id;
      reached_ = sum;
    }
  }

  // The best token of those with such logits; -1: there is none.
  int32_t best_between(const Range& range) {
    winner_ = -1;
    reached_ = -kInfinity;
    const auto take = [&](int32_t id) {
      if (row_[id] >= range.low && row_[id] <= range.high) consider(id, score(row_[id]));
    };
    take(first_of(best_));
    const auto groups = static_cast<int32_t>(highest_.size());
    for (int32_t group = 0; group < groups; ++group) {
      if (const int32_t id = noise_.lucky(group); hopes_[group] >= floor() && id < vocab_) take(id);
    }
    for (int32_t group = 0; group < groups; ++group) {
      if (hopes_[group] >= floor())
        for_each_from(std::max(range.low, below(floor() - noise_.most(group))), group, take);
    }
    return winner_;
  }

  int32_t best_of_kept() {
    winner_ = -1;
    reached_ = -kInfinity;
    std::iter_swap(kept_.begin(),
                   std::max_element(kept_.begin(), kept_.end(),
                                    [](auto& a, auto& b) { return a.score < b.score; }));
    for (const Candidate& each : kept_) consider(each.id, each.score);
    return winner_;
  }

  // Calls a function for every token of a group whose logit is not below a bound.
  template <typename Function>
  void for_each_from(float bound, int32_t group, Function function) const {
    if (highest_[group] < bound) return;
    const int32_t start = group * kGroup;
    const int32_t end = std::min(vocab_, start + kGroup);
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      if (of_lanes_[group * kLanes + lane] < bound) continue;
      for (int32_t id = start + lane; id < end; id += kLanes) {
        if (row_[id] >= bound) function(id);
      }
    }
  }

  // Makes candidates of all tokens whose logits are not below a bound.
  void gather(float bound) {
    all_ = false;
    for (size_t group = 0; group < highest_.size(); ++group) {
      for_each_from(bound, static_cast<int32_t>(group),
                    [&](int32_t id) { kept_.push_back({score(row_[id]), id, 0, 0}); });
    }
  }

  template <typename Good>
  void keep(Good good) {
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(),
                               [&](const Candidate& each) { return !good(each); }),
                kept_.end());
  }

  // A logit below all that give a score, if any does: division rounds, and so does this.
  float below(double score) const {
    const auto logit = static_cast<float>(score * temperature_);
    return logit - 1e-6f * std::abs(logit) - std::numeric_limits<float>::min();
  }

  // A logit that n groups reach, and few more, if there are so many: found by halving, whose
  // branches are not guessed wrong.
  float nth_of_groups(int64_t n) const {
    const auto reached = [&](float logit) {
      return std::count_if(highest_.begin(), highest_.end(), [=](float x) { return x >= logit; }) >=
             n;
    };
    float depth = temperature_;
    while (!reached(best_ - depth) && depth < kInfinity) depth *= 2;
    float low = depth < kInfinity ? best_ - depth : -kInfinity;
    float high = best_ - depth / 2;
    for (int time = 0; time < 5; ++time) {
      const float middle = (low + high) / 2;
      (reached(middle) ? low : high) = middle;
    }
    return low;
  }

  void keep_top_k() {
    const auto k = static_cast<size_t>(s_.top_k);
    gather(below(score(nth_of_groups(s_.top_k))));
    scratch_.clear();
    for (const Candidate& each : kept_) scratch_.push_back(each.score);
    std::nth_element(scratch_.begin(), scratch_.begin() + k - 1, scratch_.end(), std::greater<>());
    keep([least = scratch_[k - 1]](const Candidate& each) { return each.score >= least; });
  }

  void keep_above(double bound) {
    if (all_) gather(below(bound));
    keep([&](const Candidate& each) { return each.score >= bound; });
  }

  // Weighs the candidates; their weight together.
  double weigh() {
    const double h = score(best_);
    double total = 0;
    for (Candidate& each : kept_) total += each.weight = std::exp(each.score - h);
    return total;
  }

  // Of a pass over all logits, as a part of its sum: its own, and that of scores, which are
  // rounded.
  double error() const { return 4e-6 + 2e-7 * std::abs(score(best_)); }

  // The fewest likeliest tokens that have `top_p` of the weight of all.
  void keep_nucleus() {
    const double h = score(best_);
    double total = 0;
    double near = 0;
    if (all_) {
      total = sums_of<false, false>(row()).weight;
      near = error() * total;
      // Tokens below have less than 1 - top_p together.
      const double lowest = std::log((1 - s_.top_p) / vocab_ * total) - 1e-3;
      for (double depth = -4;; depth *= 2) {
        gather(below(h + std::max(depth, lowest)));
        if (weigh() >= s_.top_p * total + near || depth <= lowest) break;
        kept_.clear();
      }
    } else {
      total = weigh();
    }
    for (Candidate& each : kept_) each.key = -each.score;
    auto [last, before] = border(s_.top_p * total);
    if (std::min(std::abs(before - s_.top_p * total),
                 std::abs(before + kept_[last].weight - s_.top_p * total)) < near) {
      total = 0;
      for (int32_t id = 0; id < vocab_; ++id) total += std::exp(score(row_[id]) - h);
      last = border(s_.top_p * total).first;
    }
    kept_.resize(last + 1);
  }

  // The tokens whose surprise is nearest to the entropy and that have `typical_p` of the weight
  // together.
  void keep_typical() {
    if (all_) gather(-kInfinity);
    const double h = score(best_);
    const double total = weigh();
    double mean = 0;
    for (const Candidate& each : kept_) {
      if (each.weight > 0) mean += each.weight / total * (each.score - h);
    }
    for (Candidate& each : kept_) each.key = std::abs(each.score - h - mean);
    const double farthest = kept_[border(s_.typical_p * total).first].key + kTie;
    keep([&](const Candidate& each) { return each.weight > 0 && each.key <= farthest; });
  }

  // In the order of keys and ids, the first candidate with which all so far weigh `mass`, and what
  // those before it weigh. Moves them so that those before it are before it.
  std::pair<size_t, double> border(double mass) {
    size_t low = 0;
    size_t high = kept_.size();
    double before = 0;
    while (high - low > 1) {
      const size_t middle = low + (high - low) / 2;
      std::nth_element(kept_.begin() + low, kept_.begin() + middle, kept_.begin() + high,
                       [](const Candidate& a, const Candidate& b) {
                         return a.key != b.key ? a.key < b.key : a.id < b.id;
                       });
      double more = 0;
      for (size_t at = low; at < middle; ++at) more += kept_[at].weight;
      if (before + more >= mass) {
        high = middle;
      } else {
        low = middle;
        before += more;
      }
    }
    return {low, before};
  }

  Draw s_;
  int32_t vocab_ = 0;
  Noise noise_;
  // The largest logit of each group, and of each of its lanes; what no score and noise of a group
  // exceed.
  std::vector<float> highest_, of_lanes_, hopes_, scratch_;
  const float* row_ = nullptr;
  float best_ = 0;
  float temperature_ = 1;
  bool all_ = true;  // whether nothing was cut yet; otherwise `kept_` has what is left
  std::vector<Candidate> kept_;
  int32_t winner_ = -1;
  double reached_ = 0;
  double cap_ = 0;    // sums have to be below it
  double least_ = 0;  // scores must not be below it
};
