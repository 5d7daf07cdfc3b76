import Foundation

/// Byte-level BPE as `tokenizer.json` describes it, with the words of GPT-2, Llama 3 or Qwen. Whatever it does not know
/// is an error, not a guess.
public struct Tokenizer: Sendable {
    private struct Pair: Hashable {
        let left: Int32
        let right: Int32
    }

    private struct Merge {
        let rank: Int
        let id: Int32
    }

    private let bytesOf: [Int32: [UInt8]]
    private let marks: [Int32: String]
    /// The id of each single byte; nil where the vocabulary lacks it.
    private let byteIds: [Int32?]
    private let merges: [Pair: Merge]
    /// Words that are tokens as they stand, whatever merges would make of them; only with `ignore_merges`.
    private let wholeWords: [[UInt8]: Int32]
    private let steps: PreTokenizer
    private let composes: Bool
    private let added: AddedTokens
    private let normalizedAdded: AddedTokens

    /// Throws `BundleError` for a file that cannot be read or asks for something unknown.
    public init(file: URL) throws {
        try self.init(JSON(file: file))
    }

    init(_ json: JSON) throws {
        guard let model = json["model"], model["type"]?.string == "BPE", let vocab = model["vocab"]?.object,
            let merges = model["merges"]?.array
        else { throw BundleError.unsupported("a tokenizer that is not BPE") }
        for key: Exact in ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"] {
            guard model[key]?.isNull ?? true || model[key]?.string?.isEmpty == true else {
                throw BundleError.unsupported("a tokenizer with \(key.text)")
            }
        }
        guard model["byte_fallback"]?.bool != true, json["decoder"]?["type"]?.string == "ByteLevel" else {
            throw BundleError.unsupported("a tokenizer whose tokens are not bytes")
        }
        composes = try Self.composes(json["normalizer"])
        steps = try PreTokenizer(json["pre_tokenizer"])
        let ids = try vocab.mapValues(Self.id)
        var bytesOf = Dictionary(ids.map { ($1, ByteAlphabet.bytes($0.text)) }) { one, _ in one }
        byteIds = (0..<256).map { ids[Exact(ByteAlphabet.text([UInt8($0)]))] }
        self.merges = try Self.merges(merges, ids)
        let ignoresMerges = model["ignore_merges"]?.bool == true
        wholeWords = ignoresMerges ? Dictionary(ids.map { (ByteAlphabet.bytes($0.text), $1) }) { one, _ in one } : [:]

