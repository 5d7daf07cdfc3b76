/// An app's functions on one KV cache. It moves integers; everything else is in the graph.
public protocol Engine {
    /// Those of the contract's functions that the app has.
    var functions: Set<Function> { get }

    /// Runs a function on all its inputs, by name, and returns all its outputs.
    func call(_ function: Function, _ inputs: [Tensor: [Int32]]) throws -> [Tensor: [Int32]]
}

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

/// An engine, what is in its cache, and the next draft. It checks what the engine returns.
///
/// It serves one answer at a time: `begin` takes it away from the answer that had it.
public actor Conversation {
    public nonisolated let functions: Set<Function>
    /// Committed rows; going back means lowering it.
    private var length = 0
    private let engine: any Engine
    private let geometry: Geometry
    /// The time in seconds.
    private let clock: @Sendable () -> Double
    /// What the next step verifies, γ rows of k ids.
    private var drafts: [Int32]
    private var adaptive = Adaptive()
    private var lookup = Lookup()
    /// Time that the last call of the engine took.
    private var seconds = 0.0
    private var owner = 0
    /// The conversation so far; all but its last token are in the cache.
    private var tokens: [Int32] = []
    private var messages: [Message] = []
    /// Another number whenever the messages are others.
    private var place = 0
    /// The answer that has the cache: its prompt, and its turn if it is one.
    private var prompt: [Int32] = []
    private var turn: Turn?
    private var said = ""

    public init(engine: sending any Engine, geometry: Geometry) {
        let start = ContinuousClock.now
        self.init(engine: engine, geometry: geometry) { start.duration(to: .now) / .seconds(1) }
    }

    init(engine: sending any Engine, geometry: Geometry, clock: @escaping @Sendable () -> Double) {
        functions = engine.functions
        self.engine = engine
        self.geometry = geometry
        self.clock = clock
        drafts = Array(repeating: 0, count: geometry.gamma * geometry.k)
    }

    /// The turn that a message of the user begins.
    func turn(_ content: String) -> Turn {
        Turn(messages: messages + [Message(role: "user", content: content)], place: place)
    }

    /// Forgets the conversation.
    public func reset() {
        owner += 1
        place += 1
        length = 0
        (tokens, messages) = ([], [])
    }

    /// Gives the cache to a new answer; what it has of the prompt is kept. `turn`: nil starts over.
    ///
    /// Returns what the answer must show with every call, and how many tokens of the prompt are committed. Throws
    /// `BundleError.request` if the conversation has gone on since the turn.
    func begin(_ prompt: [Int32], _ turn: Turn?) throws -> (owner: Int, committed: Int) {
        guard turn == nil || turn?.place == place else {
            throw BundleError.request("the conversation has gone on since this message")
        }
        // At least the last token must be computed, to predict the next.
        let most = max(0, min(tokens.count, prompt.count) - 1)
        let shared = (0..<most).first { tokens[$0] != prompt[$0] } ?? most
        owner += 1
        if turn == nil {
            place += 1
            messages = []
        }
        length = shared
        lookup.begin()
        tokens = Array(prompt.prefix(shared))
        (self.prompt, self.turn, said) = (prompt, turn, "")
        return (owner, shared)
    }

    /// Commits 1 to C tokens of a prompt; the token after them.
    func prefill(_ chunk: some Collection<Int32>, by answer: Int) throws -> Int32 {
        let padding = Array(repeating: Int32(0), count: geometry.chunk - chunk.count)
        let out = try call(.prefill, [.chunk: chunk + padding, .valid: [Int32(chunk.count)]], by: answer)
        let token = try token(out, .nextRoot)
        try keepDrafts(out)
        length += chunk.count
        return token
    }

    /// What a call after prefill gave: 1 to A tokens, the draft that it verified, and its time inside the engine.
    struct Call: Sendable {
        let tokens: [Int32]
        let drafts: [Int32]?
        let seconds: Double
    }

    /// The next tokens after `last`.
    func advance(after last: Int32, _ mode: Mode, by answer: Int) throws -> Call {
        let steps = mode == .plainStep || mode == .speculative || mode == .adaptive && adaptive.speculates
        guard steps else {
            let token = try plain(last, by: answer)
            if mode == .adaptive {
                adaptive.addPlain(seconds: seconds)
                // What follows the draft's first tokens still fits, if that is what the model said.
                drafts = drafts.dropFirst(geometry.k) + drafts.suffix(geometry.k)
            }
            return Call(tokens: [token], drafts: nil, seconds: seconds)
        }
        if mode == .adaptive { lookup.improve(&drafts, k: geometry.k, after: tokens) }
        let verified = drafts
        let tokens = try step(last, by: answer)
        if mode == .adaptive {
            lookup.learn(tokens)
            adaptive.addStep(tokens: tokens.count, seconds: seconds)
        }
        let plainly = mode == .plainStep
        return Call(tokens: plainly ? [tokens[0]] : tokens, drafts: plainly ? nil : verified, seconds: seconds)
    }

    /// Median milliseconds of each function, of several calls after a prompt of 32 tokens. It starts over.
    public func costs(calls: Int = 40) throws -> [Cost] {
        let answer = try begin([], nil).owner
        let prompt = (0..<min(32, geometry.context / 2)).map { Int32($0 % geometry.vocab) }
        var root: Int32 = 0
        for start in stride(from: 0, to: prompt.count, by: geometry.chunk) {
            root = try prefill(prompt[start...].prefix(geometry.chunk), by: answer)
        }
        let committed = length
        return try Function.allCases.filter { functions.contains($0) && !$0.chooses }.map { function in
            let times = try (0..<calls).map { _ in
                length = committed
                switch function {
                case .step: _ = try step(root, by: answer)
                case .plain: _ = try plain(root, by: answer)
                case .prefill: _ = try prefill(prompt.prefix(geometry.chunk), by: answer)
                case .verify, .verifyPlain, .draft: break
                }
                return seconds * 1e3
            }
            return Cost(function: function.rawValue, width: geometry.width(of: function), milliseconds: median(times))
        }
    }

    /// Takes note of what an answer said: the next call overwrites the rows of all other tokens.
    func commit(_ run: [Int32], _ text: String, by answer: Int) {
        guard answer == owner else { return }
        if tokens.count < prompt.count { tokens = prompt }
        tokens += run
        length = tokens.count - 1
        guard let turn else { return }
        said += text
        messages = turn.messages + [Message(role: "assistant", content: said)]
        place += 1
    }

    /// Verifies the draft after `last`.
    private func step(_ last: Int32, by answer: Int) throws -> [Int32] {
        let out = try call(.step, [.root: [last], .drafts: drafts], by: answer)
        let tokens = out[.tokens] ?? []
        guard let count = out[.count]?.first, 1...geometry.emitted ~= Int(count), tokens.count >= count else {
            throw BundleError.damaged("step returned \(out[.count] ?? []) tokens")
        }
        try checkIds(tokens.prefix(Int(count)))
        try keepDrafts(out)
        return Array(tokens.prefix(Int(count)))
    }

    private func plain(_ last: Int32, by answer: Int) throws -> Int32 {
        try token(call(.plain, [.root: [last]], by: answer), .tokens)
    }

    private func call(_ function: Function, _ inputs: [Tensor: [Int32]], by answer: Int) throws -> [Tensor: [Int32]] {
        guard answer == owner else { throw BundleError.request("a newer answer has taken the place of this one") }
        guard functions.contains(function) else {
            throw BundleError.unsupported("the app has no \(function.rawValue)")
        }
        let start = clock()
        defer { seconds = clock() - start }
        return try engine.call(function, inputs.merging([.length: [Int32(length)]]) { $1 })
    }

    private func token(_ out: [Tensor: [Int32]], _ tensor: Tensor) throws -> Int32 {
        guard let token = out[tensor]?.first else {
            throw BundleError.damaged("the package gives no \(tensor.rawValue)")
        }
        try checkIds([token])
        return token
    }

    /// Apps without streams draft nothing.
    private func keepDrafts(_ out: [Tensor: [Int32]]) throws {
        guard let next = out[.nextDrafts] else { return }
        try checkIds(next)
        guard next.count == drafts.count else { throw BundleError.damaged("a draft of \(next.count) ids") }
        drafts = next
    }

    private func checkIds(_ ids: some Sequence<Int32>) throws {
        if let wrong = ids.first(where: { !(0..<geometry.vocab ~= Int($0)) }) {
            throw BundleError.damaged("the package returned token \(wrong), the model has \(geometry.vocab)")
        }
    }
}
