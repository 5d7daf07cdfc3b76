// The choice of a token from a row of processed logits: the rest of runtime/sampling/choice.py in C++, for hosts in C++ and, as a function
// of the kernels' library, for Python's. Hosts agree on it for a seed, so precisions are part of the definition: the division by the
// temperature is in float, without fused multiply-adds, the rest is in double.
#pragma once

#include <limits>
#include <utility>

#include "noise.h"
#include "scan.h"

// How a token is drawn; by default the likeliest is taken. Names and meaning are those of Python's Sampling.
struct Draw {
  double temperature = 0, top_p = 1, min_p = 0, typical_p = 1;
  int64_t top_k = 0;
  uint64_t seed = 0;
};

// Draws tokens; its memory serves one row after another.
class Sampler {
 public:
  // What there is instead of a token: logits that are not numbers, and a row of which all are -infinity.
  static constexpr int32_t kNoNumbers = -1, kNoToken = -2;

  // The token of logits [vocab] at a position, or one of the constants.
  int32_t operator()(const float* logits, int64_t vocab, const Draw& draw, int64_t position) {
    s_ = draw, vocab_ = static_cast<int32_t>(vocab), temperature_ = static_cast<float>(draw.temperature);
    all_ = true;
    if (!measure(logits)) return kNoNumbers;
    if (!std::isfinite(best_)) return kNoToken;
    return draw.temperature > 0 ? sample(position) : first_of(best_);
  }

  // The logarithm of the sum of exp(logit), and the `ids` of as many tokens as it has, the likeliest first, ties by id.
  double log_total(const float* logits, int64_t vocab, int32_t* ids, int64_t count) {
    vocab_ = static_cast<int32_t>(vocab), temperature_ = 1, all_ = true;
    measure(logits);
    kept_.clear();
    if (count > 0) gather(nth_of_groups(count));
    const auto end = kept_.begin() + std::min<int64_t>(count, kept_.size());  // fewer if there are NaN
    std::partial_sort(kept_.begin(), end, kept_.end(), [](const Candidate& a, const Candidate& b) {
      return a.score != b.score ? a.score > b.score : a.id < b.id;
    });
    std::transform(kept_.begin(), end, ids, [](const Candidate& each) { return each.id; });
    return best_ + std::log(weight_of_all(row_, vocab_, best_, 1));
  }

  // How many tokens truncation left for the last choice, whose logits are still there.
  int64_t left() {
    if (all_) truncate();
    return all_ ? std::count_if(row_, row_ + vocab_, [](float x) { return std::isfinite(x); })
                : std::count_if(kept_.begin(), kept_.end(), [](const Candidate& each) { return std::isfinite(each.score); });
  }

 private:
  struct Candidate {
    float score;
    int32_t id;
    double weight, key;  // exp(score - the largest); what `border` sorts by
  };

  // Finds the largest logit, of each group and of all. Whether none is NaN or infinity.
  bool measure(const float* logits) {
    row_ = logits;
    highest_.resize((vocab_ + Noise::kGroup - 1) / Noise::kGroup);
    const bool wrong = set_largest(logits, vocab_, Noise::kGroup, highest_.data());
    best_ = *std::max_element(highest_.begin(), highest_.end());
    return !wrong && best_ < std::numeric_limits<float>::infinity();
  }

  int32_t first_of(float logit) const {
    const auto group = std::find(highest_.begin(), highest_.end(), logit) - highest_.begin();
    return static_cast<int32_t>(std::find(row_ + group * Noise::kGroup, row_ + vocab_, logit) - row_);
  }

  float score(float logit) const { return logit / temperature_; }

  int32_t sample(int64_t position) {
    noise_.at(s_.seed, position, vocab_);
    const bool few = s_.top_k > 0 || s_.min_p > 0 || s_.typical_p < 1;  // are left, whose noise is soon compared
    if (!few) {
      const int32_t token = best_of_all();
      if (s_.top_p == 1 || in_nucleus(token)) return token;
    }
    truncate();
    return all_ ? best_of_all() : best_of_kept();
  }

