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
  const bool steps = mode != Mode::kPlain;
  const bool plainly = mode == Mode::kPlain || mode == Mode::kAdaptive;
  std::vector<const char*> found{kPrefill};
  if (steps) found.push_back(chooses ? kVerify : kStep);
  if (steps && chooses) found.push_back(kDraft);
  if (plainly) found.push_back(chooses ? kVerifyPlain : kPlain);
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
  size_t tokens = 0;
  size_t calls = 0;
  double seconds = 0;
  double call_seconds = 0;
};

// The answer to a prompt, its stop token included. What the prompt begins with and the cache holds
// is not computed again.
inline Ids decode(Conversation& conversation, Adaptive& adaptive, Mode mode, const Ids& prompt,
                  const Ids& stops, int64_t max_tokens, Statistics& statistics) {
  const auto start = static_cast<int64_t>(prompt.size());
  int64_t room = std::min(max_tokens, conversation.context - start + 1);
  Ids run = begin(conversation, adaptive, mode, prompt);
  Ids answer;
  size_t first = 0;  // tokens of the first run
  const double begun = now();
  const double call_seconds = conversation.call_seconds;
  while (true) {
    run.resize(std::min<size_t>(run.size(), room));
    const auto stop = std::find_first_of(run.begin(), run.end(), stops.begin(), stops.end());
    const bool stopped = stop != run.end();
    answer.insert(answer.end(), run.begin(), stopped ? stop + 1 : stop);
    if (first == 0) first = answer.size();
    const auto emitted = static_cast<int64_t>(answer.size());
    // The next call overwrites the rows of tokens that do not count.
    conversation.length = start + emitted - 1;
    room = std::min(max_tokens - emitted, conversation.context - conversation.length);
    if (stopped || room <= 0) break;
    run = advance(conversation, adaptive, mode, answer.back());
    ++statistics.calls;
  }
  statistics.tokens += answer.size() - first;
  statistics.seconds += now() - begun;
  statistics.call_seconds += conversation.call_seconds - call_seconds;
  return answer;
}
