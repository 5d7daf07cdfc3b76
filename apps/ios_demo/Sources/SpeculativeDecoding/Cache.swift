/// What a function is given or returns, by name.
public struct Values: Sendable {
    public var ids: [Tensor: [Int32]]
    public var floats: [Tensor: [Float]]

    public init(_ ids: [Tensor: [Int32]] = [:], floats: [Tensor: [Float]] = [:]) {
        self.ids = ids
        self.floats = floats
    }
}

/// An app's functions on one KV cache. It moves numbers; everything else is in the graph.
public protocol Engine {
    /// Those of the contract's functions that the app has.
    var functions: Set<Function> { get }

    /// Runs a function on all its inputs and returns all its outputs.
    func call(_ function: Function, _ inputs: Values) throws -> Values
}

/// One KV cache and the contract's functions on it, as in Python's `ssdevice.runtime.conversation`. They write rows from
/// `length` on, and check what the engine returns.
struct Cache {
    let geometry: Geometry
    /// Whether the app drafts; otherwise drafts only repeat the text.
    let streams: Bool
    /// Committed rows; going back means lowering it.
    var length = 0
    /// The tokens of the committed rows; what follows them is undefined.
    private(set) var text: [Int32] = []
    /// What the next step verifies, γ rows of k ids.
    private(set) var drafts: [Int32]
    /// What the last step verified.
    private(set) var verified: [Int32] = []
    /// Chooses the tokens of `step` and `plain` from logits; nil: the graph does, greedily.
    var chooser: Chooser?
    /// Time inside the engine.
    private(set) var seconds = 0.0
    private let engine: any Engine
    private let clock: () -> Double
    /// Ranks of the drafts on the way to each node of the tree.
    private let nodes: [[Int]]

    init(_ engine: any Engine, _ geometry: Geometry, streams: Bool, clock: @escaping () -> Double) {
        self.engine = engine
        self.geometry = geometry
        self.streams = streams
        self.clock = clock
        drafts = Array(repeating: 0, count: geometry.gamma * geometry.k)
        nodes = [[]] + geometry.tree
    }

    /// How many tokens that a prompt begins with are committed. The last one must be computed, to predict the next.
    func shared(_ prompt: [Int32]) -> Int {
        let most = max(0, min(length, prompt.count - 1))
        return (0..<most).first { text[$0] != prompt[$0] } ?? most
    }

    /// Commits 1 to C tokens of a prompt; the token after them.
    mutating func prefill(_ chunk: some Collection<Int32>) throws -> Int32 {
        let padding = Array(repeating: Int32(0), count: geometry.chunk - chunk.count)
        let out = try call(.prefill, Values([.chunk: chunk + padding, .valid: [Int32(chunk.count)]]))
        let token = try ids(out, .nextRoot, 1)[0]
        try keepDrafts(out)
        text.replaceSubrange(length..., with: chunk)
        length += chunk.count
        return token
    }

    /// Verifies the drafts after `last` and returns the 1 to A tokens that follow it.
    mutating func step(_ last: Int32) throws -> [Int32] {
        verified = drafts
        let inputs = Values([.root: [last], .drafts: drafts])
        let tokens = try chooser == nil ? accepted(call(.step, inputs)) : choose(call(.verify, inputs))
        text.replaceSubrange(length..., with: [last] + tokens.dropLast())
        return tokens
    }

    /// The token after `last`. Does not change the drafts.
    mutating func plain(_ last: Int32) throws -> Int32 {
        let inputs = Values([.root: [last]])
        let greedy = chooser == nil
        let token = try greedy ? ids(call(.plain, inputs), .tokens, 1)[0] : chosen(call(.verifyPlain, inputs), at: 0)
        text.replaceSubrange(length..., with: [last])
        return token
    }

    /// Drafts a token `depth` places after the next one; the candidate that it replaces becomes the next best.
    mutating func propose(_ token: Int32, at depth: Int) {
        let row = depth * geometry.k..<(depth + 1) * geometry.k
        drafts.replaceSubrange(row, with: ([token] + drafts[row].filter { $0 != token }).prefix(geometry.k))
    }

