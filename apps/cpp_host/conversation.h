// One KV cache and the contract's three functions on it, which ssdevice/contract.py describes. runtime/conversation.py is the
// same in Python.
#pragma once

#include <memory>

#include "graph.h"

enum class Mode { kAdaptive, kSpeculative, kPlain };

// `length`: committed rows; going back means lowering it. `text`: their tokens; what follows them is undefined. `drafts`: what the next
// step verifies, `candidates` for each token; any ids may be written into it. `graph_seconds`: of the calls of `step` and `plain`.
class Conversation {
 public:
  const int64_t context, vocab;
  const size_t candidates;
  const bool streams;  // whether steps return drafts; otherwise all of them are the caller's
  const Mode mode;     // that of a bundle that has only one kind of call
  int64_t length = 0;
  Ids text, drafts;
  double graph_seconds = 0;

  Conversation(const Bundle& bundle, Mode wanted, const Options& options)
      : context(bundle.geometry().context),
        vocab(bundle.geometry().vocab),
        candidates(bundle.geometry().k),
        streams(bundle.streams()),
        mode(!bundle.has(kStep) ? Mode::kPlain : !bundle.has(kPlain) ? Mode::kSpeculative : wanted),
        prefill_(bundle.graph(kPrefill), options, bundle.geometry().function(kPrefill)),
        cache_{2 * bundle.geometry().layers, bundle.geometry().capacity(),
               bundle.geometry().width * bytes_of(bundle.geometry().type)} {
    const auto open = [&](const char* name) {
      return std::make_unique<Graph>(bundle.graph(name), options, bundle.geometry().function(name));
    };
    if (mode != Mode::kPlain) {
      step_ = open(kStep);
      drafts.resize(step_->ids["drafts"].size());
    }
    if (wanted == Mode::kPlain || mode != Mode::kSpeculative) plain_ = open(kPlain);
  }

  bool knows(const Ids& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return id >= 0 && id < vocab; });
  }

  // Commits a prompt and returns the first token of the answer.
  int32_t prefill(const Ids& prompt) {
    Ids& chunk = prefill_.ids["chunk"];
    for (size_t at = 0; at < prompt.size(); at += chunk.size()) {
      const size_t count = std::min(chunk.size(), prompt.size() - at);
      std::fill(std::copy_n(prompt.begin() + at, count, chunk.begin()), chunk.end(), 0);
      prefill_.ids["valid"][0] = static_cast<int32_t>(count);
      prefill_.run(cache_, length);
      keep(prefill_, prefill_.ids["next_root"], count);
      text.resize(length);
      text.insert(text.end(), prompt.begin() + at, prompt.begin() + at + count);
      length += count;
    }
    return prefill_.ids["next_root"][0];
  }

  // The tokens after `last`: the accepted drafts and the token after them. Sets `drafts`.
  Ids step(int32_t last) {
    std::copy(drafts.begin(), drafts.end(), step_->ids["drafts"].begin());
    Ids tokens = call(*step_, last);
    const int32_t count = step_->ids["count"][0];
    if (count < 1 || count > static_cast<int32_t>(tokens.size())) throw Error("a graph returned an impossible count");
    tokens.resize(count);
    keep(*step_, tokens, count);
    text.insert(text.end(), tokens.begin(), tokens.end() - 1);
    return tokens;
  }

  // The token after `last`, in plain decoding. Does not change `drafts`.
  Ids plain(int32_t last) {
    const Ids tokens = call(*plain_, last);
    keep(*plain_, tokens, 1);
    return tokens;
  }

 private:
  const Ids& call(Graph& graph, int32_t last) {
    text.resize(length);
    text.push_back(last);
    graph.ids["root"][0] = last;
    graph_seconds += graph.run(cache_, length);
    return graph.ids["tokens"];
  }

  // Commits what a call returned. A damaged graph may return anything, and ids are used as indices.
  void keep(Graph& graph, const Ids& tokens, int64_t rows) {
    const auto found = graph.ids.find("next_drafts");
    const Ids* next = found == graph.ids.end() ? nullptr : &found->second;
    if (!knows(tokens) || (next && !knows(*next))) throw Error("a graph returned a token that the model does not have");
    if (next && next->size() == drafts.size()) drafts = *next;
    graph.commit(cache_, length, rows);
  }

  Graph prefill_;
  std::unique_ptr<Graph> step_, plain_;
  Cache cache_;
};
