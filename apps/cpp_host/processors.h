// What a user may ask of the choice of tokens, and what changes logits before it.
// ssdevice/runtime/sampling/options.py in C++.
#pragma once

#include "../../ssdevice/runtime/sampling/native/sampler.h"
#include "schema.h"

using Ids = std::vector<int32_t>;

// What a user may ask; the defaults choose greedily. Meaning and order are those of Python's class
// of this name, which also has the ranges.
struct Sampling : Draw {
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  int64_t no_repeat_ngram_size = 0, min_new_tokens = 0, min_length = 0;
  std::map<int32_t, double> logit_bias;
  Ids suppress, begin_suppress;
  std::vector<Ids> bad_words;

  struct Number {
    double Sampling::* value;
    double least, most;
  };
  static constexpr double kTiny = std::numeric_limits<double>::denorm_min();
  inline static const std::map<std::string, Number> kNumbers{
      {"temperature", {&Sampling::temperature, 0, 100}},
      {"top_p", {&Sampling::top_p, kTiny, 1}},
      {"min_p", {&Sampling::min_p, 0, 1}},
      {"typical_p", {&Sampling::typical_p, kTiny, 1}},
      {"repetition_penalty", {&Sampling::repetition_penalty, kTiny, 100}},
      {"presence_penalty", {&Sampling::presence_penalty, -100, 100}},
      {"frequency_penalty", {&Sampling::frequency_penalty, -100, 100}},
  };
  inline static const std::map<std::string, int64_t Sampling::*> kIntegers{
      {"top_k", &Sampling::top_k},
      {"no_repeat_ngram_size", &Sampling::no_repeat_ngram_size},
      {"min_new_tokens", &Sampling::min_new_tokens},
      {"min_length", &Sampling::min_length}};

  // Takes options by name, such as those of a manifest; null is as good as none. Throws an Error
  // for a number out of its range.
  void take(const Json& named) {
    for (const auto& [name, value] : named.items()) {
      if (value.is_null()) continue;
      if (const auto number = kNumbers.find(name); number != kNumbers.end()) {
        const auto [member, least, most] = number->second;
        const double given = this->*member = value;
        const bool tiny = name == "temperature" && given > 0 && given < 1e-6;
        if (!(given >= least && given <= most) || tiny) {
          throw Error(name + " is " + value.dump() + ", expected " +
                      (tiny             ? "0 or 1e-6"
                       : least == kTiny ? "more than 0"
                                        : Json(least).dump()) +
                      " to " + Json(most).dump());
        }
      }
      if (kIntegers.count(name)) this->*kIntegers.at(name) = value;
      if (name == "seed") seed = value;
      if (name == "suppress") suppress = value.get<Ids>();
      if (name == "begin_suppress") begin_suppress = value.get<Ids>();
      if (name == "bad_words") bad_words = value.get<std::vector<Ids>>();
      if (name == "logit_bias") {
        for (const auto& [token, bias] : value.items()) logit_bias[std::stoi(token)] = bias;
      }
    }
  }

  // Whether every token is the likeliest of the model's own logits, which graphs can choose as
  // well.
  bool greedy() const {
    return temperature == 0 && repetition_penalty == 1 && presence_penalty == 0 &&
           frequency_penalty == 0 && !no_repeat_ngram_size && !min_new_tokens && !min_length &&
           logit_bias.empty() && suppress.empty() && begin_suppress.empty() && bad_words.empty();
  }
};

// The processors of a request, in transformers' order, and the text that they have seen.
class Processors {
 public:
  Processors(const Sampling& sampling, const Ids& prompt, const Ids& stops, int64_t vocab)
      : s_(sampling), prompt_(prompt.size()), counts_(vocab), seen_(vocab) {
    // A tokenizer may have more tokens than the model.
    std::copy_if(stops.begin(), stops.end(), std::back_inserter(stops_),
                 [&](int32_t stop) { return stop < vocab; });
    for (const int32_t token : prompt) take(token);
  }

  // Takes in the next token of the answer.
  void accept(int32_t token) {
    if (!counts_[token]++) answered_.push_back(token);
    take(token);
  }

  // Changes the logits of the token after the text.
  void operator()(float* logits) const {
    for (const auto& [token, bias] : s_.logit_bias) logits[token] += static_cast<float>(bias);
    if (s_.repetition_penalty != 1) {
      const auto penalty = static_cast<float>(s_.repetition_penalty);
      for (const int32_t token : distinct_)
        logits[token] = logits[token] < 0 ? logits[token] * penalty : logits[token] / penalty;
    }
    if (s_.presence_penalty != 0 || s_.frequency_penalty != 0) {
      const auto presence = static_cast<float>(s_.presence_penalty),
                 frequency = static_cast<float>(s_.frequency_penalty);
      for (const int32_t token : answered_) {
        const float often = frequency * static_cast<float>(counts_[token]);
        logits[token] -= presence + often;
      }
    }
    ban(logits);
  }

 private:
  void ban(float* logits) const {
    const auto never = [&](int32_t token) {
      logits[token] = -std::numeric_limits<float>::infinity();
    };
    const auto size = static_cast<int64_t>(text_.size()), fresh = size - prompt_,
               before = s_.no_repeat_ngram_size - 1;
    std::for_each(s_.suppress.begin(), s_.suppress.end(), never);
    if (!fresh) std::for_each(s_.begin_suppress.begin(), s_.begin_suppress.end(), never);
    if (fresh < s_.min_new_tokens || size < s_.min_length)
      std::for_each(stops_.begin(), stops_.end(), never);
    if (before >= 0 && size >= before) {
      const auto found = followers_.find({text_.end() - before, text_.end()});
      if (found != followers_.end())
        std::for_each(found->second.begin(), found->second.end(), never);
    }
    for (const Ids& word : s_.bad_words) {
      if (word.size() == 1 && std::count(stops_.begin(), stops_.end(), word[0]))
        continue;  // or no answer would end
      const size_t beginning = word.size() - 1;
      if (beginning <= text_.size() &&
          std::equal(word.begin(), word.end() - 1, text_.end() - beginning))
        never(word.back());
    }
  }

  void take(int32_t token) {
    const auto before = s_.no_repeat_ngram_size - 1;
    if (before >= 0 && static_cast<int64_t>(text_.size()) >= before) {
      followers_[{text_.end() - before, text_.end()}].push_back(token);
    }
    if (!seen_[token]) distinct_.push_back(token);
    seen_[token] = true;
    text_.push_back(token);
  }

  const Sampling& s_;
  const int64_t prompt_;
  Ids stops_, text_, distinct_, answered_, counts_;
  std::vector<bool> seen_;
  std::map<Ids, Ids> followers_;  // the tokens that followed all but the last of an n-gram
};
