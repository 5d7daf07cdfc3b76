// Repeats recorded sessions (tests/vectors/sessions.py) with the host's loop.
#pragma once

#include <iostream>

#include "decode.h"
#include "vectors.h"

// What is left of an answer's calls, and the time. `path`: the nodes that the host must commit, of
// the last verification.
struct Recording {
  const Json* calls = nullptr;
  size_t done = 0;
  double now = 0;

  const Json& next() {
    if (done == calls->size()) throw Error("one call too many");
    return calls->at(done++);
  }
};

template <typename Wanted, typename Found>
void expect(const std::string& what, const Wanted& wanted, const Found& found) {
  if (Json(wanted) != Json(found))
    throw Error(what + ": expected " + Json(wanted).dump() + ", found " + Json(found).dump());
}

class RecordedFunction : public Callable {
 public:
  RecordedFunction(const Geometry& geometry, Function function, Recording& recording)
      : geometry_(geometry), function_(std::move(function)), recording_(recording) {
    for (const auto* tensors : {&function_.inputs, &function_.outputs}) {
      for (const TensorSpec& tensor : *tensors) {
        if (tensor.type == kInt32)
          ids[tensor.name].resize(elements(tensor.shape));
        else if (tensor.name != kRows && tensor.shape[0] != kPast)
          floats[tensor.name].resize(elements(tensor.shape));
      }
    }
  }

  void run(int64_t length) override {
    const Json& call = recording_.next();
    expect("function", call.at("function"), function_.name);
    ids["length"][0] = static_cast<int32_t>(length);
    for (const auto& [name, wanted] : call.at("inputs").items()) {
      if (name == "path")
        expect("committed nodes before a draft", wanted, committed_);
      else if (name != "count")
        expect(function_.name + "'s " + name, wanted,
               ids.count(name) ? Json(ids[name]) : Json(floats[name]));
    }
    for (const auto& [name, value] : call.at("outputs").items()) {
      if (name == "logits") {
        auto at = floats[name].begin();
        for (const Json& number : value) {
          const std::vector<float> row = row_of(geometry_.vocab, number);
          at = std::copy(row.begin(), row.end(), at);
        }
      } else if (ids.count(name)) {
        ids[name] = value.get<Ids>();
      } else {
        floats[name] = value.get<std::vector<float>>();
      }
    }
    recording_.now += call.at("seconds").get<double>();
  }

  void commit(int64_t, const Ids& nodes) override { committed_ = nodes; }

 private:
  static inline Ids committed_;  // by the last call of any function
  const Geometry& geometry_;
  Function function_;
  Recording& recording_;
};

class RecordedEngine : public Engine {
 public:
  Recording recording;

  explicit RecordedEngine(const Json& session)
      : geometry_(session.at("geometry"), kFloat), session_(session) {}
  const Geometry& geometry() const override { return geometry_; }
  bool streams() const override { return session_.at("streams"); }
  Phrases phrases() const override {
    return {session_.value("phrases", std::vector<uint32_t>()), geometry_.vocab};
  }
  bool has(const std::string& function) const override {
    const Json& has = session_.at("functions");
    return std::find(has.begin(), has.end(), function) != has.end();
  }
  std::unique_ptr<Callable> open(const std::string& function) override {
    if (!has(function)) throw Error("there is no " + function);
    return std::make_unique<RecordedFunction>(geometry_, geometry_.function(function), recording);
  }

 private:
  const Geometry geometry_;
  const Json& session_;
};

inline void repeat(const Json& session) {
  const std::map<std::string, Mode> modes{{"plain", Mode::kPlain},
                                          {"plain_step", Mode::kPlainStep},
                                          {"speculative", Mode::kSpeculative},
                                          {"adaptive", Mode::kAdaptive}};
  RecordedEngine engine(session);
  Conversation conversation(engine);
  const auto clock = [&] { return engine.recording.now; };
  Adaptive greedily(clock), choosing(clock);
  const Ids stops = session.at("stop_ids");
  for (const Json& given : session.at("answers")) {
    engine.recording.calls = &given.at("calls");
    engine.recording.done = 0;
    Sampling sampling;
    conversation.chooser.reset();
    const Ids prompt = given.at("prompt");
    if (given.contains("sampling")) {
      sampling = sampling_of(given);
      conversation.chooser = std::make_unique<Chooser>(sampling, prompt, stops, conversation.vocab);
    }
    Adaptive& adaptive = conversation.chooser ? choosing : greedily;
    Statistics statistics;
    const Ids answer = decode(conversation, adaptive, modes.at(given.at("mode")), prompt, stops,
                              given.at("max_tokens"), statistics);
    Ids wanted;
    for (const Json& run : given.at("runs")) wanted.insert(wanted.end(), run.begin(), run.end());
    expect("tokens", wanted, answer);
    expect("runs", given.at("runs").size(), statistics.calls + 1);
    expect("calls", engine.recording.calls->size(), engine.recording.done);
  }
}

// Prints the first difference of each session. Returns how many differ.
inline int differing_sessions(const Json& sessions) {
  int wrong = 0;
  for (const Json& session : sessions) {
    try {
      repeat(session);
    } catch (const Error& error) {
      ++wrong;
      std::cout << session.at("what") << ": " << error.what() << '\n';
    }
  }
  return wrong;
}
