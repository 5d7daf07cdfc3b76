// What a user may ask of the choice of tokens, and what changes logits before it.
// ssdevice/runtime/sampling/options.py in C++.
#pragma once

#include "../../ssdevice/runtime/sampling/native/sampler.h"
#include "schema.h"

using Ids = std::vector<int32_t>;

// What a user may ask; the defaults choose greedily. Meaning and order are those of Python's class
// of this name, which also has the ranges.
struct Sampling : Draw {
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  int64_t no_repeat_ngram_size = 0;
  int64_t min_new_tokens = 0;
  int64_t min_length = 0;
  std::map<int32_t, double> logit_bias;
  Ids suppress;
  Ids begin_suppress;
  std::vector<Ids> bad_words;

  // An option that is a number, and the range that it must be in.
  struct Number {
    double Sampling::* value;
    double least;
    double most;
    const char* expected;
  };
  static constexpr double kAbove0 = std::numeric_limits<double>::denorm_min();
  static constexpr double kLeastTemperature = 1e-6;  // of sampling
  static constexpr double kLargestBias = 1e30;
  inline static const std::map<std::string, Number> kNumbers{
      {"temperature", {&Sampling::temperature, 0, 100, "0 to 100"}},
      {"top_p", {&Sampling::top_p, kAbove0, 1, "above 0, at most 1"}},
      {"min_p", {&Sampling::min_p, 0, 1, "0 to 1"}},
      {"typical_p", {&Sampling::typical_p, kAbove0, 1, "above 0, at most 1"}},
      {"repetition_penalty", {&Sampling::repetition_penalty, 0.01, 100, "0.01 to 100"}},
      {"presence_penalty", {&Sampling::presence_penalty, -100, 100, "-100 to 100"}},
      {"frequency_penalty", {&Sampling::frequency_penalty, -100, 100, "-100 to 100"}},
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
        const Number& option = number->second;
        const double given = value;
        if (!(given >= option.least && given <= option.most)) {
          throw Error(name + " is " + value.dump() + ", expected " + option.expected);
        }
        this->*option.value = given;
      }
      if (name == "temperature" && temperature > 0 && temperature < kLeastTemperature) {
        throw Error("temperature is " + value.dump() + ", expected 0 (greedy), or 1e-6 to 100");
      }
      if (kIntegers.count(name)) this->*kIntegers.at(name) = value;
      if (name == "seed") seed = value;
      if (name == "suppress") suppress = value.get<Ids>();
      if (name == "begin_suppress") begin_suppress = value.get<Ids>();
      if (name == "bad_words") bad_words = value.get<std::vector<Ids>>();
      if (name == "logit_bias") {
        for (const auto& [token, bias] : value.items()) {
          const double added = bias;
          if (!(std::abs(added) <= kLargestBias) && added != -kInfinity) {
            throw Error("logit_bias of token " + token +
                        " is no number from -1e30 to 1e30, nor -inf, which bans it");
          }
          logit_bias[std::stoi(token)] = added;
        }
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
  void operator()(float* logits) {
    forbade_ = false;
    for (const auto& [token, bias] : s_.logit_bias) {
      set(logits[token], logits[token] + static_cast<float>(bias));
    }
    if (s_.repetition_penalty != 1) {
      const auto penalty = static_cast<float>(s_.repetition_penalty);
      for (const int32_t token : distinct_) {
        const float logit = logits[token];
        set(logits[token], logit < 0 ? logit * penalty : logit / penalty);
      }
    }
    if (s_.presence_penalty != 0 || s_.frequency_penalty != 0) {
      const auto presence = static_cast<float>(s_.presence_penalty);
      const auto frequency = static_cast<float>(s_.frequency_penalty);
      for (const int32_t token : answered_) {
        const float often = frequency * static_cast<float>(counts_[token]);
        set(logits[token], logits[token] - (presence + often));
      }
    }
    ban(logits);
  }

  // Whether the last row had a token that the model did not rule out, and the request did.
  bool forbade() const { return forbade_; }

 private:
  void set(float& logit, float score) {
    if (logit != -kInfinity && score == -kInfinity) forbade_ = true;
    logit = score;
  }

  void ban(float* logits) {
    const auto never = [&](const Ids& tokens) {
      for (const int32_t token : tokens) set(logits[token], -kInfinity);
    };
    const auto size = static_cast<int64_t>(text_.size());
    const int64_t fresh = size - prompt_;
    const int64_t before = s_.no_repeat_ngram_size - 1;
    never(s_.suppress);
    if (!fresh) never(s_.begin_suppress);
    if (fresh < s_.min_new_tokens || size < s_.min_length) never(stops_);
    if (before >= 0 && size >= before) {
      const auto found = followers_.find({text_.end() - before, text_.end()});
      if (found != followers_.end()) never(found->second);
    }
    for (const Ids& word : s_.bad_words) {
      // A stop token is no bad word, or no answer would end.
      if (word.size() == 1 && std::count(stops_.begin(), stops_.end(), word[0])) continue;
      const size_t beginning = word.size() - 1;
      const bool begun = beginning <= text_.size() &&
                         std::equal(word.begin(), word.end() - 1, text_.end() - beginning);
      if (begun) set(logits[word.back()], -kInfinity);
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
  Ids stops_;
  Ids text_;      // the prompt and the answer so far
  Ids distinct_;  // their tokens, once each
  Ids answered_;  // the answer's tokens, once each
  Ids counts_;    // of each token of the vocabulary: how often the answer has it
  std::vector<bool> seen_;
  bool forbade_ = false;
  std::map<Ids, Ids> followers_;  // the tokens that followed all but the last of an n-gram
};
