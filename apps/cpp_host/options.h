// The options of the command line.
#pragma once

#include <charconv>

#include "conversation.h"

// `samples`: whether an option of sampling was given; then graphs leave the choice of tokens to the host.
struct Asked {
  Mode mode = Mode::kAdaptive;
  bool kernels = kKernels, samples = false;
  int max_tokens = 256, threads = 0;
  Sampling sampling;
};

class Arguments {
 public:
  // Reads what follows the bundle. Throws an Error for anything wrong, and for options that would have no effect.
  static Asked read(int argc, char** argv) {
    Asked asked;
    std::map<std::string, bool> flags{{"--plain", false}, {"--speculative", false}, {"--no-kernels", false}};
    std::set<std::string> given;
    for (int i = 2; i < argc; ++i) {
      const std::string name = argv[i];
      if (const auto flag = flags.find(name); flag != flags.end()) {
        flag->second = true;
      } else {
        if (++i == argc) throw usage();
        given.insert(name);
        take(asked, name, argv[i]);
      }
    }
    if (flags["--plain"] && flags["--speculative"]) throw usage();
    asked.mode = flags["--plain"] ? Mode::kPlain : flags["--speculative"] ? Mode::kSpeculative : Mode::kAdaptive;
    asked.kernels = kKernels && !flags["--no-kernels"];
    for (const char* name : {"--top-k", "--top-p", "--min-p", "--typical-p", "--seed"}) {
      if (given.count(name) && asked.sampling.temperature == 0) throw Error(std::string(name) + " has no effect without --temperature");
    }
    return asked;
  }

  static Error usage() {
    return Error(
        "expected BUNDLE [--plain | --speculative] [--no-kernels] [--max-tokens N] [--threads N], and for bundles that were exported "
        "with --choose host [--temperature X] [--top-k N] [--top-p X] [--min-p X] [--typical-p X] [--repetition-penalty X] "
        "[--presence-penalty X] [--frequency-penalty X] [--no-repeat-ngram-size N] [--min-new-tokens N] [--min-length N] [--logit-bias ID=X].. "
        "[--seed N]");
  }

 private:
  struct Number {
    double Sampling::*value;
    double least, most;
  };

  static void take(Asked& asked, const std::string& name, const std::string& text) {
    constexpr double kTiny = std::numeric_limits<double>::denorm_min();
    const std::map<std::string, Number> numbers{
        {"--temperature", {&Sampling::temperature, 0, 100}},
        {"--top-p", {&Sampling::top_p, kTiny, 1}},
        {"--min-p", {&Sampling::min_p, 0, 1}},
        {"--typical-p", {&Sampling::typical_p, kTiny, 1}},
        {"--repetition-penalty", {&Sampling::repetition_penalty, kTiny, 100}},
        {"--presence-penalty", {&Sampling::presence_penalty, -100, 100}},
        {"--frequency-penalty", {&Sampling::frequency_penalty, -100, 100}},
    };
    const std::map<std::string, int64_t Sampling::*> integers{{"--top-k", &Sampling::top_k},
                                                              {"--no-repeat-ngram-size", &Sampling::no_repeat_ngram_size},
                                                              {"--min-new-tokens", &Sampling::min_new_tokens},
                                                              {"--min-length", &Sampling::min_length}};
    const std::map<std::string, int Asked::*> counts{{"--max-tokens", &Asked::max_tokens}, {"--threads", &Asked::threads}};
    if (const auto count = counts.find(name); count != counts.end()) {
      asked.*count->second = whole<int>(name, text, 1, std::numeric_limits<int>::max());
      return;
    }
    Sampling& sampling = asked.sampling;
    asked.samples = true;
    if (const auto found = numbers.find(name); found != numbers.end()) {
      const auto [value, least, most] = found->second;
      sampling.*value = number(name, text);
      if (!(sampling.*value >= least && sampling.*value <= most)) {
        throw Error(name + " is " + safe(text) + ", expected " + (least == kTiny ? "more than 0" : Json(least).dump()) + " to " +
                    Json(most).dump());
      }
      if (sampling.temperature > 0 && sampling.temperature < 1e-6) throw Error(name + " is " + safe(text) + ", expected 0 or 1e-6 to 100");
    } else if (const auto integer = integers.find(name); integer != integers.end()) {
      sampling.*integer->second = whole<int64_t>(name, text, 0, int64_t{1} << 31);
    } else if (name == "--seed") {
      sampling.seed = whole<uint64_t>(name, text, 0, std::numeric_limits<uint64_t>::max());
    } else if (name == "--logit-bias") {
      const size_t sign = text.find('=');
      if (sign == std::string::npos) throw Error(name + " is " + safe(text) + ", expected ID=X, a token id and a number");
      const double bias = number(name, text.substr(sign + 1));
      if (std::isnan(bias)) throw Error(name + " is " + safe(text) + ", expected a number after the =");
      sampling.logit_bias[whole<int32_t>(name, text.substr(0, sign), 0, std::numeric_limits<int32_t>::max())] = bias;
    } else {
      throw usage();
    }
  }

  template <typename Integer>
  static Integer whole(const std::string& name, const std::string& text, Integer least, Integer most) {
    Integer value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
      throw Error(name + " is " + safe(text) + ", expected a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return value;
  }

  static double number(const std::string& name, const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end) throw Error(name + " is " + safe(text) + ", expected a number");
    return value;
  }
};