    /// Without streams, drafts of the step before may be left where the host chooses tokens.
    mutating func forgetDrafts() {
        drafts = drafts.map { _ in 0 }
    }

    /// What follows a draft's first tokens still fits after a plain call, if they are what the model said.
    mutating func shiftDrafts() {
        drafts = drafts.dropFirst(geometry.k) + drafts.suffix(geometry.k)
    }

    private mutating func accepted(_ out: Values) throws -> [Int32] {
        guard let count = out.ids[.count]?.first, 1...geometry.emitted ~= Int(count) else {
            throw BundleError.damaged("step returned \(out.ids[.count] ?? []) tokens")
        }
        let tokens = try ids(out, .tokens, Int(count))
        try keepDrafts(out)
        return tokens
    }

    /// Walks through the tree of drafts: a child that holds the chosen token is entered, the lowest node first; where none
    /// does, the path ends. Its rows are kept, and the streams draft after it.
    private mutating func choose(_ out: Values) throws -> [Int32] {
        var (path, tokens) = ([0], [Int32]())
        while true {
            let ranks = nodes[path.last!]
            let token = try chosen(out, at: path.last!)
            tokens.append(token)
            let child = nodes.indices.first { node in
                nodes[node].count == ranks.count + 1 && nodes[node].starts(with: ranks)
                    && verified[ranks.count * geometry.k + nodes[node].last!] == token
            }
            guard let child else { break }
            path.append(child)
        }
        guard engine.functions.contains(.draft) else { return tokens }
        let (width, end) = (geometry.hidden ?? 0, path.last!)
        guard let states = out.floats[.states], states.count == nodes.count * width else {
            throw BundleError.damaged("verify returned \(out.floats[.states]?.count ?? 0) numbers of states")
        }
        let padding = Array(repeating: Int32(0), count: geometry.emitted - path.count)
        let inputs = Values(
            [.path: path.map(Int32.init) + padding, .count: [Int32(path.count)], .token: [tokens.last!]],
            floats: [.lastState: Array(states[end * width..<(end + 1) * width])])
        try keepDrafts(call(.draft, inputs, at: length + path.count))
        return tokens
    }

    /// The token that is chosen after a node.
    private mutating func chosen(_ out: Values, at node: Int) throws -> Int32 {
        let row = node * geometry.vocab..<(node + 1) * geometry.vocab
        guard let logits = out.floats[.logits], logits.count >= row.upperBound else {
            throw BundleError.damaged("the package returned \(out.floats[.logits]?.count ?? 0) logits")
        }
        return try chooser!.choose(Array(logits[row]))
    }

    private mutating func call(_ function: Function, _ inputs: Values, at length: Int? = nil) throws -> Values {
        guard engine.functions.contains(function) else {
            throw BundleError.unsupported("the app has no \(function.rawValue)")
        }
        var inputs = inputs
        inputs.ids[.length] = [Int32(length ?? self.length)]
        let start = clock()
        defer { seconds += clock() - start }
        return try engine.call(function, inputs)
    }

    /// The first ids of an output.
    private func ids(_ out: Values, _ tensor: Tensor, _ count: Int) throws -> [Int32] {
        guard let ids = out.ids[tensor], ids.count >= count else {
            throw BundleError.damaged("the package returned too little \(tensor.rawValue)")
        }
        try check(ids.prefix(count))
        return Array(ids.prefix(count))
    }

    /// Apps without streams draft nothing.
    private mutating func keepDrafts(_ out: Values) throws {
        guard let next = out.ids[.nextDrafts] else { return }
        try check(next)
        guard next.count == drafts.count else { throw BundleError.damaged("a draft of \(next.count) ids") }
        drafts = next
    }

    private func check(_ ids: some Sequence<Int32>) throws {
        if let wrong = ids.first(where: { !(0..<geometry.vocab ~= Int($0)) }) {
            throw BundleError.damaged("the package returned token \(wrong), the model has \(geometry.vocab)")
        }
    }
}
