/// The regular expressions that divide a text into words before BPE, written out by hand: tokenizers use one of a few,
/// and a general engine would take most of the time.
enum WordPattern: Sendable, Equatable {
    /// `ByteLevel` with `use_regex`.
    case gpt2
    /// GPT-4's and its relatives: endings such as `'S` in any case, words that may begin with any mark, numbers of at
    /// most so many digits, line breaks with the punctuation before them.
    case gpt4(mostDigits: Int)

    /// By the regex in `tokenizer.json`; nil for one that is not known.
    init?(regex: String) {
        let (head, tail) = (
            #"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"#,
            #"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"#
        )
        switch regex {
        case #"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"#,
            #"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"#:
            self = .gpt2
        case head + #"\p{N}{1,3}"# + tail: self = .gpt4(mostDigits: 3)  // Llama 3
        case head + #"\p{N}"# + tail: self = .gpt4(mostDigits: 1)  // Qwen 2 and 3
        default: return nil
        }
    }

    /// The words of a text, which together are the text.
    func words(of text: ArraySlice<Unicode.Scalar>) -> [ArraySlice<Unicode.Scalar>] {
        let text = Array(text)
        let kinds = text.map(Kind.init)
        var words: [ArraySlice<Unicode.Scalar>] = []
        var start = 0
        while start < text.count {
            let end = wordEnd(text, kinds, start)
            words.append(text[start..<end])
            start = end
        }
        return words
    }

    private enum Kind {
        case letter, number, space, lineBreak, other

        init(_ scalar: Unicode.Scalar) {
            switch scalar.properties.generalCategory {
            case .uppercaseLetter, .lowercaseLetter, .titlecaseLetter, .modifierLetter, .otherLetter: self = .letter
            case .decimalNumber, .letterNumber, .otherNumber: self = .number
            default:
                self = scalar == "\r" || scalar == "\n" ? .lineBreak : scalar.properties.isWhitespace ? .space : .other
            }
        }

        var isSpace: Bool { self == .space || self == .lineBreak }
    }

    /// The end of the word at `start`: the first alternative of the regex that matches there.
    private func wordEnd(_ text: [Unicode.Scalar], _ kinds: [Kind], _ start: Int) -> Int {
        func run(of kind: Kind, from: Int, most: Int = .max) -> Int? {
            var end = from
            while end < kinds.count, end - from < most, kinds[end] == kind { end += 1 }
            return end > from ? end : nil
        }

        if let end = endingEnd(text, start) { return end }
        let afterSpace = text[start] == " " ? start + 1 : start
        switch self {
        case .gpt2:
            for kind in [Kind.letter, .number, .other] {
                if let end = run(of: kind, from: afterSpace) { return end }
            }
        case .gpt4(let mostDigits):
            let afterMark = kinds[start] == .space || kinds[start] == .other ? start + 1 : start
            if let end = run(of: .letter, from: afterMark) { return end }
            if let end = run(of: .number, from: start, most: mostDigits) { return end }
            if let end = run(of: .other, from: afterSpace) { return run(of: .lineBreak, from: end) ?? end }
        }
        let end = kinds[start...].firstIndex { !$0.isSpace } ?? kinds.count
        if self != .gpt2, let last = kinds[start..<end].lastIndex(of: .lineBreak) { return last + 1 }
        return end == kinds.count || end == start + 1 ? end : end - 1
    }

    private func endingEnd(_ text: [Unicode.Scalar], _ start: Int) -> Int? {
        guard text[start] == "'" else { return nil }
        let following = text[(start + 1)...].prefix(2).map(self == .gpt2 ? { $0 } : lowercase)
        let ending = ["s", "t", "m", "d", "re", "ve", "ll"].first { following.starts(with: $0.unicodeScalars) }
        return ending.map { start + 1 + $0.utf8.count }
    }

    /// Of the letters in endings. The long s is an s where case does not count.
    private func lowercase(_ scalar: Unicode.Scalar) -> Unicode.Scalar {
        switch scalar {
        case "A"..."Z": Unicode.Scalar(UInt8(scalar.value + 32))
        case "ſ": "s"
        default: scalar
        }
    }
}