        var plain: [Int32: String] = [:]
        var normalized: [Int32: String] = [:]
        var marks: [Int32: String] = [:]
        for entry in json["added_tokens"]?.array ?? [] {
            guard let content = entry["content"]?.string, !content.isEmpty, let id = try entry["id"].map(Self.id) else {
                throw BundleError.damaged("an added token of the tokenizer")
            }
            guard ids[Exact(content)] ?? id == id else { throw BundleError.damaged("added token \(content): two ids") }
            for key: Exact in ["lstrip", "rstrip", "single_word"] where entry[key]?.bool == true {
                throw BundleError.unsupported("added token \(content) with \(key.text)")
            }
            let isNormalized = entry["normalized"]?.bool == true
            let text = isNormalized && composes ? content.precomposedStringWithCanonicalMapping : content
            if isNormalized { normalized[id] = text } else { plain[id] = text }
            // Special tokens mark the text and are no part of it.
            let isSpecial = entry["special"]?.bool == true
            bytesOf[id] = isSpecial ? [] : ByteAlphabet.bytes(text)
            marks[id] = isSpecial ? content : nil
        }
        self.bytesOf = bytesOf
        self.marks = marks
        added = AddedTokens(plain)
        normalizedAdded = AddedTokens(normalized)
    }

    /// The ids of a text. Added tokens that are written out in it are recognised.
    public func encode(_ text: String) -> [Int32] {
        added.split(Array(text.utf8)[...]).flatMap { part -> [Int32] in
            switch part {
            case .token(let id): [id]
            case .text(let bytes): encodeNormalized(bytes)
            }
        }
    }

    /// The bytes that a token stands for; none for special tokens. Characters may be cut between tokens.
    public func bytes(_ id: Int32) -> [UInt8] { bytesOf[id] ?? [] }

    /// What a special token is written as; empty for the others.
    func mark(_ id: Int32) -> String { marks[id] ?? "" }

    private func encodeNormalized(_ bytes: ArraySlice<UInt8>) -> [Int32] {
        let text = String(decoding: bytes, as: UTF8.self)
        let whole = composes ? text.precomposedStringWithCanonicalMapping : text
        return normalizedAdded.split(Array(whole.utf8)[...]).flatMap { part -> [Int32] in
            switch part {
            case .token(let id): [id]
            case .text(let bytes): steps.words(of: String(decoding: bytes, as: UTF8.self)).flatMap(encodeWord)
            }
        }
    }

    private func encodeWord(_ word: [UInt8]) -> [Int32] {
        if let id = wholeWords[word] { return [id] }
        var ids = word.compactMap { byteIds[Int($0)] }
        func merge(at index: Int) -> Merge? { merges[Pair(left: ids[index], right: ids[index + 1])] }
        // Of every pair of neighbours, so that a merge looks up only the two pairs that it changes.
        var ranks = ids.indices.dropLast().map { merge(at: $0)?.rank ?? .max }
        while let index = ranks.indices.min(by: { ranks[$0] < ranks[$1] }), let best = merge(at: index) {
            ids[index] = best.id
            ids.remove(at: index + 1)
            ranks.remove(at: index)
            for changed in [index - 1, index] where ranks.indices.contains(changed) {
                ranks[changed] = merge(at: changed)?.rank ?? .max
            }
        }
        return ids
    }

    // MARK: - Reading the file

    private static func id(_ json: JSON) throws -> Int32 {
        guard let number = json.integer, let id = Int32(exactly: number), id >= 0 else {
            throw BundleError.damaged("an id of the tokenizer")
        }
        return id
    }

    private static func composes(_ normalizer: JSON?) throws -> Bool {
        guard let normalizer, !normalizer.isNull else { return false }
        guard normalizer["type"]?.string == "NFC" else {
            throw BundleError.unsupported("the normalizer \(normalizer["type"]?.string ?? "?") of the tokenizer")
        }
        return true
    }

    private static func merges(_ json: [JSON], _ ids: [Exact: Int32]) throws -> [Pair: Merge] {
        var merges: [Pair: Merge] = [:]
        for (rank, merge) in json.enumerated() {
            let parts =
                merge.array?.compactMap(\.string)
                ?? merge.string?.split(separator: " ", omittingEmptySubsequences: false).map(String.init) ?? []
            guard parts.count == 2, let left = ids[Exact(parts[0])], let right = ids[Exact(parts[1])],
                let id = ids[Exact(parts[0] + parts[1])]
            else { throw BundleError.damaged("merge \(rank) of the tokenizer") }
            merges[Pair(left: left, right: right)] = Merge(rank: rank, id: id)
        }
        return merges
    }
}

/// Tokens that are found in a text before anything else, the longest at each place.
private struct AddedTokens {
    enum Part {
        case text(ArraySlice<UInt8>)
        case token(Int32)
    }

    private let byFirst: [UInt8: [(content: [UInt8], id: Int32)]]

    init(_ tokens: [Int32: String]) {
        let all = tokens.map { (content: Array($1.utf8), id: $0) }
        byFirst = Dictionary(grouping: all.sorted { $0.content.count > $1.content.count }) { $0.content[0] }
    }

    func split(_ text: ArraySlice<UInt8>) -> [Part] {
        var parts: [Part] = []
        var start = text.startIndex
        var at = start
        while at < text.endIndex {
            guard let token = byFirst[text[at]]?.first(where: { text[at...].starts(with: $0.content) }) else {
                at += 1
                continue
            }
            if start < at { parts.append(.text(text[start..<at])) }
            parts.append(.token(token.id))
            at += token.content.count
            start = at
        }
        if start < at { parts.append(.text(text[start..<at])) }
        return parts
    }
}

/// The printable characters that stand for bytes in the vocabulary.
private enum ByteAlphabet {
    private static let scalars: [Unicode.Scalar] = {
        var next: UInt32 = 256
        return (0..<256).map { byte in
            if (33...126).contains(byte) || (161...172).contains(byte) || (174...255).contains(byte) {
                return Unicode.Scalar(UInt8(byte))
            }
            defer { next += 1 }
            return Unicode.Scalar(next)!
        }
    }()

    private static let byScalar = Dictionary(uniqueKeysWithValues: scalars.enumerated().map { ($1, UInt8($0)) })

    static func text(_ bytes: [UInt8]) -> String {
        String(String.UnicodeScalarView(bytes.map { scalars[Int($0)] }))
    }

    /// What a token stands for. One with a character that is no byte stands for itself.
    static func bytes(_ token: String) -> [UInt8] {
        let bytes = token.unicodeScalars.compactMap { byScalar[$0] }
        return bytes.count == token.unicodeScalars.count ? bytes : Array(token.utf8)
    }
}
