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
    /// The γ rows of k candidates that the call verified; nil for prefill and plain decoding.
    public let drafts: [Int32]?
    /// One for each token, and the rest of the text behind them if the answer ends.
    public let pieces: [Piece]
    /// Why the answer ends here; nil if it continues.
    public let reason: Reason?
    public let duration: Duration
    /// The part of it inside the engine; 0 for prefill.
    public let engineSeconds: Double

    public var text: String { pieces.map(\.text).joined() }
}

/// An answer, call by call: the first run is that of prefill. Nothing is computed ahead of the caller, so leaving the
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

    /// Throws `BundleError.request` for a prompt that does not fit, or no room for a token.
    init(
        conversation: Conversation, geometry: Geometry, prompt: [Int32], mode: Mode, maxTokens: Int, output: TextOutput,
        turn: Turn? = nil
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
            guard let last else { return try await prefill().map { .init(tokens: [$0], drafts: nil, seconds: 0) } }
            return try await answer.conversation.advance(after: last, answer.mode, by: owner)
        }

        private mutating func prefill() async throws -> Int32? {
            let committed: Int
            (owner, committed) = try await answer.conversation.begin(answer.prompt, answer.turn)
            var token: Int32?
            for start in stride(from: committed, to: answer.prompt.count, by: answer.geometry.chunk) {
                if Task.isCancelled { return nil }
                let chunk = answer.prompt[start...].prefix(answer.geometry.chunk)
                token = try await answer.conversation.prefill(chunk, by: owner)
            }
            return token
        }

        /// Cuts a call's tokens at a stop and at the room that is left.
        private mutating func take(_ call: Conversation.Call, _ duration: Duration) async -> Run {
            // Prefill's token needs no room: its row is not in the cache yet.
            var pieces = output.push(call.tokens.prefix(emitted == 0 ? 1 : room))
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
                tokens: run, drafts: call.drafts,
                pieces: pieces.enumerated().map { .init(text: $1, accepted: $0 < call.tokens.count - 1) },
                reason: reason, duration: duration, engineSeconds: call.seconds
            )
        }

        /// How many more tokens the answer may have.
        private var room: Int {
            let committed = answer.prompt.count + Swift.max(emitted - 1, 0)
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
