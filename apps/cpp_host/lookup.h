// Drafts that repeat the text: runtime/lookup.py in C++, which has the reasons for the numbers.
#pragma once

#include <map>

#include "conversation.h"

// Makes steps whose drafts may repeat the text of their conversation. `lead`: how much more often lookup was right than the first
// candidate of a stream, where the two differed; drafts are looked up while it is positive, and learned from in any case.
class Lookup {
 public:
  // Another prompt is answered. What was learned lasts.
  void begin() { ends_.clear(), indexed_ = 0; }

  // The tokens after `last`, from a step; none, without a step, if the model has no streams and the text does not repeat itself.
  Ids step(Conversation& conversation, int32_t last) {
    if (!conversation.streams) {
      lead_ = kMost;
      draft(conversation, last);
      return differing_ && depth_ == 0 ? conversation.step(last) : Ids{};
    }
    if (rest_) return --rest_, conversation.step(last);
    draft(conversation, last);
    const Ids tokens = conversation.step(last);
    if (differing_ && depth_ < tokens.size()) {
      lead_ = std::min(kMost, lead_ + (looked_up_ == tokens[depth_]) - (streamed_ == tokens[depth_]));
      if (lead_ <= kFar) lead_ = kStart, rest_ = kRest;
    }
    return tokens;
  }

 private:
  static constexpr size_t kShortest = 3, kAlone = 2, kLongest = 16, kRecent = 8;
  static constexpr int kStart = -2, kMost = 8, kFar = -16, kRest = 1024;

  void draft(Conversation& conversation, int32_t last) {
    Ids& text = conversation.text;  // what follows the committed tokens is undefined, and the next call replaces it
    text.resize(conversation.length);
    text.push_back(last);
    shortest_ = conversation.streams ? kShortest : kAlone;
    for (size_t end = std::max(indexed_, shortest_); end < text.size(); ++end) ends_[before(text, end)].push_back(end);
    indexed_ = text.size(), differing_ = false;
    for (size_t depth = 0; depth * conversation.candidates < conversation.drafts.size(); ++depth) {
      int32_t best = conversation.drafts[depth * conversation.candidates];
      if (const size_t at = match(text); at && text[at] != best) {
        if (!differing_) differing_ = true, depth_ = depth, looked_up_ = text[at], streamed_ = best;
        if (lead_ > 0) conversation.propose(depth, best = text[at]);
      }
      text.push_back(best);
    }
  }

  Ids before(const Ids& text, size_t end) const { return {text.begin() + (end - shortest_), text.begin() + end}; }

  // Where the token stands that followed the longest match of the text's end; the last of those wins a tie. 0 without one.
  size_t match(const Ids& text) const {
    if (text.size() < shortest_) return 0;
    const auto found = ends_.find(before(text, text.size()));
    if (found == ends_.end()) return 0;
    const std::vector<size_t>& ends = found->second;
    size_t best = 0, longest = 0;
    for (size_t back = 1; back <= std::min(ends.size(), kRecent) && longest < kLongest; ++back) {
      const size_t end = ends[ends.size() - back];
      size_t size = 0;
      while (size < std::min(end, kLongest) && text[end - 1 - size] == text[text.size() - 1 - size]) ++size;
      if (size > longest) best = end, longest = size;
    }
    return best;
  }

  int lead_ = kStart, rest_ = 0;
  std::map<Ids, std::vector<size_t>> ends_;  // where the shortest match ends and another token follows
  size_t shortest_ = kShortest;              // tokens that must have occurred before
  size_t indexed_ = 0;                       // tokens of the text whose matches are in there
  bool differing_ = false;                   // whether a draft differed from the streams'; then the first one's depth, and both tokens
  size_t depth_ = 0;
  int32_t looked_up_ = 0, streamed_ = 0;
};
