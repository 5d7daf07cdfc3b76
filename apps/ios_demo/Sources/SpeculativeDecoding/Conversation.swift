/// An app's functions on one KV cache. It moves integers; everything else is in the graph.
public protocol Engine {
    /// Those of the contract's functions that the app has.
    var functions: Set<Function> { get }

    /// Runs a function on all its inputs, by name, and returns all its outputs.
    func call(_ function: Function, _ inputs: [Tensor: [Int32]]) throws -> [Tensor: [Int32]]
}

/// An engine, the number of rows in its cache, and the next draft. It checks what the engine returns.
///
/// It serves one answer at a time: `begin` takes it away from the answer that had it.
public actor Conversation {
    /// Committed rows; going back means lowering it.
    private(set) var length = 0
    private let engine: any Engine
    private let geometry: Geometry
    /// What the next step verifies, γ rows of k ids.
    private var drafts: [Int32]
    private var owner = 0

    public init(engine: sending any Engine, geometry: Geometry) {
        self.engine = engine
        self.geometry = geometry
        drafts = Array(repeating: 0, count: geometry.gamma * geometry.k)
    }

    /// Empties the cache. Returns what the answer that has it now must show with every call.
    func begin() -> Int {
        owner += 1
        length = 0
        return owner
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

    /// Verifies the draft after `last`: 1 to A tokens.
    func step(_ last: Int32, by answer: Int) throws -> [Int32] {
        let out = try call(.step, [.root: [last], .drafts: drafts], by: answer)
        let tokens = out[.tokens] ?? []
        guard let count = out[.count]?.first, 1...geometry.emitted ~= Int(count), tokens.count >= count else {
            throw BundleError.damaged("step returned \(out[.count] ?? []) tokens")
        }
        try checkIds(tokens.prefix(Int(count)))
        try keepDrafts(out)
        return Array(tokens.prefix(Int(count)))
    }

    /// The token after `last`, without drafts.
    func plainStep(_ last: Int32, by answer: Int) throws -> Int32 {
        guard engine.functions.contains(.plain) else { return try step(last, by: answer)[0] }
        return try token(call(.plain, [.root: [last]], by: answer), .tokens)
    }

    func commit(_ length: Int, by answer: Int) {
        if answer == owner { self.length = length }
    }

    private func call(_ function: Function, _ inputs: [Tensor: [Int32]], by answer: Int) throws -> [Tensor: [Int32]] {
        guard answer == owner else { throw BundleError.request("a newer answer has taken the place of this one") }
        guard engine.functions.contains(function) else {
            throw BundleError.unsupported("the app has no \(function.rawValue)")
        }
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
