// The decoding loop: which calls it makes, and which of their tokens count.
// ssdevice/runtime/loop.py is the same in Python.
#pragma once

#include "adaptive.h"

// Speculative decoding where it pays, always, never, and never but with the graph of a step, whose
// first token does not depend on drafts.
enum class Mode { kAdaptive, kSpeculative, kPlain, kPlainStep };

// The mode in place of one that needs functions which an engine does not have.
inline Mode possible(Mode wanted, bool has_step, bool has_plain) {
  const bool speculates = wanted == Mode::kAdaptive || wanted == Mode::kSpeculative;
  if (!has_step) return Mode::kPlain;
  if (!has_plain) return speculates ? Mode::kSpeculative : Mode::kPlainStep;
  return wanted;
}

// The functions that answers in a mode call, if the engine has them.
inline std::vector<const char*> functions_for(Mode mode, bool chooses) {
  std::vector<const char*> found{kPrefill};
  if (mode != Mode::kPlain)
    found.insert(found.end(), {chooses ? kVerify : kStep, chooses ? kDraft : kStep});
  if (mode == Mode::kPlain || mode == Mode::kAdaptive)
    found.push_back(chooses ? kVerifyPlain : kPlain);
  if (mode == Mode::kAdaptive && !chooses) found.push_back(kStepShort);
  return found;
}

// The tokens after `last`.
inline Ids advance(Conversation& conversation, Adaptive& adaptive, Mode mode, int32_t last) {
  if (mode == Mode::kAdaptive) return adaptive.next(conversation, last);
  if (mode == Mode::kPlain) return conversation.plain(last);
  Ids tokens = conversation.step(last);
  if (mode == Mode::kPlainStep) tokens.resize(1);
  return tokens;
}

// The first tokens of the answer: prefill's, or where the host chooses, those of a call after the
// prompt's last.
inline Ids begin(Conversation& conversation, Adaptive& adaptive, Mode mode, const Ids& prompt) {
  adaptive.lookup.begin();
  conversation.length = conversation.shared(prompt);
  const auto rest = prompt.begin() + conversation.length;
  if (!conversation.chooser) return {conversation.prefill({rest, prompt.end()})};
  if (prompt.end() - rest > 1) conversation.prefill({rest, prompt.end() - 1});
  return advance(conversation, adaptive, mode, prompt.back());
}

// What decoding took, without the first tokens of answers. `call_seconds`: inside the engine.
struct Statistics {
  size_t tokens = 0, calls = 0;
  double seconds = 0, call_seconds = 0;
};

// The answer to a prompt, its stop token included. What the prompt begins with and the cache holds
// is not computed again.
inline Ids decode(Conversation& conversation, Adaptive& adaptive, Mode mode, const Ids& prompt,
                  const Ids& stops, int64_t max_tokens, Statistics& statistics) {
  Ids answer, run = begin(conversation, adaptive, mode, prompt);
  const auto start = static_cast<int64_t>(prompt.size());
  run.resize(std::min<size_t>(run.size(), std::min(max_tokens, conversation.context - start + 1)));
  const double begun = now(), calls = conversation.call_seconds;
  for (size_t before = 0;; before = answer.size(), ++statistics.calls) {
    const auto stop = std::find_first_of(run.begin(), run.end(), stops.begin(), stops.end());
    answer.insert(answer.end(), run.begin(), stop == run.end() ? stop : stop + 1);
    if (before) statistics.tokens += answer.size() - before;
    const auto emitted = static_cast<int64_t>(answer.size());
    conversation.length =
        start + emitted - 1;  // the next call overwrites the rows of tokens that do not count
    const int64_t room = std::min(max_tokens - emitted, conversation.context - conversation.length);
    if (stop != run.end() || room <= 0) break;
    run = advance(conversation, adaptive, mode, answer.back());
    run.resize(std::min<size_t>(run.size(), room));
  }
  statistics.seconds += now() - begun;
  statistics.call_seconds += conversation.call_seconds - calls;
  return answer;
}
