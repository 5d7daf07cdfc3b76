import Foundation

/// Byte-level BPE as `tokenizer.json` describes it: enough for GPT-2's descendants, and an error for anything else.
public struct Tokenizer: Sendable {
    private let ids: [String: Int32]
    private let tokens: [Int32: String]
    private let ranks: [Pair: Int]
    private let added: [(content: String, id: Int32)]
    private let special: Set<Int32>
    private let splitsDigits: Bool

    private struct Pair: Hashable, Sendable {
        let left: String
        let right: String
    }

    public init(file: URL) throws {
        let json: Any
        do {
            json = try JSONSerialization.jsonObject(with: Data(contentsOf: file))
        } catch {
            throw BundleError.unreadable("\(file.lastPathComponent): \(error)")
        }
        guard let root = json as? [String: Any],
            let model = root["model"] as? [String: Any], model["type"] as? String == "BPE",
            let vocab = model["vocab"] as? [String: Int],
            let merges = model["merges"] as? [Any]
        else { throw BundleError.unsupported("a tokenizer that is not BPE") }
        guard root["normalizer"] is NSNull || root["normalizer"] == nil else {
            throw BundleError.unsupported("a tokenizer with a normalizer")
        }
        splitsDigits = try Self.preTokenizer(root["pre_tokenizer"])
        ids = vocab.mapValues(Int32.init)
        var ranks: [Pair: Int] = [:]
        for (rank, merge) in merges.enumerated() {
            let parts = (merge as? [String]) ?? (merge as? String)?.split(separator: " ").map(String.init) ?? []
            guard parts.count == 2 else { throw BundleError.damaged("merge \(rank) of the tokenizer") }
            ranks[Pair(left: parts[0], right: parts[1])] = rank
        }
        self.ranks = ranks
        var added: [(content: String, id: Int32)] = []
        var special: Set<Int32> = []
        for entry in root["added_tokens"] as? [[String: Any]] ?? [] {
            guard let content = entry["content"] as? String, let id = entry["id"] as? Int else { continue }
            added.append((content, Int32(id)))
            if entry["special"] as? Bool == true { special.insert(Int32(id)) }
        }
        // The longest first, so that no token hides another that begins with it.
        self.added = added.sorted { $0.content.count > $1.content.count }
        self.special = special
        var tokens: [Int32: String] = [:]
        for (token, id) in vocab { tokens[Int32(id)] = token }
        for token in added { tokens[token.id] = token.content }
        self.tokens = tokens
    }

    /// Ids of a text, added tokens recognised in it.
    public func encode(_ text: String) -> [Int32] {
        var result: [Int32] = []
        var plain = ""
        var rest = Substring(text)
        while let first = rest.first {
            if let token = added.first(where: { rest.hasPrefix($0.content) }) {
                result += encodePlain(plain)
                plain = ""
                result.append(token.id)
                rest = rest.dropFirst(token.content.count)
            } else {
                plain.append(first)
                rest = rest.dropFirst()
            }
        }
        return result + encodePlain(plain)
    }

    /// The bytes a token stands for; none for special tokens. Characters may be cut between tokens.
    public func bytes(_ id: Int32) -> [UInt8] {
        guard !special.contains(id), let token = tokens[id] else { return [] }
        return token.unicodeScalars.flatMap { scalar in
            Self.byte[scalar].map { [$0] } ?? Array(String(scalar).utf8)
        }
    }

    private func encodePlain(_ text: String) -> [Int32] {
        guard !text.isEmpty else { return [] }
        var result: [Int32] = []
        for run in splitsDigits ? Self.separatingDigits(text) : [text] {
            for match in run.matches(of: Self.words) {
                let symbols = run[match.range].utf8.map { String(Self.scalar[Int($0)]) }
                result += merge(symbols).compactMap { ids[$0] }
            }
        }
        return result
    }

    private func merge(_ symbols: [String]) -> [String] {
        var parts = symbols
        while parts.count > 1 {
            var best: (rank: Int, index: Int)?
            for index in 0..<(parts.count - 1) {
                if let rank = ranks[Pair(left: parts[index], right: parts[index + 1])], rank < best?.rank ?? .max {
                    best = (rank, index)
                }
            }
            guard let best else { break }
            parts.replaceSubrange(best.index...(best.index + 1), with: [parts[best.index] + parts[best.index + 1]])
        }
        return parts
    }

    // MARK: - Pre-tokenization

    /// Whether digits stand alone; throws for steps this tokenizer does not know.
    private static func preTokenizer(_ json: Any?) throws -> Bool {
        guard let step = json as? [String: Any] else { throw BundleError.unsupported("a tokenizer without bytes") }
        let steps = step["pretokenizers"] as? [[String: Any]] ?? [step]
        var digits = false
        var byteLevel = false
        for step in steps {
            switch step["type"] as? String {
            case "Digits" where step["individual_digits"] as? Bool == true && !byteLevel:
                digits = true
            case "ByteLevel" where step["add_prefix_space"] as? Bool == false && step["use_regex"] as? Bool != false:
                byteLevel = true
            default:
                throw BundleError.unsupported("the pre-tokenizer \(step["type"] ?? "?")")
            }
        }
        guard byteLevel else { throw BundleError.unsupported("a tokenizer without bytes") }
        return digits
    }

    /// GPT-2's division of a text into words, their leading space with them.
    private nonisolated(unsafe) static let words =
        #/'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/#
        .matchingSemantics(.unicodeScalar)

    private static func separatingDigits(_ text: String) -> [String] {
        var runs: [String] = []
        var current = String.UnicodeScalarView()
        for scalar in text.unicodeScalars {
            if scalar.properties.numericType != nil {
                if !current.isEmpty { runs.append(String(current)) }
                current = String.UnicodeScalarView()
                runs.append(String(scalar))
            } else {
                current.append(scalar)
            }
        }
        if !current.isEmpty { runs.append(String(current)) }
        return runs
    }

    // MARK: - Bytes as characters

    /// The printable character that stands for each byte in the vocabulary.
    private static let scalar: [Unicode.Scalar] = {
        var next: UInt32 = 256
        return (0..<256).map { byte in
            if (33...126).contains(byte) || (161...172).contains(byte) || (174...255).contains(byte) {
                return Unicode.Scalar(UInt8(byte))
            }
            defer { next += 1 }
            return Unicode.Scalar(next)!
        }
    }()

    private static let byte: [Unicode.Scalar: UInt8] = Dictionary(
        uniqueKeysWithValues: scalar.enumerated().map { ($1, UInt8($0)) }
    )
}
