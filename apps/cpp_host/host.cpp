// Runs an ssdevice ONNX bundle of one app without Python: token ids in, token ids out.

#include <iostream>
#include <sstream>

#include "options.h"

Ids parse(const Conversation& conversation, const std::string& line) {
  std::istringstream stream(line + ' ');  // so that the end is reached only after a valid number
  const Ids prompt{std::istream_iterator<int32_t>(stream), {}};
  if (prompt.empty() || !stream.eof() || !conversation.knows(prompt)) {
    throw Error("expected token ids from 0 to " + std::to_string(conversation.vocab - 1) +
                ", separated by spaces");
  }
  if (static_cast<int64_t>(prompt.size()) > conversation.context) {
    throw Error("the prompt has " + std::to_string(prompt.size()) +
                " tokens, the bundle was exported for a context of " +
                std::to_string(conversation.context));
  }
  return prompt;
}

int main(int argc, char** argv) try {
  if (argc < 2) throw Arguments::usage();
  const Asked asked = Arguments::read(argc, argv);
  const Bundle bundle(argv[1]);
  const Ids stops = bundle.stops();
  const Sampling sampling = asked.sampling_of(bundle);
  const bool chooses = !sampling.greedy();
  if (asked.sampling.empty() && !asked.recommended && bundle.recommends()) {
    std::cerr << "host: the model recommends sampling; --sample does so\n";
  }
  if (chooses && !bundle.has(kVerifyPlain)) {
    throw Error("the bundle chooses tokens greedily; to sample, export it with --choose host");
  }
  const bool steps = bundle.has(chooses ? kVerify : kStep);
  const bool plainly = bundle.has(chooses ? kVerifyPlain : kPlain);
  const Mode mode = possible(asked.mode, steps, plainly);
  if (chooses && mode == Mode::kPlainStep) {
    throw Error("--plain-step takes the graph's own tokens; with sampling choose --plain");
  }
  GraphEngine engine(bundle, {asked.threads, asked.kernels, bundle.quantized()});
  Conversation conversation(engine);
  for (const char* function : functions_for(mode, chooses)) {
    if (bundle.has(function)) conversation.function(function);  // so that no answer waits for it
  }
  Adaptive adaptive;
  Statistics all;
  for (std::string line; std::getline(std::cin, line);) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) {
      std::cout << std::endl;  // so that lines still match
      continue;
    }
    const Ids prompt = parse(conversation, line);
    if (chooses) {
      conversation.chooser =
          std::make_unique<Chooser>(sampling, prompt, stops, conversation.vocab, argv[1]);
    }
    const Ids answer = decode(conversation, adaptive, mode, prompt, stops, asked.max_tokens, all);
    std::copy(answer.begin(), answer.end() - 1, std::ostream_iterator<int32_t>(std::cout, " "));
    if (!(std::cout << answer.back() << std::endl)) throw Error("the answers cannot be written");
  }
  if (!all.calls) return 0;
  const double host = (all.seconds - all.call_seconds) / all.calls;
  std::cerr << all.tokens / all.seconds << " tokens/s, " << double(all.tokens) / all.calls
            << " per call, of which the host takes " << 1e6 * host << " us\n";
} catch (const std::exception& error) {
  std::string text = std::string(error.what()).substr(0, 1000);  // it may quote a bundle
  const auto controls = [](unsigned char c) { return c < ' ' || c == 127; };
  std::replace_if(text.begin(), text.end(), controls, ' ');
  std::cerr << "host: " << text << '\n';
  return 2;
}
