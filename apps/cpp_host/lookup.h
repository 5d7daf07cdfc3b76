// Drafts that repeat the text: ssdevice/runtime/lookup.py in C++, which has the reasons for the
// numbers.
#pragma once

#include <map>
#include <optional>

#include "conversation.h"

// Makes steps whose drafts may repeat the text of their conversation.
class Lookup {
 public:
  // Another prompt is answered. What was learned lasts.
  void begin() {
    ends_.clear();
    indexed_ = 0;
  }

  // The tokens after `last`, from a step; none, without a step, if the model has no streams and
  // there is no draft to verify.
  Ids step(Conversation& conversation, int32_t last) {
    if (!conversation.streams) return step_without_streams(conversation, last);
    if (rest_) {
      --rest_;
      return conversation.step(last);
    }
    draft(conversation, last);
    const Ids tokens = conversation.step(last);
    learn(tokens);
    return tokens;
  }

 private:
  static constexpr size_t kShortest = 3;
  static constexpr size_t kAlone = 2;
  static constexpr size_t kLongest = 16;
  static constexpr size_t kCertain = 8;
  static constexpr size_t kRecent = 8;
  static constexpr int kStart = -2;
  static constexpr int kMost = 8;
  static constexpr int kFar = -16;
  static constexpr int kRest = 1024;

  // A draft of which lookup and the streams say different tokens.
  struct Difference {
    size_t depth;
    int32_t looked_up;
    int32_t streamed;
  };

  // A short step is enough unless a long match makes the drafts likely to be right.
  Ids step_without_streams(Conversation& conversation, int32_t last) {
    lead_ = kMost;
    // Where the host chooses tokens, the drafts are those of the step before.
    std::fill(conversation.drafts.begin(), conversation.drafts.end(), 0);
    draft(conversation, last);
    if (!differing_ || differing_->depth != 0) return {};
    return conversation.step(last, conversation.few && matched_ < kCertain);
  }

  // Moves the lead towards what was right where lookup and the streams differed.
  void learn(const Ids& tokens) {
    if (!differing_ || differing_->depth >= tokens.size()) return;
    const int32_t token = tokens[differing_->depth];
    const int lead = lead_ + (differing_->looked_up == token) - (differing_->streamed == token);
    lead_ = std::min(kMost, lead);
    if (lead_ <= kFar) {
      lead_ = kStart;
      rest_ = kRest;
    }
  }

  // Replaces drafts by those that repeat the text.
  void draft(Conversation& conversation, int32_t last) {
    // What follows the committed tokens is undefined, and the next call replaces it.
    Ids& text = conversation.text;
    text.resize(conversation.length);
    text.push_back(last);
    shortest_ = conversation.streams ? kShortest : kAlone;
    for (size_t end = std::max(indexed_, shortest_); end < text.size(); ++end) {
      ends_[before(text, end)].push_back(end);
    }
    indexed_ = text.size();
    differing_.reset();
    // Each draft is looked up after those before it.
    for (size_t depth = 0; depth * conversation.candidates < conversation.drafts.size(); ++depth) {
      int32_t best = conversation.drafts[depth * conversation.candidates];
      const std::optional<int32_t> found = next(conversation, text);
      if (depth == 0) matched_ = longest_;
      if (found && *found != best) {
        if (!differing_) differing_ = Difference{depth, *found, best};
        if (lead_ > 0) {
          conversation.propose(depth, *found);
          best = *found;
        }
      }
      text.push_back(best);
    }
  }

  Ids before(const Ids& text, size_t end) const {
    return {text.begin() + (end - shortest_), text.begin() + end};
  }

  // The token that followed the longest match of the text's end; the last occurrence wins a tie.
  // Without a match: what a phrase says.
  std::optional<int32_t> next(const Conversation& conversation, const Ids& text) {
    longest_ = 0;
    auto found = ends_.end();
    if (text.size() >= shortest_) found = ends_.find(before(text, text.size()));
    if (found == ends_.end()) return conversation.phrases.after(text);
    const std::vector<size_t>& ends = found->second;
    size_t best = 0;
    for (size_t back = 1; back <= std::min(ends.size(), kRecent) && longest_ < kLongest; ++back) {
      const size_t end = ends[ends.size() - back];
      const size_t most = std::min(end, kLongest);
      size_t size = 0;
      while (size < most && text[end - 1 - size] == text[text.size() - 1 - size]) ++size;
      if (size > longest_) {
        best = end;
        longest_ = size;
      }
    }
    return text[best];
  }

  // How much more often lookup was right than the first candidate of a stream, where the two
  // differed. Drafts are looked up while it is positive, and learned from in any case.
  int lead_ = kStart;
  int rest_ = 0;  // steps without lookup from now on
  // Where the shortest match ends and another token follows.
  std::map<Ids, std::vector<size_t>> ends_;
  size_t shortest_ = kShortest;          // tokens that must have occurred before
  size_t indexed_ = 0;                   // tokens of the text whose matches are in there
  size_t longest_ = 0;                   // tokens of the last match
  size_t matched_ = 0;                   // tokens of the match for the first draft
  std::optional<Difference> differing_;  // the first one of the last draft
};
