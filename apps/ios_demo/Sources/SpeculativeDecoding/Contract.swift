/// The functions that a bundle may have; see `ssdevice/contract.py` for what they compute.
public enum Function: String, CaseIterable, Sendable {
    case step
    case prefill
    case plain = "step_plain"
}

/// Their inputs and outputs. All hold 32-bit integers.
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
}

extension Function {
    public var inputs: [Tensor] {
        switch self {
        case .step: [.root, .drafts, .length]
        case .prefill: [.chunk, .valid, .length]
        case .plain: [.root, .length]
        }
    }

    public var outputs: [Tensor] {
        switch self {
        case .step: [.tokens, .count, .nextDrafts]
        case .prefill: [.nextRoot, .nextDrafts]
        case .plain: [.tokens]
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

    /// A, the most tokens that one step can emit.
    public var emitted: Int { 1 + (tree.last?.count ?? 0) }

    /// Rows of the KV cache: enough for every fixed-size write at a length within the context.
    var capacity: Int { (context + max(emitted, chunk) + 31) / 32 * 32 }

    public func shape(of tensor: Tensor, in function: Function) -> [Int] {
        switch tensor {
        case .drafts, .nextDrafts: [gamma, k]
        case .chunk: [chunk]
        case .tokens where function == .step: [emitted]
        case .root, .length, .valid, .tokens, .count, .nextRoot: [1]
        }
    }

    /// Tokens that a call computes at once.
    func width(of function: Function) -> Int {
        switch function {
        case .step: tree.count + 1
        case .prefill: chunk
        case .plain: 1
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
        guard context > tree.count + 1 else {
            throw BundleError.damaged("geometry: a context of \(context) cannot hold a tree of \(tree.count + 1) nodes")
        }
    }
}
