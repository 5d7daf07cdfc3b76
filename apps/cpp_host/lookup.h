// Drafts that repeat the text: ssdevice/runtime/lookup.py in C++, which has the reasons for the
// numbers.
#pragma once

#include <map>
#include <optional>

#include "conversation.h"

// Makes steps whose drafts may repeat the text of their conversation. `lead`: how much more often
// lookup was right than the first candidate of a stream, where the two differed; drafts are looked
// up while it is positive, and learned from in any case.
class Lookup {
 public:
  // Another prompt is answered. What was learned lasts.
  void begin() { ends_.clear(), indexed_ = 0; }

  // The tokens after `last`, from a step; none, without a step, if the model has no streams, the
  // text does not repeat itself, and it ends with no phrase. Without streams a short step is enough
  // unless a long match makes drafts likely to be right.
  Ids step(Conversation& conversation, int32_t last) {
    if (!conversation.streams) {
      lead_ = kMost;
      std::fill(conversation.drafts.begin(), conversation.drafts.end(),
                0);  // where the host chooses tokens, those of the step before
      draft(conversation, last);
      return differing_ && depth_ == 0
                 ? conversation.step(last, conversation.few && matched_ < kCertain)
                 : Ids{};
    }
    if (rest_) return --rest_, conversation.step(last);
    draft(conversation, last);
    const Ids tokens = conversation.step(last);
    if (differing_ && depth_ < tokens.size()) {
      lead_ =
          std::min(kMost, lead_ + (looked_up_ == tokens[depth_]) - (streamed_ == tokens[depth_]));
      if (lead_ <= kFar) lead_ = kStart, rest_ = kRest;
    }
    return tokens;
  }

 private:
  static constexpr size_t kShortest = 3, kAlone = 2, kLongest = 16, kCertain = 8, kRecent = 8;
  static constexpr int kStart = -2, kMost = 8, kFar = -16, kRest = 1024;

  void draft(Conversation& conversation, int32_t last) {
    Ids& text =
        conversation
            .text;  // what follows the committed tokens is undefined, and the next call replaces it
    text.resize(conversation.length);
    text.push_back(last);
    shortest_ = conversation.streams ? kShortest : kAlone;
    for (size_t end = std::max(indexed_, shortest_); end < text.size(); ++end)
      ends_[before(text, end)].push_back(end);
    indexed_ = text.size(), differing_ = false;
    for (size_t depth = 0; depth * conversation.candidates < conversation.drafts.size(); ++depth) {
      int32_t best = conversation.drafts[depth * conversation.candidates];
      const std::optional<int32_t> found = next(conversation, text);
      if (depth == 0) matched_ = longest_;
      if (found && *found != best) {
        if (!differing_) differing_ = true, depth_ = depth, looked_up_ = *found, streamed_ = best;
        if (lead_ > 0) conversation.propose(depth, best = *found);
      }
      text.push_back(best);
    }
  }

  Ids before(const Ids& text, size_t end) const {
    return {text.begin() + (end - shortest_), text.begin() + end};
  }

  // The token that followed the longest match of the text's end; the last occurrence wins a tie.
  // Without one it is what phrases say.
  std::optional<int32_t> next(const Conversation& conversation, const Ids& text) {
    longest_ = 0;
    const auto found =
        text.size() < shortest_ ? ends_.end() : ends_.find(before(text, text.size()));
    if (found == ends_.end()) return conversation.phrases.after(text);
    const std::vector<size_t>& ends = found->second;
    size_t best = 0;
    for (size_t back = 1; back <= std::min(ends.size(), kRecent) && longest_ < kLongest; ++back) {
      const size_t end = ends[ends.size() - back];
      size_t size = 0;
      while (size < std::min(end, kLongest) && text[end - 1 - size] == text[text.size() - 1 - size])
        ++size;
      if (size > longest_) best = end, longest_ = size;
    }
    return text[best];
  }

  int lead_ = kStart, rest_ = 0;
  std::map<Ids, std::vector<size_t>>
      ends_;                          // where the shortest match ends and another token follows
  size_t shortest_ = kShortest;       // tokens that must have occurred before
  size_t indexed_ = 0;                // tokens of the text whose matches are in there
  size_t longest_ = 0, matched_ = 0;  // tokens of the last match, and of that of the first draft
  bool differing_ = false;  // whether a draft differed from the streams'; then the first one's
                            // depth, and both tokens
  size_t depth_ = 0;
  int32_t looked_up_ = 0, streamed_ = 0;
};
