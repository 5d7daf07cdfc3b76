/// A piece of a jinja2 template. `output`: whether a tag prints, as `{{ .. }}` does.
enum TemplateToken: Equatable {
    case text(String)
    case open(output: Bool)
    case close
    case name(String)
    case string(String)
    case integer(Int)
    case sign(String)
}

/// Cuts a template into tokens as Hugging Face reads chat templates, with `trim_blocks` and `lstrip_blocks`.
struct TemplateLexer {
    private static let signs = ["==", "!=", "<=", ">=", "//", "**"].map { Array($0.utf8) }

    private let bytes: [UInt8]
    private var at = 0
    private var tokens: [TemplateToken] = []
    /// Whether the text that follows begins a line.
    private var atLineStart = true

    /// Throws `BundleError.unsupported` for what is not understood.
    static func tokens(of template: String) throws -> [TemplateToken] {
        var lexer = TemplateLexer(template)
        try lexer.cut()
        return lexer.tokens
    }

    private init(_ template: String) {
        var bytes: [UInt8] = []
        for byte in template.utf8 {
            // All line ends become \n.
            if byte == UInt8(ascii: "\n"), bytes.last == UInt8(ascii: "\r") { bytes.removeLast() }
            bytes.append(byte)
        }
        bytes = bytes.map { $0 == UInt8(ascii: "\r") ? UInt8(ascii: "\n") : $0 }
        if bytes.last == UInt8(ascii: "\n") { bytes.removeLast() }
        self.bytes = bytes
    }

    private mutating func cut() throws {
        while at < bytes.count {
            let begin = at
            while at < bytes.count, !(starts(with: "{{") || starts(with: "{%") || starts(with: "{#")) { at += 1 }
            let kind = at < bytes.count ? bytes[at + 1] : 0
            addText(bytes[begin..<at], before: kind)
            guard kind != 0 else { return }
            at += 2
            if starts(with: "-") || starts(with: "+") { at += 1 }
            if kind == UInt8(ascii: "#") {
                while at < bytes.count, !closes("#}") { at += 1 }
            } else {
                tokens.append(.open(output: kind == UInt8(ascii: "{")))
                try cutTag(kind == UInt8(ascii: "{") ? "}}" : "%}")
                tokens.append(.close)
            }
        }
    }

    /// `mark`: the second character of the tag behind the text, 0 at the end.
    private mutating func addText(_ text: ArraySlice<UInt8>, before mark: UInt8) {
        var kept = text
        let sign = mark != 0 && at + 2 < bytes.count ? bytes[at + 2] : 0
        if sign == UInt8(ascii: "-") {
            while let last = kept.last, isSpace(last) { kept.removeLast() }
        } else if mark == UInt8(ascii: "%") || mark == UInt8(ascii: "#"), sign != UInt8(ascii: "+") {
            let line = kept.lastIndex(of: UInt8(ascii: "\n")).map { $0 + 1 } ?? (atLineStart ? kept.startIndex : nil)
            if let line, kept[line...].allSatisfy(isSpace) { kept = kept[..<line] }
        }
        if !kept.isEmpty { tokens.append(.text(String(decoding: kept, as: UTF8.self))) }
    }

    /// Moves behind the end of a tag, and the space that goes with it.
    private mutating func closes(_ end: String) -> Bool {
        for sign in ["", "-", "+"] where starts(with: sign + end) {
            at += sign.utf8.count + 2
            let begin = at
            if sign == "-" {
                while at < bytes.count, isSpace(bytes[at]) { at += 1 }
            } else if sign.isEmpty, end != "}}", starts(with: "\n") {
                at += 1
            }
            atLineStart = at > begin && bytes[at - 1] == UInt8(ascii: "\n")
            return true
        }
        return false
    }

    private mutating func cutTag(_ end: String) throws {
        var open = 0
        while at < bytes.count {
            let byte = bytes[at]
            if isSpace(byte) {
                at += 1
            } else if open == 0, closes(end) {
                return
            } else if isDigit(byte) {
                guard let number = Int(take(while: isDigit)) else { throw unsupported("a long number") }
                tokens.append(.integer(number))
            } else if isLetter(byte) {
                tokens.append(.name(take { isLetter($0) || isDigit($0) }))
            } else if byte == UInt8(ascii: "'") || byte == UInt8(ascii: "\"") {
                tokens.append(.string(try string(byte)))
            } else {
                let sign = Self.signs.first { bytes[at...].starts(with: $0) } ?? [byte]
                at += sign.count
                let text = String(decoding: sign, as: UTF8.self)
                if "([{".contains(text) { open += 1 }
                if ")]}".contains(text) { open -= 1 }
                tokens.append(.sign(text))
            }
        }
        throw unsupported("a tag without an end")
    }

    private mutating func string(_ quote: UInt8) throws -> String {
        var text: [UInt8] = []
        at += 1
        while at < bytes.count, bytes[at] != quote {
            if bytes[at] == UInt8(ascii: "\\") {
                at += 1
                let escapes: [Character: Character] = [
                    "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", "\"": "\"",
                ]
                guard at < bytes.count, let meant = escapes[Character(UnicodeScalar(bytes[at]))]?.asciiValue else {
                    throw unsupported("an escape in a string")
                }
                text.append(meant)
            } else {
                text.append(bytes[at])
            }
            at += 1
        }
        guard at < bytes.count else { throw unsupported("a string without an end") }
        at += 1
        return String(decoding: text, as: UTF8.self)
    }

    private mutating func take(while matches: (UInt8) -> Bool) -> String {
        let begin = at
        while at < bytes.count, matches(bytes[at]) { at += 1 }
        return String(decoding: bytes[begin..<at], as: UTF8.self)
    }

    private func starts(with text: String) -> Bool { bytes[at...].starts(with: text.utf8) }

    private func unsupported(_ what: String) -> BundleError { .unsupported("a chat template with \(what)") }
}

private func isSpace(_ byte: UInt8) -> Bool { byte == 0x20 || 0x09...0x0D ~= byte }

private func isDigit(_ byte: UInt8) -> Bool { UInt8(ascii: "0")...UInt8(ascii: "9") ~= byte }

private func isLetter(_ byte: UInt8) -> Bool {
    UInt8(ascii: "a")...UInt8(ascii: "z") ~= byte | 0x20 || byte == UInt8(ascii: "_")
}
