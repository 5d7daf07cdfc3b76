// Runs an ssdevice ONNX bundle of one app without Python: token ids in, token ids out.

#include <cstdlib>
#include <iostream>
#include <map>

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

int main(int argc, char** argv) try {
  const Error usage("expected BUNDLE [--plain | --speculative] [--no-kernels] [--max-tokens N] [--threads N]");
  std::map<std::string, bool> flags{{"--plain", false}, {"--speculative", false}, {"--no-kernels", false}};
  std::map<std::string, int> values{{"--max-tokens", 256}, {"--threads", 0}};
  if (argc < 2) throw usage;
  for (int i = 2; i < argc; ++i) {
    const std::string name = argv[i];
    if (flags.count(name)) {
      flags[name] = true;
    } else if (!values.count(name) || ++i == argc || (values[name] = std::atoi(argv[i])) < 1) {
      throw usage;
    }
  }
  if (flags["--plain"] && flags["--speculative"]) throw usage;
  const Mode mode = flags["--plain"] ? Mode::kPlain : flags["--speculative"] ? Mode::kSpeculative : Mode::kAdaptive;
  const fs::path bundle = argv[1];
  const Manifest manifest(bundle);
  const Ids stops = manifest.numbers("stop_ids");
  Conversation conversation(bundle, manifest, mode,
                            {values["--threads"], kKernels && !flags["--no-kernels"], manifest.quantized()});
  Adaptive adaptive;
  Statistics all;
  for (std::string line; std::getline(std::cin, line);) {
    const Ids answer = decode(conversation, adaptive, parse(conversation, line), stops, values["--max-tokens"], all);
    std::copy(answer.begin(), answer.end() - 1, std::ostream_iterator<int32_t>(std::cout, " "));
    if (!(std::cout << answer.back() << std::endl)) throw Error("the answers cannot be written");
  }
  if (!all.calls) return 0;
  const double host = (all.seconds - conversation.graph_seconds) / all.calls;
  std::cerr << all.tokens / all.seconds << " tokens/s, " << double(all.tokens) / all.calls << " per call, of which the host takes "
            << 1e6 * host << " us\n";
} catch (const std::exception& error) {
  std::cerr << "host: " << error.what() << '\n';
  return 2;
}