  // Whether top-p certainly leaves a token, which the likelier ones show soon; else unknown.
  bool in_nucleus(int32_t token) const {
    const float own = row_[token];
    const double h = score(best_), mine = std::exp(score(own) - h), mass = s_.top_p - error();
    double likelier = -mine;  // it is counted as well
    for (size_t group = 0; group < highest_.size(); ++group) {
      if (highest_[group] < own) continue;
      const auto start = static_cast<int32_t>(group) * Noise::kGroup, end = std::min(vocab_, start + Noise::kGroup);
      for (int32_t id = start; id < end; ++id) {
        if (row_[id] >= own) likelier += std::exp(score(row_[id]) - h);
      }
    }
    return likelier < mass * (likelier + mine) || likelier < mass * weight_of_all(row_, vocab_, best_, temperature_);
  }

  void truncate() {
    kept_.clear();
    if (s_.top_k > 0 && s_.top_k < vocab_) keep_top_k();
    if (s_.top_p < 1) keep_nucleus();
    if (s_.min_p > 0) keep_above(score(best_) + std::log(s_.min_p));
    if (s_.typical_p < 1) keep_typical();
  }

  // Takes a token if its score and noise are more than those of the best one before; the noise of most tokens need not be known.
  void consider(int32_t id, float score) {
    if (score + noise_.most(id / Noise::kGroup) < reached_ - 1e-6) return;
    const double sum = score + noise_.of(id);
    if (sum > reached_ || (sum == reached_ && id < winner_)) winner_ = id, reached_ = sum;
  }

  int32_t best_of_all() {
    winner_ = -1, reached_ = -std::numeric_limits<double>::infinity();
    const auto groups = static_cast<int32_t>(highest_.size());
    for (int32_t group = 0; group < groups; ++group) {
      if (const int32_t id = noise_.lucky(group); id < vocab_) consider(id, score(row_[id]));
    }
    for (int32_t group = 0; group < groups; ++group) {
      const float bound = below(reached_ - 1e-6 - noise_.most(group));
      if (highest_[group] < bound) continue;
      const int32_t end = std::min(vocab_, (group + 1) * Noise::kGroup);
      for (int32_t id = group * Noise::kGroup; id < end; ++id) {
        if (row_[id] >= bound) consider(id, score(row_[id]));
      }
    }
    return winner_;
  }

  int32_t best_of_kept() {
    winner_ = -1, reached_ = -std::numeric_limits<double>::infinity();
    std::iter_swap(kept_.begin(), std::max_element(kept_.begin(), kept_.end(), [](auto& a, auto& b) { return a.score < b.score; }));
    for (const Candidate& each : kept_) consider(each.id, each.score);
    return winner_;
  }

  // Makes candidates of all tokens whose logits are not below a bound.
  void gather(float bound) {
    all_ = false;
    for (size_t group = 0; group < highest_.size(); ++group) {
      if (highest_[group] < bound) continue;
      const auto start = static_cast<int32_t>(group) * Noise::kGroup, end = std::min(vocab_, start + Noise::kGroup);
      for (int32_t id = start; id < end; ++id) {
        if (row_[id] >= bound) kept_.push_back({score(row_[id]), id, 0, 0});
      }
    }
  }

