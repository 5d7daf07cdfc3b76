/// The messages up to a user's, and where in the conversation they were: an answer to them must begin there.
struct Turn: Sendable {
    let messages: [Message]
    let place: Int
}

/// What a call costs that computes `width` tokens at once.
public struct Cost: Encodable, Sendable {
    public let function: String
    public let width: Int
    public let milliseconds: Double
}

/// An engine, what is in its cache, and the messages that led there.
///
/// It serves one answer at a time: `begin` takes it away from the answer that had it.
public actor Conversation {
    public nonisolated let functions: Set<Function>
    private nonisolated let geometry: Geometry
    private var cache: Cache
    /// By whether the host chooses tokens: then a step costs another time.
    private var adaptive: [Bool: Adaptive]
    private var owner = 0
    private var messages: [Message] = []
    /// Another number whenever the messages are others.
    private var place = 0
    /// The answer that has the cache: its prompt, its turn if it is one, how many tokens it has and what it said.
    private var prompt: [Int32] = []
    private var turn: Turn?
    private var emitted = 0
    private var said = ""

    /// `streams`: whether the app drafts; otherwise drafts only repeat the text.
    public init(engine: sending any Engine, geometry: Geometry, streams: Bool = true) {
        let start = ContinuousClock.now
        self.init(engine: engine, geometry: geometry, streams: streams) { start.duration(to: .now) / .seconds(1) }
    }

    /// `clock`: the time in seconds.
    init(
        engine: sending any Engine, geometry: Geometry, streams: Bool = true, clock: @escaping @Sendable () -> Double
    ) {
        functions = engine.functions
        self.geometry = geometry
        cache = Cache(engine, geometry, streams: streams, clock: clock)
        let new = Adaptive(Lookup(streams: streams), clock: clock)
        adaptive = [false: new, true: new]
    }

    /// The turn that a message of the user begins.
    func turn(_ content: String) -> Turn {
        Turn(messages: messages + [Message(role: "user", content: content)], place: place)
    }

    /// Forgets the conversation.
    public func reset() {
        owner += 1
        place += 1
        cache.length = 0
        messages = []
    }

    /// Gives the cache to a new answer; what it has of the prompt is kept. `turn`: nil starts over. `chooser`: nil lets
    /// the graph choose.
    ///
    /// Returns what the answer must show with every call, and how many tokens of the prompt are committed. Throws
    /// `BundleError.request` if the conversation has gone on since the turn.
    func begin(_ prompt: [Int32], _ turn: Turn?, _ chooser: Chooser? = nil) throws -> (owner: Int, committed: Int) {
        guard turn == nil || turn?.place == place else {
            throw BundleError.request("the conversation has gone on since this message")
        }
        owner += 1
        if turn == nil {
            place += 1
            messages = []
        }
        cache.length = cache.shared(prompt)
        cache.chooser = chooser
        adaptive[chooser != nil]!.lookup.begin()
        (self.prompt, self.turn, emitted, said) = (prompt, turn, 0, "")
        return (owner, cache.length)
    }

    /// Commits 1 to C tokens of a prompt; the token after them.
    func prefill(_ chunk: some Collection<Int32>, by answer: Int) throws -> Int32 {
        try check(answer)
        return try cache.prefill(chunk)
    }

    /// What a call after prefill gave: 1 to A tokens, the draft that it verified, and its time inside the engine.
    struct Call: Sendable {
        let tokens: [Int32]
        let drafts: [Int32]?
        let seconds: Double
    }

    /// The next tokens after `last`.
    func advance(after last: Int32, _ mode: Mode, by answer: Int) throws -> Call {
        try check(answer)
        let before = cache.seconds
        let tokens: [Int32]
        var speculated = mode == .speculative
        switch mode {
        case .plain: tokens = [try cache.plain(last)]
        case .plainStep: tokens = [try cache.step(last)[0]]
        case .speculative: tokens = try cache.step(last)
        case .adaptive:
            let choosing = cache.chooser != nil
            tokens = try adaptive[choosing]!.next(&cache, after: last)
            speculated = adaptive[choosing]!.speculated
        }
        return Call(tokens: tokens, drafts: speculated ? cache.verified : nil, seconds: cache.seconds - before)
    }

    /// Median milliseconds of each function, of several calls after a prompt of 32 tokens. It starts over.
    public func costs(calls: Int = 40) throws -> [Cost] {
        _ = try begin([], nil)
        let prompt = (0..<min(32, geometry.context / 2)).map { Int32($0 % geometry.vocab) }
        var root: Int32 = 0
        for start in stride(from: 0, to: prompt.count, by: geometry.chunk) {
            root = try cache.prefill(prompt[start...].prefix(geometry.chunk))
        }
        let committed = cache.length
        return try Function.allCases.filter { functions.contains($0) && !$0.chooses }.map { function in
            let times = try (0..<calls).map { _ in
                cache.length = committed
                let before = cache.seconds
                switch function {
                case .step: _ = try cache.step(root)
                case .plain: _ = try cache.plain(root)
                case .prefill: _ = try cache.prefill(prompt.prefix(geometry.chunk))
                case .verify, .verifyPlain, .draft: break
                }
                return (cache.seconds - before) * 1e3
            }
            return Cost(function: function.rawValue, width: geometry.width(of: function), milliseconds: median(times))
        }
    }

    /// Takes note of what an answer said: the next call overwrites the rows of all other tokens.
    func commit(_ run: [Int32], _ text: String, by answer: Int) {
        guard answer == owner else { return }
        emitted += run.count
        cache.length = prompt.count + emitted - 1
        guard let turn else { return }
        said += text
        messages = turn.messages + [Message(role: "assistant", content: said)]
        place += 1
    }

    private func check(_ answer: Int) throws {
        guard answer == owner else { throw BundleError.request("a newer answer has taken the place of this one") }
    }
}
