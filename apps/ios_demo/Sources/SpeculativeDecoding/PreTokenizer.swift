/// The steps that divide a text into words, each of which BPE encodes alone.
struct PreTokenizer: Sendable {
    private enum Step: Sendable {
        case digits
        case words(WordPattern)
    }

    private let steps: [Step]

    /// Throws `BundleError.unsupported` for steps that are not known or do not end in bytes.
    init(_ json: JSON?) throws {
        let json = json ?? .null
        var all = json["type"]?.string == "Sequence" ? json["pretokenizers"]?.array ?? [] : [json]
        guard let last = all.popLast(), last["type"]?.string == "ByteLevel", last["add_prefix_space"]?.bool == false
        else {
            throw BundleError.unsupported("a tokenizer whose words are not bytes")
        }
        steps = try all.map(Self.step) + (last["use_regex"]?.bool == false ? [] : [.words(.gpt2)])
    }

    private static func step(_ json: JSON) throws -> Step {
        switch json["type"]?.string {
        case "Digits" where json["individual_digits"]?.bool == true:
            return .digits
        case "Split" where json["behavior"]?.string == "Isolated" && json["invert"]?.bool != true:
            let regex = json["pattern"]?["Regex"]?.string ?? ""
            guard let pattern = WordPattern(regex: regex) else {
                throw BundleError.unsupported("the pattern \(regex) of the tokenizer's words")
            }
            return .words(pattern)
        default:
            throw BundleError.unsupported("the pre-tokenizer \(json["type"]?.string ?? "?") with its options")
        }
    }

    func words(of text: String) -> [[UInt8]] {
        var parts = [Array(text.unicodeScalars)[...]]
        for step in steps {
            parts = parts.flatMap { part in
                switch step {
                case .digits: Self.separatingDigits(part)
                case .words(let pattern): pattern.words(of: part)
                }
            }
        }
        return parts.map { Array(String(String.UnicodeScalarView($0)).utf8) }
    }

    private static func separatingDigits(_ text: ArraySlice<Unicode.Scalar>) -> [ArraySlice<Unicode.Scalar>] {
        var parts: [ArraySlice<Unicode.Scalar>] = []
        var start = text.startIndex
        for (at, scalar) in zip(text.indices, text) {
            switch scalar.properties.generalCategory {
            case .decimalNumber, .letterNumber, .otherNumber:
                parts += [text[start..<at], text[at...at]]
                start = at + 1
            default: break
            }
        }
        return (parts + [text[start...]]).filter { !$0.isEmpty }
    }
}
