// One KV cache and the contract's three functions on it, which ssdevice/contract.py describes. runtime/conversation.py is the
// same in Python.
#pragma once

#include <iterator>
#include <memory>
#include <sstream>

#include "graph.h"

// manifest.json of a bundle.
class Manifest {
 public:
  explicit Manifest(const fs::path& bundle) : file_((bundle / "manifest.json").string()) {
    std::ifstream stream(file_);
    text_.assign(std::istreambuf_iterator<char>(stream), {});
    if (text_.empty()) throw Error(file_ + ": there is no such file");
  }

  // The number or numbers of a key. Within a string quotes are escaped, so `"key":` is always a key, and a bundle's own
  // keys come before those of its apps.
  Ids numbers(const std::string& key) const {
    const auto at = text_.find('"' + key + "\":");
    const auto from = text_.find_first_of("0123456789]", at);
    if (std::max(at, from) == std::string::npos) throw Error(file_ + ": there is no valid " + key);
    std::istringstream value(text_.substr(from));
    Ids found;
    char separator = 0;
    for (int32_t number = 0; value >> number; value >> separator) found.push_back(number);
    return found;
  }

  int32_t number(const std::string& key) const {
    const Ids found = numbers(key);
    if (found.size() != 1) throw Error(file_ + ": there is no valid " + key);
    return found[0];
  }

  bool quantized() const { return text_.find("\"precision\": \"int") != std::string::npos; }
  bool streams() const { return text_.find("\n  \"mode\": null") == std::string::npos; }

 private:
  std::string file_, text_;
};

enum class Mode { kAdaptive, kSpeculative, kPlain };

// `length`: committed rows; going back means lowering it. `text`: their tokens; what follows them is undefined. `drafts`: what the next
// step verifies, `candidates` for each token; any ids may be written into it. `graph_seconds`: of the calls of `step` and `plain`.
class Conversation {
 public:
  const int64_t context, vocab;
  const size_t candidates;
  const bool streams;  // whether steps return drafts; otherwise all of them are the caller's
  const Mode mode;     // plain for a bundle without a step
  int64_t length = 0;
  Ids text, drafts;
  double graph_seconds = 0;

  Conversation(const fs::path& bundle, const Manifest& manifest, Mode wanted, const Options& options)
      : context(manifest.number("context")),
        vocab(manifest.number("vocab")),
        candidates(manifest.number("k")),
        streams(manifest.streams()),
        mode(manifest.number("gamma") ? wanted : Mode::kPlain),
        prefill_(bundle / "prefill.onnx", options, {"chunk", "valid", "next_root"}) {
    if (mode != Mode::kPlain) {
      step_ = std::make_unique<Graph>(bundle / "step.onnx", options,
                                      Names{"root", "drafts", "tokens", "count", "next_drafts"});
      drafts.resize(step_->ids["drafts"].size());
    }
    if (mode != Mode::kSpeculative) {
      plain_ = std::make_unique<Graph>(bundle / "step_plain.onnx", options, Names{"root", "tokens"});
    }
    int64_t rows = prefill_.new_rows();
    for (const Graph* graph : {step_.get(), plain_.get()}) {
      if (!graph) continue;
      rows = std::max(rows, graph->new_rows());
      if (graph->arrays() != prefill_.arrays() || graph->width() != prefill_.width() || graph->type() != prefill_.type()) {
        throw Error(bundle.string() + ": the graphs are of different exports");
      }
    }
    const int64_t capacity = (context + rows + 31) / 32 * 32;  // any length within the context has room for a call's rows
    cache_ = std::make_unique<Cache>(Cache{prefill_.arrays(), capacity, prefill_.row_bytes()});
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
      prefill_.run(*cache_, length);
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
    graph_seconds += graph.run(*cache_, length);
    return graph.ids["tokens"];
  }

  // Commits what a call returned. A damaged graph may return anything, and ids are used as indices.
  void keep(Graph& graph, const Ids& tokens, int64_t rows) {
    const auto found = graph.ids.find("next_drafts");
    const Ids* next = found == graph.ids.end() ? nullptr : &found->second;
    if (!knows(tokens) || (next && !knows(*next))) throw Error("a graph returned a token that the model does not have");
    if (next && next->size() == drafts.size()) drafts = *next;
    graph.commit(*cache_, length, rows);
  }

  Graph prefill_;
  std::unique_ptr<Graph> step_, plain_;
  std::unique_ptr<Cache> cache_;
};
