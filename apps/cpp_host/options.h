// The options of the command line.
#pragma once

#include <charconv>

#include "decode.h"
#include "graph.h"

// `sampling`: options of it by name. `recommended`: what they do not say is as the model
// recommends.
struct Asked {
  Mode mode = Mode::kAdaptive;
  bool kernels = kKernels;
  bool recommended = false;
  int max_tokens = 256;
  int threads = 0;
  Json sampling = Json::object();

  Sampling sampling_of(const Bundle& bundle) const {
    Sampling found = recommended ? bundle.sampling() : Sampling();
    found.take(sampling);
    return found;
  }
};

class Arguments {
 public:
  // Reads what follows the bundle. Throws an Error for anything wrong, and for options that would
  // have no effect.
  static Asked read(int argc, char** argv) {
    Asked asked;
    const std::map<std::string, Mode> modes{{"--plain", Mode::kPlain},
                                            {"--plain-step", Mode::kPlainStep},
                                            {"--speculative", Mode::kSpeculative}};
    std::set<std::string> given;
    for (int i = 2; i < argc; ++i) {
      const std::string name = argv[i];
      given.insert(name);
      if (const auto mode = modes.find(name); mode != modes.end()) {
        if (asked.mode != Mode::kAdaptive && asked.mode != mode->second) throw usage();
        asked.mode = mode->second;
      } else if (name == "--no-kernels") {
        asked.kernels = false;
      } else if (name != "--sample") {
        if (++i == argc) throw usage();
        take(asked, name, argv[i]);
      }
    }
    for (const char* name :
         {"--sample", "--temperature", "--top-k", "--top-p", "--min-p", "--typical-p", "--seed"}) {
      if (!given.count(name)) continue;
      if (asked.sampling.value("temperature", 1.0) != 0) {
        asked.recommended = true;
      } else if (name != std::string("--temperature")) {
        throw Error(std::string(name) +
                    " has no effect: --temperature 0 chooses the likeliest token");
      }
    }
    return asked;
  }

  static Error usage() {
    return Error(
        "expected BUNDLE [--plain | --plain-step | --speculative] [--no-kernels] [--max-tokens N] "
        "[--threads N], and for bundles that were exported with --choose host "
        "[--sample] [--temperature X] [--top-k N] [--top-p X] [--min-p X] [--typical-p X] "
        "[--repetition-penalty X] [--presence-penalty X] [--frequency-penalty X] "
        "[--no-repeat-ngram-size N] [--min-new-tokens N] [--min-length N] "
        "[--logit-bias ID=X].. [--seed N]");
  }

 private:
  static void take(Asked& asked, const std::string& name, const std::string& text) {
    const std::map<std::string, int Asked::*> counts{{"--max-tokens", &Asked::max_tokens},
                                                     {"--threads", &Asked::threads}};
    if (const auto count = counts.find(name); count != counts.end()) {
      asked.*count->second = whole<int>(name, text, 1, std::numeric_limits<int>::max());
      return;
    }
    std::string field = name.substr(std::min<size_t>(name.size(), 2));
    std::replace(field.begin(), field.end(), '-', '_');
    if (Sampling::kNumbers.count(field)) {
      asked.sampling[field] = number(name, text);
      Sampling().take({{field, asked.sampling[field]}});  // checks it
    } else if (Sampling::kIntegers.count(field)) {
      asked.sampling[field] = whole<int64_t>(name, text, 0, int64_t{1} << 31);
    } else if (name == "--seed") {
      asked.sampling[field] = whole<uint64_t>(name, text, 0, std::numeric_limits<uint64_t>::max());
    } else if (name == "--logit-bias") {
      const size_t sign = text.find('=');
      if (sign == std::string::npos) {
        throw Error(name + " is " + safe(text) + ", expected ID=X, a token id and a number");
      }
      const double bias = number(name, text.substr(sign + 1));
      if (std::isnan(bias)) {
        throw Error(name + " is " + safe(text) + ", expected a number after the =");
      }
      constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
      const auto token = whole<int32_t>(name, text.substr(0, sign), 0, kMost);
      asked.sampling[field][std::to_string(token)] = bias;
    } else {
      throw usage();
    }
  }

  template <typename Integer>
  static Integer whole(const std::string& name, const std::string& text, Integer least,
                       Integer most) {
    Integer value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
      throw Error(name + " is " + safe(text) + ", expected a whole number from " +
                  std::to_string(least) + " to " + std::to_string(most));
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
