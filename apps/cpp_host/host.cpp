// Runs an ssdevice ONNX bundle of one app without Python: token ids in, token ids out.

#include <charconv>
#include <iostream>
#include <sstream>

#include "decode.h"

Ids parse(const Conversation& conversation, const std::string& line) {
  std::istringstream stream(line + ' ');  // so that the end is reached only after a valid number
  const Ids prompt{std::istream_iterator<int32_t>(stream), {}};
  if (prompt.empty() || !stream.eof() || !conversation.knows(prompt)) {
    throw Error("expected token ids from 0 to " + std::to_string(conversation.vocab - 1) + ", separated by spaces");
  }
  if (static_cast<int64_t>(prompt.size()) > conversation.context) {
    const std::string size = std::to_string(prompt.size()), context = std::to_string(conversation.context);
    throw Error("the prompt has " + size + " tokens, the bundle was exported for a context of " + context);
  }
  return prompt;
}

// A whole number from 1; 0 for anything else.
int positive(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? std::max(number, 0) : 0;
}

int main(int argc, char** argv) try {
  const Error usage("expected BUNDLE [--plain | --speculative] [--no-kernels] [--max-tokens N] [--threads N]");
  std::map<std::string, bool> flags{{"--plain", false}, {"--speculative", false}, {"--no-kernels", false}};
  std::map<std::string, int> values{{"--max-tokens", 256}, {"--threads", 0}};
  if (argc < 2) throw usage;
  for (int i = 2; i < argc; ++i) {
    const std::string name = argv[i];
    if (flags.count(name)) {
      flags[name] = true;
    } else if (!values.count(name) || ++i == argc || !(values[name] = positive(argv[i]))) {
      throw usage;
    }
  }
  if (flags["--plain"] && flags["--speculative"]) throw usage;
  const Mode mode = flags["--plain"] ? Mode::kPlain : flags["--speculative"] ? Mode::kSpeculative : Mode::kAdaptive;
  const Bundle bundle(argv[1]);
  const Ids stops = bundle.stops();
  Conversation conversation(bundle, mode, {values["--threads"], kKernels && !flags["--no-kernels"], bundle.quantized()});
  Adaptive adaptive;
  Statistics all;
  for (std::string line; std::getline(std::cin, line);) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) {  // answered by an empty line, so that lines still match
      std::cout << std::endl;
      continue;
    }
    const Ids answer = decode(conversation, adaptive, parse(conversation, line), stops, values["--max-tokens"], all);
    std::copy(answer.begin(), answer.end() - 1, std::ostream_iterator<int32_t>(std::cout, " "));
    if (!(std::cout << answer.back() << std::endl)) throw Error("the answers cannot be written");
  }
  if (!all.calls) return 0;
  const double host = (all.seconds - conversation.graph_seconds) / all.calls;
  std::cerr << all.tokens / all.seconds << " tokens/s, " << double(all.tokens) / all.calls << " per call, of which the host takes "
            << 1e6 * host << " us\n";
} catch (const std::exception& error) {
  std::string text = std::string(error.what()).substr(0, 1000);  // it may quote a bundle
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 127; }, ' ');
  std::cerr << "host: " << text << '\n';
  return 2;
}
