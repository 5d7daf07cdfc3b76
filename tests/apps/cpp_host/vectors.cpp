// vectors FILE: repeats test vectors (tests/vectors) with the host's headers: choices, or the
// sessions of sessions.h. Prints what differs, then how many cases there were. `vectors --time ROWS
// OPTIONS` prints the microseconds of choices instead (times.py).

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>

#include "sessions.h"
#include "vectors.h"

std::vector<float> logits_of(int64_t vocab, uint32_t step) { return row_of(vocab, step % 3); }

// The microseconds of choices from 49,152 logits, in JSON: for rows of float32 in a file, ten
// positions of each, the least of five times. Log-probabilities are computed first where they are
// asked for.
Json times_of_choices(const char* file, const Json& asked) {
  constexpr int64_t kVocab = 49152;
  constexpr int64_t kPositions = 10;
  constexpr int kTimes = 5;
  std::ifstream stream(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  const Sampling sampling = sampling_of(asked);
  std::vector<double> times(bytes.size() / 4 / kVocab * kPositions, 1e9);
  std::vector<float> row(kVocab);
  Ids likely(kVocab);
  for (int time = 0; time < kTimes; ++time) {
    Chooser choose(sampling, {1, 2, 3}, {0}, kVocab);
    Sampler log_probabilities;
    for (size_t n = 0; n < times.size(); ++n) {
      std::memcpy(row.data(), bytes.data() + n * kVocab * 4 % bytes.size(), kVocab * 4);
      const auto start = std::chrono::steady_clock::now();
      if (asked.contains("logprobs"))
        log_probabilities.log_total(row.data(), kVocab, likely.data(), asked.at("logprobs"));
      choose(row.data());
      times[n] = std::min(times[n], std::chrono::duration<double, std::micro>(
                                        std::chrono::steady_clock::now() - start)
                                        .count());
    }
  }
  return times;
}

// A case of one choice, with what comes of it here: its token, or who is at fault for none.
Json outcome_of(Json given) {
  given.erase("token");
  given.erase("refused");
  std::vector<float> logits;
  for (const Json& text : given.at("logits"))
    logits.push_back(std::strtof(text.get<std::string>().c_str(), nullptr));
  const Sampling sampling = sampling_of(given);
  Chooser choose(sampling, given.at("prompt").get<Ids>(), given.at("stops").get<Ids>(),
                 static_cast<int64_t>(logits.size()));
  try {
    given["token"] = choose(logits.data());
  } catch (const Error& error) {
    const std::string said = error.what();
    const bool forbids = said.find("the request forbids every token") != std::string::npos;
    const bool damaged = said.find("the model returned logits that are not") != std::string::npos;
    given["refused"] = forbids ? "request" : damaged ? "model" : said;
  }
  return given;
}

int main(int argc, char** argv) try {
  if (argc == 4 && argv[1] == std::string("--time")) {
    std::cout << times_of_choices(argv[2], Json::parse(argv[3])) << '\n';
    return 0;
  }
  std::ifstream stream(argv[1]);
  const Json vectors = Json::parse(stream);
  if (vectors.contains("sessions")) {
    const int wrong = differing_sessions(vectors.at("sessions"));
    std::cout << wrong << " of " << vectors.at("sessions").size() << " sessions differ\n";
    return wrong > 0;
  }
  int wrong = 0;
  int cases = 0;
  const auto expect = [&](bool right, const Json& given) {
    ++cases;
    if (right) return;
    ++wrong;
    std::cout << given.dump() << '\n';
  };
  for (const Json& given : vectors.at("philox")) {
    const auto words = philox(given.at("number"), given.at("position"), given.at("kind"),
                              std::stoull(given.at("seed").get<std::string>()));
    expect(Json(words) == given.at("words"), given);
  }
  for (const Json& given : vectors.at("noise")) {
    Noise noise;
    noise.at(std::stoull(given.at("seed").get<std::string>()), given.at("position"),
             given.at("ids").back().get<int64_t>() + 1);
    for (size_t i = 0; i < given.at("ids").size(); ++i) {
      const double wanted = given.at("noise")[i];
      const double found = noise.of(given.at("ids")[i]);
      expect(std::abs(found - wanted) <= 1e-14 * std::max(1.0, std::abs(wanted)), given);
    }
  }
  for (const Json& given : vectors.at("logits")) {
    expect(Json(logits_of(5, given.at("step"))) == given.at("first"), given);
  }
  for (const Json& given : vectors.at("choices")) {
    const Sampling sampling = sampling_of(given);
    Chooser choose(sampling, given.at("prompt").get<Ids>(), given.at("stops").get<Ids>(),
                   given.at("vocab"));
    Ids tokens;
    std::vector<int64_t> left;
    for (uint32_t step = 0; step < given.at("tokens").size(); ++step) {
      std::vector<float> logits = logits_of(given.at("vocab"), step);
      tokens.push_back(choose(logits.data()));
      if (sampling.temperature > 0) left.push_back(choose.left());
    }
    expect(Json(tokens) == given.at("tokens") && Json(left) == given.at("left"), given);
  }
  for (const Json& given : vectors.at("rows")) expect(outcome_of(given) == given, given);
  for (const Json& given : vectors.at("options")) {
    std::string said;
    try {
      Sampling().take(given.at("sampling"));
    } catch (const Error& error) {
      said = error.what();
    }
    expect(said.find(given.at("message").get<std::string>()) != std::string::npos, given);
  }
  std::cout << wrong << " of " << cases << " cases differ\n";
  return wrong > 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 2;
}
