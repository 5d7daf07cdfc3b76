// One KV cache and the contract's functions on it, which ssdevice/contract.py describes.
// ssdevice/runtime/conversation.py is the same in Python.
#pragma once

#include <chrono>
#include <memory>
#include <numeric>

#include "choice.h"
#include "contract.h"
#include "phrases.h"

// Seconds on a clock that only goes on.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A function of the contract. `ids`, `floats`: the elements of its inputs and outputs other than
// the cache, which the caller writes and reads in place.
class Callable {
 public:
  std::map<std::string, Ids> ids;
  std::map<std::string, std::vector<float>> floats;

  virtual ~Callable() = default;

  // Runs it on the first `length` rows of the cache.
  virtual void run(int64_t length) = 0;

  // Puts the new rows of some nodes at `length` and after it. `nodes`: ascending.
  virtual void commit(int64_t length, const Ids& nodes) = 0;
};

// The functions of one app on one cache. `streams`: whether steps return drafts; otherwise all of
// them are the caller's, who may use `phrases`.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual const Geometry& geometry() const = 0;
  virtual bool streams() const = 0;
  virtual Phrases phrases() const = 0;
  virtual bool has(const std::string& function) const = 0;
  virtual std::unique_ptr<Callable> open(const std::string& function) = 0;
};

class Conversation {
 public:
  const int64_t context;
  const int64_t vocab;
  const size_t candidates;  // for each token of a draft
  const size_t few;         // how many tokens' drafts a short step verifies; 0 without one
  const bool streams;
  const Phrases phrases;
  int64_t length = 0;   // committed rows; going back means lowering it
  Ids text;             // their tokens; what follows them is undefined
  Ids drafts;           // what the next step verifies; any ids may be written into it
  size_t verified = 0;  // how many tokens' drafts the last step verified
  // Chooses the tokens of `step` and `plain` from logits; without one the graphs do, greedily.
  std::unique_ptr<Chooser> chooser;
  double call_seconds = 0;  // of the calls of `step` and `plain` inside the engine

  // `engine`: must outlive it.
  explicit Conversation(Engine& engine)
      : context(engine.geometry().context),
        vocab(engine.geometry().vocab),
        candidates(engine.geometry().k),
        few(engine.has(kStepShort) ? engine.geometry().few : 0),
        streams(engine.streams()),
        phrases(engine.phrases()),
        drafts(engine.geometry().gamma * engine.geometry().k),
        engine_(engine),
        nodes_(engine.geometry().nodes) {}

  bool has(const char* function) const { return engine_.has(function); }

  // A function, opened when it is first asked for.
  Callable& function(const char* name) {
    std::unique_ptr<Callable>& found = functions_[name];
    if (!found) found = engine_.open(name);
    return *found;
  }

