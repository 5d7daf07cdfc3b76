/// The functions that a bundle may have; see `ssdevice/contract.py` for what they compute. Only ONNX bundles have
/// `step_short`, too.
public enum Function: String, CaseIterable, Sendable {
    static let stepShort = "step_short"

    case step
    case prefill
    case plain = "step_plain"
    case verify
    case verifyPlain = "verify_plain"
    case draft
}

/// Their inputs and outputs. All hold 32-bit integers, except those with floats.
public enum Tensor: String, CaseIterable, Sendable {
    case root
    case drafts
    case length
    case chunk
    case valid
    case tokens
    case count
    case nextDrafts = "next_drafts"
    case nextRoot = "next_root"
    case logits
    case states
    case path
    case token
    case lastState = "last_state"

    /// Whether it holds 32-bit floats.
    public var floats: Bool { [.logits, .states, .lastState].contains(self) }
}

extension Function {
    /// Whether it is for hosts that choose tokens.
    public var chooses: Bool { [.verify, .verifyPlain, .draft].contains(self) }

    public var inputs: [Tensor] {
        switch self {
        case .step, .verify: [.root, .drafts, .length]
        case .prefill: [.chunk, .valid, .length]
        case .plain, .verifyPlain: [.root, .length]
        case .draft: [.path, .count, .token, .lastState, .length]
        }
    }

    public var outputs: [Tensor] {
        switch self {
        case .step: [.tokens, .count, .nextDrafts]
        case .prefill: [.nextRoot, .nextDrafts]
        case .plain: [.tokens]
        case .verify, .verifyPlain: [.logits, .states]
        case .draft: [.nextDrafts]
        }
    }
}

/// The constants of an export. `tree`: the draft tree's rank paths below the root, breadth first.
public struct Geometry: Decodable, Sendable {
    static let maxNodes = 256

    public let layers: Int
    public let kvHeads: Int
    public let headDim: Int
    public let vocab: Int
    public let gamma: Int
    public let k: Int
    public let tree: [[Int]]
    public let context: Int
    public let chunk: Int
    /// D, the width of a state; nil or 0 without functions for hosts that choose tokens.
    let hidden: Int?
    /// S, the drafts of a step over the tree's first levels; nil or 0 without it.
    let short: Int?

    var chooses: Bool { hidden ?? 0 > 0 }

    /// A, the most tokens that one step can emit.
    public var emitted: Int { 1 + (tree.last?.count ?? 0) }

    /// Rows of the KV cache: enough for every fixed-size write at a length within the context.
    var capacity: Int { (context + max(chooses ? tree.count + 1 : emitted, chunk) + 31) / 32 * 32 }

    public func shape(of tensor: Tensor, in function: Function) -> [Int] {
        switch tensor {
        case .drafts, .nextDrafts: [gamma, k]
        case .chunk: [chunk]
        case .tokens where function == .step: [emitted]
        case .path: [emitted]
        case .logits: [width(of: function), vocab]
        case .states: [width(of: function), hidden ?? 0]
        case .lastState: [1, hidden ?? 0]
        case .root, .length, .valid, .tokens, .token, .count, .nextRoot: [1]
        }
    }

    /// Tokens that a call computes at once.
    func width(of function: Function) -> Int {
        switch function {
        case .step, .verify: tree.count + 1
        case .prefill: chunk
        case .plain, .verifyPlain, .draft: 1
        }
    }

    /// Throws `BundleError.damaged` for sizes that contradict each other.
    func check() throws {
        guard k <= vocab else { throw BundleError.damaged("geometry: k is \(k), the vocabulary has \(vocab)") }
        guard tree.count < Self.maxNodes else {
            throw BundleError.damaged("geometry: more than \(Self.maxNodes) nodes")
        }
        var known: Set<[Int]> = [[]]
        for path in tree {
            guard known.contains(Array(path.dropLast())), known.insert(path).inserted else {
                throw BundleError.damaged("geometry: tree path \(path) appears twice or has no parent before it")
            }
            guard path.count <= gamma, path.allSatisfy({ 0..<k ~= $0 }) else {
                throw BundleError.damaged("geometry: tree path \(path) needs more than \(gamma) streams of \(k)")
            }
        }
        let inOrder = zip(tree, tree.dropFirst()).allSatisfy { one, other in
            one.count < other.count || one.count == other.count && one.lexicographicallyPrecedes(other)
        }
        guard inOrder else { throw BundleError.damaged("geometry: tree paths are not in breadth-first order") }
        guard short ?? 0 == 0 || short! < emitted - 1 else {
            throw BundleError.damaged("geometry: short is \(short!), the tree is \(emitted - 1) deep")
        }
        guard context > tree.count + 1 else {
            throw BundleError.damaged("geometry: a context of \(context) cannot hold a tree of \(tree.count + 1) nodes")
        }
    }
}
