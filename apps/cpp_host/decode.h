// The decoding loop: which calls it makes, and what they verify. runtime/loop.py, adaptive.py and lookup.py are the same in
// Python, with the reasons for the numbers here.
#pragma once

#include <array>

#include "conversation.h"

// Drafts that repeat the text: what followed the longest match of its end, where that has at least three tokens.
class Lookup {
 public:
  // Writes first candidates into the conversation's drafts. Whether there is one for the first token.
  static bool draft(Conversation& conversation, int32_t last) {
    Ids& text = conversation.text;  // what follows the committed tokens is undefined, and the next call replaces it
    text.resize(conversation.length);
    text.push_back(last);
    size_t found = 0;
    for (size_t at = 0; at < conversation.drafts.size(); at += conversation.candidates, ++found) {
      const size_t end = match(text);
      if (!end) break;
      text.push_back(conversation.drafts[at] = text[end]);
    }
    return found > 0;
  }

 private:
  static constexpr size_t kShortest = 3, kLongest = 16;

  // Where the token stands that followed the longest match, the last of those; 0 without one.
  static size_t match(const Ids& text) {
    size_t best = 0, longest = kShortest - 1;
    for (size_t end = text.size() - 1; end >= kShortest && longest < kLongest; --end) {
      size_t size = 0;
      while (size < std::min(end, kLongest) && text[end - 1 - size] == text[text.size() - 1 - size]) ++size;
      if (size > longest) best = end, longest = size;
    }
    return best;
  }
};

// Speculative decoding where it pays: a cumulative sum test of what steps gain over plain calls pauses them while they lose.
class Adaptive {
 public:
  // The tokens after `last`, from a step or from a plain call.
  Ids next(Conversation& conversation, int32_t last) {
    const int until = !plain_.known() ? 4 : gained_ > 0.5 * steps_ ? 256 : 64;  // steps before a plain call
    if (!paused_ && steps_ < until && (conversation.streams || Lookup::draft(conversation, last))) {
      return by_step(conversation, last);
    }
    const double start = now();
    const Ids tokens = conversation.plain(last);
    plain_.add(now() - start);
    Ids& drafts = conversation.drafts;  // what follows its first token still fits, if that is what the model said
    std::copy(drafts.begin() + conversation.candidates, drafts.end(), drafts.begin());
    paused_ = std::max(0, paused_ - 1);
    if (plain_.known()) steps_ = 0, gained_ = 0;
    return tokens;
  }

 private:
  // Seconds of a kind of call: the median of the last eight, without the very first, which makes bindings.
  class Cost {
   public:
    bool known() const { return count_ > 3; }

    void add(double seconds) {
      if (count_++) times_[(count_ - 2) % times_.size()] = seconds;
    }

    double seconds() const {
      auto sorted = times_;
      const size_t size = std::min(count_ - 1, times_.size());
      std::nth_element(sorted.begin(), sorted.begin() + size / 2, sorted.begin() + size);
      return sorted[size / 2];
    }

   private:
    std::array<double, 8> times_{};
    size_t count_ = 0;
  };

  Ids by_step(Conversation& conversation, int32_t last) {
    const double start = now();
    const Ids tokens = conversation.step(last);
    step_.add(now() - start);
    if (++steps_ < 2 || !plain_.known() || !step_.known()) return tokens;  // after a plain call a draft is an old one
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
  static constexpr int kFirstPause = 32, kLongestPause = 1024;
  Cost plain_, step_;
  double lost_ = 0, won_ = 0, gained_ = 0;  // since the best moment, in the end, since the last plain call
  int steps_ = 0, pause_ = kFirstPause, paused_ = 0;
};

// The tokens after `last`, in the conversation's mode.
inline Ids advance(Conversation& conversation, Adaptive& adaptive, int32_t last) {
  if (conversation.mode == Mode::kAdaptive) return adaptive.next(conversation, last);
  if (conversation.mode == Mode::kPlain) return conversation.plain(last);
  if (!conversation.streams) Lookup::draft(conversation, last);
  return conversation.step(last);
}

// The first tokens of the answer: prefill's, or where the host chooses, those of a call after the prompt's last.
inline Ids begin(Conversation& conversation, Adaptive& adaptive, const Ids& prompt) {
  conversation.length = 0;
  if (!conversation.chooses) return {conversation.prefill(prompt)};
  conversation.prefill({prompt.begin(), prompt.end() - 1});
  return advance(conversation, adaptive, prompt.back());
}

// What decoding took, without the first tokens of answers. `graph_seconds`: in graphs.
struct Statistics {
  size_t tokens = 0, calls = 0;
  double seconds = 0, graph_seconds = 0;
};

// The answer to a prompt, its stop token included.
inline Ids decode(Conversation& conversation, Adaptive& adaptive, const Ids& prompt, const Ids& stops, int64_t max_tokens,
                  Statistics& statistics) {
  Ids answer, run = begin(conversation, adaptive, prompt);
  const auto start = static_cast<int64_t>(prompt.size());
  run.resize(std::min<size_t>(run.size(), std::min(max_tokens, conversation.context - start + 1)));
  const double begun = now(), graphs = conversation.graph_seconds;
  for (size_t before = 0;; before = answer.size(), ++statistics.calls) {
    const auto stop = std::find_first_of(run.begin(), run.end(), stops.begin(), stops.end());
    answer.insert(answer.end(), run.begin(), stop == run.end() ? stop : stop + 1);
    if (before) statistics.tokens += answer.size() - before;
    const auto emitted = static_cast<int64_t>(answer.size());
    conversation.length = start + emitted - 1;  // the next call overwrites the rows of tokens that do not count
    const int64_t room = std::min(max_tokens - emitted, conversation.context - conversation.length);
    if (stop != run.end() || room <= 0) break;
    run = advance(conversation, adaptive, answer.back());
    run.resize(std::min<size_t>(run.size(), room));
  }
  statistics.seconds += now() - begun;
  statistics.graph_seconds += conversation.graph_seconds - graphs;
  return answer;
}