  bool knows(const Ids& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return id >= 0 && id < vocab; });
  }

  // How many tokens that a prompt begins with are committed. The last one must be computed, to
  // predict the next.
  int64_t shared(const Ids& prompt) const {
    const auto most = std::max<int64_t>(0, std::min<int64_t>(length, prompt.size() - 1));
    return std::mismatch(prompt.begin(), prompt.begin() + most, text.begin()).first -
           prompt.begin();
  }

  // Commits tokens of a prompt and returns the one that is likeliest after them.
  int32_t prefill(const Ids& prompt) {
    Callable& prefill = function(kPrefill);
    Ids& chunk = prefill.ids["chunk"];
    for (size_t at = 0; at < prompt.size(); at += chunk.size()) {
      const size_t count = std::min(chunk.size(), prompt.size() - at);
      std::fill(std::copy_n(prompt.begin() + at, count, chunk.begin()), chunk.end(), 0);
      prefill.ids["valid"][0] = static_cast<int32_t>(count);
      prefill.run(length);
      keep(prefill, prefill.ids["next_root"], first(count));
      text.resize(length);
      text.insert(text.end(), prompt.begin() + at, prompt.begin() + at + count);
      length += count;
    }
    return prefill.ids["next_root"][0];
  }

  // The tokens after `last`: the accepted drafts and the token after them. Sets `drafts`. `brief`:
  // verifies the first ones only, where the graphs choose.
  Ids step(int32_t last, bool brief = false) {
    const char* name = brief ? kStepShort : kStep;
    Callable& step = function(chooser ? kVerify : name);
    Ids& first_drafts = step.ids["drafts"];
    std::copy_n(drafts.begin(), first_drafts.size(), first_drafts.begin());
    verified = first_drafts.size() / candidates;
    call(step, last);
    const auto [path, tokens] = chooser ? walk(step) : accepted(step);
    keep(step, tokens, path);
    text.insert(text.end(), tokens.begin(), tokens.end() - 1);
    if (chooser && has(kDraft)) draft_after(step, path, tokens);
    return tokens;
  }

  // The token after `last`, in plain decoding. Does not change `drafts`.
  Ids plain(int32_t last) {
    Callable& plain = function(chooser ? kVerifyPlain : kPlain);
    call(plain, last);
    Ids tokens;
    if (chooser) {
      tokens = {(*chooser)(plain.floats["logits"].data())};
    } else {
      tokens = plain.ids["tokens"];
    }
    keep(plain, tokens, {0});
    return tokens;
  }

  // Drafts a token `depth` places after the next one; the candidate that it replaces becomes the
  // next best.
  void propose(size_t depth, int32_t token) {
    const auto begin = drafts.begin() + depth * candidates;
    const auto end = begin + candidates;
    auto place = std::find(begin, end, token);
    if (place == end) --place;  // the last candidate makes room
    std::copy_backward(begin, place, place + 1);
    *begin = token;
  }

 private:
  static Ids first(size_t count) {
    Ids rows(count);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }

  void call(Callable& function, int32_t last) {
    text.resize(length);
    text.push_back(last);
    function.ids["root"][0] = last;
    run(function, length);
  }

  void run(Callable& function, int64_t length) {
    const double start = now();
    function.run(length);
    call_seconds += now() - start;
  }

  // The rows and tokens that the graph of a step chose.
  static std::pair<Ids, Ids> accepted(Callable& step) {
    Ids tokens = step.ids["tokens"];
    const int32_t count = step.ids["count"][0];
    if (count < 1 || count > static_cast<int32_t>(tokens.size())) {
      throw Error("a graph returned an impossible count");
    }
    tokens.resize(count);
    return {first(count), tokens};
  }

  // The path through the tree of drafts from the root, and the tokens after its nodes: a child that
  // holds the chosen token is entered, the lowest node first; where none does, the path ends.
  std::pair<Ids, Ids> walk(Callable& verified) {
    Ids path{0};
    Ids tokens;
    for (;;) {
      const Shape& ranks = nodes_[path.back()];
      const int32_t token = (*chooser)(verified.floats["logits"].data() + path.back() * vocab);
      tokens.push_back(token);
      const auto child =
          std::find_if(nodes_.begin() + path.back() + 1, nodes_.end(), [&](const Shape& node) {
            return node.size() == ranks.size() + 1 &&
                   std::equal(ranks.begin(), ranks.end(), node.begin()) &&
                   drafts[ranks.size() * candidates + node.back()] == token;
          });
      if (child == nodes_.end()) return {path, tokens};
      path.push_back(static_cast<int32_t>(child - nodes_.begin()));
    }
  }

  void draft_after(Callable& verified, const Ids& path, const Ids& tokens) {
    Callable& draft = function(kDraft);
    std::vector<float>& state = draft.floats["last_state"];
    draft.ids["token"][0] = tokens.back();
    std::copy_n(verified.floats["states"].begin() + path.back() * state.size(), state.size(),
                state.begin());
    run(draft, length + path.size());
    const Ids& next = draft.ids["next_drafts"];
    if (!knows(next)) throw Error("a graph returned a token that the model does not have");
    drafts = next;
  }

  // Commits the rows of some nodes. A damaged graph may return anything, and ids are used as
  // indices.
  void keep(Callable& function, const Ids& tokens, const Ids& nodes) {
    const auto found = function.ids.find("next_drafts");
    const Ids* next = found == function.ids.end() ? nullptr : &found->second;
    if (!knows(tokens) || (next && !knows(*next))) {
      throw Error("a graph returned a token that the model does not have");
    }
    if (next && next->size() == drafts.size()) drafts = *next;
    function.commit(length, nodes);
  }

  Engine& engine_;
  std::map<std::string, std::unique_ptr<Callable>> functions_;
  const std::vector<Shape> nodes_;  // of the tree of drafts
};