  template <typename Good>
  void keep(Good good) {
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [&](const Candidate& each) { return !good(each); }), kept_.end());
  }

  // A logit below all that give a score, if any does: division rounds, and so does this.
  float below(double score) const {
    const auto logit = static_cast<float>(score * temperature_);
    return logit - 1e-6f * std::abs(logit) - std::numeric_limits<float>::min();
  }

  // A logit that the n-th largest is not below: the n-th largest of the groups' largest, if there are so many.
  float nth_of_groups(int64_t n) {
    if (n > static_cast<int64_t>(highest_.size())) return -std::numeric_limits<float>::infinity();
    scratch_ = highest_;
    std::nth_element(scratch_.begin(), scratch_.begin() + n - 1, scratch_.end(), std::greater<>());
    return scratch_[n - 1];
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

  // Of a pass over all logits, as a part of its sum: its own, and that of scores, which are rounded.
  double error() const { return 4e-6 + 2e-7 * std::abs(score(best_)); }

  // The fewest likeliest tokens that have `top_p` of the weight of all.
  void keep_nucleus() {
    const double h = score(best_);
    double total = 0, near = 0;
    if (all_) {
      total = weight_of_all(row_, vocab_, best_, temperature_);
      near = error() * total;
      const double lowest = std::log((1 - s_.top_p) / vocab_ * total) - 1e-3;  // tokens below have less than 1 - top_p together
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
    if (std::min(std::abs(before - s_.top_p * total), std::abs(before + kept_[last].weight - s_.top_p * total)) < near) {
      total = 0;
      for (int32_t id = 0; id < vocab_; ++id) total += std::exp(score(row_[id]) - h);
      last = border(s_.top_p * total).first;
    }
    kept_.resize(last + 1);
  }

  // The tokens whose surprise is nearest to the entropy and that have `typical_p` of the weight together. Of the unlikeliest tokens
  // it takes the weight together to know these.
  void keep_typical() {
    constexpr auto kAll = -std::numeric_limits<float>::infinity();
    for (const double depth : {-8.0, -16.0}) {
      if (!all_) break;
      const float bound = below(score(best_) + depth);
      gather(bound);
      if (keep_nearest(sums_of(row_, vocab_, best_, temperature_, bound), depth)) return;
      all_ = true;
      kept_.clear();
    }
    if (all_) gather(kAll);
    keep_nearest({}, kAll);
  }

  // Of the candidates. `rest`: the sums of all other tokens, which weigh less than exp(depth) each. Whether it is certain that the
  // last digits of these sums do not matter, and that none of these tokens is as near; only then any are dropped.
  bool keep_nearest(const Sums& rest, double depth) {
    const double h = score(best_), total = weigh() + rest.weight, mass = s_.typical_p * total;
    double mean = rest.moment / total;
    for (const Candidate& each : kept_) {
      if (each.weight > 0) mean += each.weight / total * (each.score - h);
    }
    for (Candidate& each : kept_) each.key = std::abs(each.score - h - mean);
    const auto [last, before] = border(mass);
    const Candidate farthest = kept_[last];
    if (std::isfinite(depth)) {
      const double near = 1e-12 + error() * (rest.weight - rest.moment) / total;
      const bool apart = std::none_of(kept_.begin(), kept_.end(), [&](const Candidate& each) {
        return each.score != farthest.score && std::abs(each.key - farthest.key) < near;
      });
      if (!apart || farthest.key > mean - depth - near || mass - before < near * total || before + farthest.weight - mass < near * total) {
        return false;
      }
    }
    keep([&](const Candidate& each) { return each.weight > 0 && each.key <= farthest.key; });
    return true;
  }

  // In the order of keys and ids, the first candidate with which all so far weigh `mass`, and what those before it weigh. Moves them so
  // that those before it are before it.
  std::pair<size_t, double> border(double mass) {
    size_t low = 0, high = kept_.size();
    double before = 0;
    while (high - low > 1) {
      const size_t middle = low + (high - low) / 2;
      std::nth_element(kept_.begin() + low, kept_.begin() + middle, kept_.begin() + high,
                       [](const Candidate& a, const Candidate& b) { return a.key != b.key ? a.key < b.key : a.id < b.id; });
      double more = 0;
      for (size_t at = low; at < middle; ++at) more += kept_[at].weight;
      if (before + more >= mass) {
        high = middle;
      } else {
        low = middle, before += more;
      }
    }
    return {low, before};
  }

  Draw s_;
  int32_t vocab_ = 0;
  Noise noise_;
  std::vector<float> highest_, scratch_;  // `highest_`: the largest logit of each group of Noise
  const float* row_ = nullptr;
  float best_ = 0, temperature_ = 1;
  bool all_ = true;  // whether nothing was cut yet; otherwise `kept_` has what is left
  std::vector<Candidate> kept_;
  int32_t winner_ = -1;
  double reached_ = 0;
};
