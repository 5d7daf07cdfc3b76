/// Why an answer ended.
public enum Reason: String, Sendable {
    case stop
    case maxTokens = "max_tokens"
    case context
}

/// What one call of the engine added to an answer.
public struct Run: Sendable {
    public struct Piece: Sendable {
        /// Text that is certain now, often empty.
        public let text: String
        /// Whether it came with an accepted draft; false for what the model chose after the drafts.
        public let accepted: Bool
    }

    public let tokens: [Int32]
    /// The γ rows of k candidates that the call verified; nil for the first run and plain decoding.
    public let drafts: [Int32]?
    /// One for each token, and the rest of the text behind them if the answer ends.
    public let pieces: [Piece]
    /// Why the answer ends here; nil if it continues.
    public let reason: Reason?
    public let duration: Duration
    /// The part of it inside the engine, without prefill.
    public let engineSeconds: Double

    public var text: String { pieces.map(\.text).joined() }
}

/// An answer, call by call: the first run is that of prefill, or with sampling of the call after it. Nothing is computed ahead of the caller, so leaving the
/// loop ends the answer; so does cancelling the task.
public struct Answer: AsyncSequence, Sendable {
    let conversation: Conversation
    let geometry: Geometry
    let prompt: [Int32]
    let mode: Mode
    let maxTokens: Int
    let output: TextOutput
    /// Nil for the answer to a prompt of its own.
    let turn: Turn?
    /// Nil lets the graph choose the tokens.
    let chooser: Chooser?

    /// Throws `BundleError.request` for a prompt that does not fit, no room for a token, and sampling that cannot be.
    init(
        conversation: Conversation, geometry: Geometry, prompt: [Int32], mode: Mode, maxTokens: Int, output: TextOutput,
        turn: Turn? = nil, sampling: Sampling = Sampling()
    ) throws {
        guard !prompt.isEmpty, prompt.allSatisfy({ 0..<geometry.vocab ~= Int($0) }) else {
            throw BundleError.request("the prompt is empty or has tokens that the model lacks")
        }
        guard prompt.count <= geometry.context else {
            throw BundleError.request("the prompt has \(prompt.count) tokens, the context \(geometry.context)")
        }
        guard maxTokens > 0 else { throw BundleError.request("maxTokens is \(maxTokens), expected 1 or more") }
        self.conversation = conversation
        self.geometry = geometry
        self.prompt = prompt
        self.mode = mode
        self.maxTokens = maxTokens
        self.output = output
        self.turn = turn
        let stops = output.stopIds.filter { $0 < geometry.vocab }
        let chooser = try Chooser(sampling, prompt: prompt, stops: Array(stops), vocab: geometry.vocab)
        self.chooser = sampling.isGreedy ? nil : chooser
        guard self.chooser != nil else { return }
        guard conversation.functions.contains(.verifyPlain) else {
            throw BundleError.request(
                "this conversation has no functions for sampling: export the bundle with --choose host, and open it with "
                    + "samples: true")
        }
        guard mode != .plainStep else {
            throw BundleError.request("the mode plain_step takes the graph's own tokens; with sampling choose plain")
        }
    }

    public func makeAsyncIterator() -> Iterator { Iterator(answer: self, output: output) }

    public struct Iterator: AsyncIteratorProtocol, Sendable {
        fileprivate let answer: Answer
        fileprivate var output: TextOutput
        private var owner = 0
        private var last: Int32?
        private var emitted = 0
        private var ended = false

        fileprivate init(answer: Answer, output: TextOutput) {
            self.answer = answer
            self.output = output
        }

        public mutating func next() async throws -> Run? {
            guard !ended, !Task.isCancelled else { return nil }
            let clock = ContinuousClock.now
            guard let call = try await call() else { return nil }
            return await take(call, clock.duration(to: .now))
        }

        /// The next call; nil if the task is cancelled during prefill.
        private mutating func call() async throws -> Conversation.Call? {
            guard let last else { return try await begin() }
            return try await answer.conversation.advance(after: last, answer.mode, by: owner)
        }

        /// Prefill's token, or where the host chooses, those of a call after the prompt's last.
        private mutating func begin() async throws -> Conversation.Call? {
            let (conversation, prompt, chunk) = (answer.conversation, answer.prompt, answer.geometry.chunk)
            let committed: Int
            (owner, committed) = try await conversation.begin(prompt, answer.turn, answer.chooser)
            var first: Conversation.Call?
            let end = answer.chooser == nil ? prompt.count : prompt.count - 1
            for start in stride(from: committed, to: end, by: chunk) {
                if Task.isCancelled { return nil }
                let token = try await conversation.prefill(prompt[start..<end].prefix(chunk), by: owner)
                first = .init(tokens: [token], drafts: nil, seconds: 0)
            }
            guard answer.chooser != nil else { return first }
            if Task.isCancelled { return nil }
            return try await conversation.advance(after: prompt[end], answer.mode, by: owner)
        }

        /// Cuts a call's tokens at a stop and at the room that is left.
        private mutating func take(_ call: Conversation.Call, _ duration: Duration) async -> Run {
            let begins = emitted == 0
            var pieces = output.push(call.tokens.prefix(room))
            let run = Array(call.tokens.prefix(pieces.count))
            emitted += run.count
            last = run.last
            var reason: Reason?
            if output.stopped {
                reason = .stop
            } else if room <= 0 {
                reason = emitted >= answer.maxTokens ? .maxTokens : .context
                pieces.append(output.finish())
            }
            ended = reason != nil
            await answer.conversation.commit(run, pieces.joined(), by: owner)
            return Run(
                tokens: run, drafts: begins ? nil : call.drafts,
                pieces: pieces.enumerated().map { .init(text: $1, accepted: $0 < call.tokens.count - 1) },
                reason: reason, duration: duration, engineSeconds: call.seconds
            )
        }

        /// How many more tokens the answer may have. The last one's row is not in the cache yet.
        private var room: Int {
            let committed = answer.prompt.count + emitted - 1
            return Swift.min(answer.maxTokens - emitted, answer.geometry.context - committed)
        }
    }
}

/// The speed of an answer so far, without its prefill.
public struct Speed: Sendable {
    public private(set) var tokens = 0
    public private(set) var steps = 0
    private var time = Duration.zero
    private var begun = false

    public init() {}

    /// Counts the next run of an answer.
    public mutating func add(_ run: Run) {
        defer { begun = true }
        guard begun else { return }
        tokens += run.tokens.count
        steps += 1
        time += run.duration
    }

    public var tokensPerSecond: Double {
        let seconds: Double = time / Duration.seconds(1)
        return seconds > 0 ? Double(tokens) / seconds : 0
    }
    public var tokensPerStep: Double { steps > 0 ? Double(tokens) / Double(steps) : 0 }
}
