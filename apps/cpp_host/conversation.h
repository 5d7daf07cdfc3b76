// One KV cache and the contract's functions on it, which ssdevice/contract.py describes. runtime/conversation.py is the same in Python.
#pragma once

#include <memory>
#include <numeric>

#include "choice.h"
#include "graph.h"

enum class Mode { kAdaptive, kSpeculative, kPlain };

// `length`: committed rows; going back means lowering it. `text`: their tokens; what follows them is undefined. `drafts`: what the next
// step verifies, `candidates` for each token; any ids may be written into it. `chooser`: chooses the tokens of a conversation that
// `chooses`; otherwise the graphs do, greedily. `graph_seconds`: of the calls of `step` and `plain`.
class Conversation {
 public:
  const int64_t context, vocab;
  const size_t candidates;
  const bool chooses;
  const bool streams;  // whether steps return drafts; otherwise all of them are the caller's
  const Mode mode;     // that of a bundle that has only one kind of call
  int64_t length = 0;
  Ids text, drafts;
  std::unique_ptr<Chooser> chooser;
  double graph_seconds = 0;

  Conversation(const Bundle& bundle, Mode wanted, bool choose, const Options& options)
      : context(bundle.geometry().context),
        vocab(bundle.geometry().vocab),
        candidates(bundle.geometry().k),
        chooses(choose),
        streams(choose ? bundle.has(kDraft) : bundle.streams()),
        mode(!bundle.has(kinds().first) ? Mode::kPlain : !bundle.has(kinds().second) ? Mode::kSpeculative : wanted),
        prefill_(bundle.graph(kPrefill), options, bundle.geometry().function(kPrefill)),
        cache_{2 * bundle.geometry().layers, bundle.geometry().capacity(),
               bundle.geometry().width * bytes_of(bundle.geometry().type)},
        nodes_(bundle.geometry().nodes) {
    const auto open = [&](const char* name) {
      return std::make_unique<Graph>(bundle.graph(name), options, bundle.geometry().function(name));
    };
    if (choose && !bundle.has(kVerify) && !bundle.has(kVerifyPlain)) {
      throw Error("the bundle chooses tokens greedily; to sample, export it with --choose host");
    }
    if (mode != Mode::kPlain) {
      step_ = open(kinds().first);
      drafts.resize(step_->ids["drafts"].size());
    }
    if (wanted == Mode::kPlain || mode != Mode::kSpeculative) plain_ = open(kinds().second);
    if (chooses && streams && step_) draft_ = open(kDraft);
  }

  bool knows(const Ids& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return id >= 0 && id < vocab; });
  }

  // Commits tokens of a prompt and returns the one that is likeliest after them.
  int32_t prefill(const Ids& prompt) {
    Ids& chunk = prefill_.ids["chunk"];
    for (size_t at = 0; at < prompt.size(); at += chunk.size()) {
      const size_t count = std::min(chunk.size(), prompt.size() - at);
      std::fill(std::copy_n(prompt.begin() + at, count, chunk.begin()), chunk.end(), 0);
      prefill_.ids["valid"][0] = static_cast<int32_t>(count);
      prefill_.run(cache_, length);
      keep(prefill_, prefill_.ids["next_root"], first(count));
      text.resize(length);
      text.insert(text.end(), prompt.begin() + at, prompt.begin() + at + count);
      length += count;
    }
    return prefill_.ids["next_root"][0];
  }

  // The tokens after `last`: the accepted drafts and the token after them. Sets `drafts`.
  Ids step(int32_t last) {
    std::copy(drafts.begin(), drafts.end(), step_->ids["drafts"].begin());
    call(*step_, last);
    const auto [path, tokens] = chooses ? walk() : accepted();
    keep(*step_, tokens, path);
    text.insert(text.end(), tokens.begin(), tokens.end() - 1);
    if (draft_) draft_after(path, tokens);
    return tokens;
  }

  // The token after `last`, in plain decoding. Does not change `drafts`.
  Ids plain(int32_t last) {
    call(*plain_, last);
    const Ids tokens = chooses ? Ids{(*chooser)(plain_->floats["logits"].data())} : plain_->ids["tokens"];
    keep(*plain_, tokens, {0});
    return tokens;
  }

 private:
  // A step and a plain call: the functions for them.
  std::pair<const char*, const char*> kinds() const {
    return chooses ? std::make_pair(kVerify, kVerifyPlain) : std::make_pair(kStep, kPlain);
  }

  static Ids first(size_t count) {
    Ids rows(count);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  void call(Graph& graph, int32_t last) {
    text.resize(length);
    text.push_back(last);
    graph.ids["root"][0] = last;
    graph_seconds += graph.run(cache_, length);
  }

  // The rows and tokens that the graph of a step chose.
  std::pair<Ids, Ids> accepted() {
    Ids tokens = step_->ids["tokens"];
    const int32_t count = step_->ids["count"][0];
    if (count < 1 || count > static_cast<int32_t>(tokens.size())) throw Error("a graph returned an impossible count");
    tokens.resize(count);
    return {first(count), tokens};
  }

  // The path through the tree of drafts from the root, and the tokens after its nodes: a child that holds the chosen token is entered,
  // the lowest node first; where none does, the path ends.
  std::pair<Ids, Ids> walk() {
    const Ids& verified = step_->ids["drafts"];
    Ids path{0}, tokens;
    for (;;) {
      const Shape& ranks = nodes_[path.back()];
      const int32_t token = (*chooser)(step_->floats["logits"].data() + path.back() * vocab);
      tokens.push_back(token);
      const auto child = std::find_if(nodes_.begin() + path.back() + 1, nodes_.end(), [&](const Shape& node) {
        return node.size() == ranks.size() + 1 && std::equal(ranks.begin(), ranks.end(), node.begin()) &&
               verified[ranks.size() * candidates + node.back()] == token;
      });
      if (child == nodes_.end()) return {path, tokens};
      path.push_back(static_cast<int32_t>(child - nodes_.begin()));
    }
  }

  void draft_after(const Ids& path, const Ids& tokens) {
    const std::vector<float>& states = step_->floats["states"];
    std::vector<float>& state = draft_->floats["last_state"];
    draft_->ids["token"][0] = tokens.back();
    std::copy_n(states.begin() + path.back() * state.size(), state.size(), state.begin());
    graph_seconds += draft_->run(cache_, length + path.size());
    const Ids& next = draft_->ids["next_drafts"];
    if (!knows(next)) throw Error("a graph returned a token that the model does not have");
    drafts = next;
  }

  // Commits the rows of some nodes. A damaged graph may return anything, and ids are used as indices.
  void keep(Graph& graph, const Ids& tokens, const Ids& nodes) {
    const auto found = graph.ids.find("next_drafts");
    const Ids* next = found == graph.ids.end() ? nullptr : &found->second;
    if (!knows(tokens) || (next && !knows(*next))) throw Error("a graph returned a token that the model does not have");
    if (next && next->size() == drafts.size()) drafts = *next;
    graph.commit(cache_, length, nodes);
  }

  Graph prefill_;
  std::unique_ptr<Graph> step_, plain_, draft_;
  Cache cache_;
  const std::vector<Shape> nodes_;  // of the tree of drafts
};
