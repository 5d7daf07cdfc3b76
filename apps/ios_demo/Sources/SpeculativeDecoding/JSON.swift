import Foundation

/// Text compared byte by byte. For `String`, an accented letter equals the letter followed by its accent.
struct Exact: Hashable, Sendable, ExpressibleByStringLiteral {
    let text: String

    init(_ text: String) { self.text = text }
    init(stringLiteral text: String) { self.text = text }

    static func == (one: Exact, other: Exact) -> Bool { one.text.utf8.elementsEqual(other.text.utf8) }

    func hash(into hasher: inout Hasher) {
        for byte in text.utf8 { hasher.combine(byte) }
    }
}

/// A JSON value, and a reader that refuses what readers disagree on: repeated keys, numbers that are not finite, half
/// surrogate pairs, deep nesting.
enum JSON: Sendable {
    static let maxDepth = 32
    /// Longer integers are refused by Python too.
    private static let maxDigits = 4300

    case null
    case bool(Bool)
    case integer(Int)
    /// Also integers beyond `Int`.
    case number(Double)
    case string(String)
    case array([JSON])
    case object([Exact: JSON])

    /// Throws `BundleError.unreadable`, which begins with `name`.
    init(_ data: Data, name: String) throws {
        guard String(validating: data, as: UTF8.self) != nil else {
            throw BundleError.unreadable("\(name): not UTF-8 text")
        }
        var reader = Reader(bytes: Array(data), name: name)
        self = try reader.document()
    }

    init(file: URL) throws {
        let data: Data
        do {
            data = try Data(contentsOf: file)
        } catch {
            throw BundleError.unreadable("\(file.lastPathComponent): \(error.localizedDescription)")
        }
        try self.init(data, name: file.lastPathComponent)
    }

    subscript(key: Exact) -> JSON? { object?[key] }

    var object: [Exact: JSON]? { if case .object(let members) = self { members } else { nil } }
    var array: [JSON]? { if case .array(let items) = self { items } else { nil } }
    var string: String? { if case .string(let text) = self { text } else { nil } }
    var integer: Int? { if case .integer(let number) = self { number } else { nil } }
    var bool: Bool? { if case .bool(let value) = self { value } else { nil } }
    var isNull: Bool { if case .null = self { true } else { false } }

    private struct Reader {
        let bytes: [UInt8]
        let name: String
        var at = 0
        var depth = 0

        mutating func document() throws -> JSON {
            let value = try value()
            skipSpace()
            guard at == bytes.count else { throw wrong("more than one value") }
            return value
        }

        private func wrong(_ what: String) -> BundleError {
            .unreadable("\(name): not JSON that all readers understand (byte \(at): \(what))")
        }

        private var next: UInt8? { at < bytes.count ? bytes[at] : nil }

        private mutating func skipSpace() {
            while let byte = next, byte == 0x20 || byte == 0x0A || byte == 0x0D || byte == 0x09 { at += 1 }
        }

        private mutating func take(_ byte: Character) -> Bool {
            guard next == byte.asciiValue else { return false }
            at += 1
            return true
        }

        private mutating func take(word: String) -> Bool {
            guard bytes[at...].starts(with: word.utf8) else { return false }
            at += word.utf8.count
            return true
        }

        private mutating func value() throws -> JSON {
            skipSpace()
            if take("{") { return try nested { try $0.members() } }
            if take("[") { return try nested { try $0.items() } }
            if take("\"") { return .string(try string()) }
            if take(word: "null") { return .null }
            if take(word: "true") { return .bool(true) }
            if take(word: "false") { return .bool(false) }
            return try number()
        }

        private mutating func nested(_ read: (inout Reader) throws -> JSON) throws -> JSON {
            depth += 1
            defer { depth -= 1 }
            guard depth <= JSON.maxDepth else { throw wrong("nested deeper than \(JSON.maxDepth) levels") }
            return try read(&self)
        }

        private mutating func members() throws -> JSON {
            var members: [Exact: JSON] = [:]
            skipSpace()
            if take("}") { return .object(members) }
            repeat {
                skipSpace()
                guard take("\"") else { throw wrong("expected a key") }
                let key = Exact(try string())
                skipSpace()
                guard take(":") else { throw wrong("expected a colon") }
                guard members.updateValue(try value(), forKey: key) == nil else {
                    throw wrong("key \(key.text.prefix(60)) appears twice in one object")
                }
                skipSpace()
            } while take(",")
            guard take("}") else { throw wrong("expected the end of an object") }
            return .object(members)
        }

        private mutating func items() throws -> JSON {
            var items: [JSON] = []
            skipSpace()
            if take("]") { return .array(items) }
            repeat {
                items.append(try value())
                skipSpace()
            } while take(",")
            guard take("]") else { throw wrong("expected the end of a list") }
            return .array(items)
        }

        private mutating func string() throws -> String {
            var text = ""
            var start = at
            while let byte = next {
                switch byte {
                case 0x22:
                    text += String(decoding: bytes[start..<at], as: UTF8.self)
                    at += 1
                    return text
                case 0x5C:
                    text += String(decoding: bytes[start..<at], as: UTF8.self)
                    at += 1
                    text.unicodeScalars.append(try escaped())
                    start = at
                case 0..<0x20:
                    throw wrong("a control character")
                default:
                    at += 1
                }
            }
            throw wrong("a string without end")
        }

        private mutating func escaped() throws -> Unicode.Scalar {
            let plain: [Character: Unicode.Scalar] = [
                "\"": "\"", "\\": "\\", "/": "/", "b": "\u{8}", "f": "\u{C}", "n": "\n", "r": "\r", "t": "\t",
            ]
            if let byte = next, let scalar = plain[Character(Unicode.Scalar(byte))] {
                at += 1
                return scalar
            }
            var units = [try unit()]
            if UTF16.isLeadSurrogate(units[0]) {
                guard take("\\") else { throw wrong("half a surrogate pair") }
                units.append(try unit())
            }
            var codec = UTF16()
            var iterator = units.makeIterator()
            guard case .scalarValue(let scalar) = codec.decode(&iterator) else { throw wrong("half a surrogate pair") }
            return scalar
        }

        private mutating func unit() throws -> UInt16 {
            let digits = bytes[at...].dropFirst().prefix(4)
            guard take("u"), digits.count == 4, digits.allSatisfy({ Character(Unicode.Scalar($0)).isHexDigit }) else {
                throw wrong("an unknown escape")
            }
            at += 4
            return UInt16(String(decoding: digits, as: UTF8.self), radix: 16)!
        }

        private mutating func number() throws -> JSON {
            let start = at
            _ = take("-")
            if !take("0") { try digits() }
            let whole = at
            if take(".") { try digits() }
            if take("e") || take("E") {
                if !take("+") { _ = take("-") }
                try digits()
            }
            let text = String(decoding: bytes[start..<at], as: UTF8.self)
            if at == whole, let integer = Int(text) { return .integer(integer) }
            guard at != whole || at - start <= JSON.maxDigits, let value = Double(text), value.isFinite else {
                throw wrong("a number that is not finite")
            }
            return .number(value)
        }

        private mutating func digits() throws {
            let start = at
            while let byte = next, (0x30...0x39).contains(byte) { at += 1 }
            guard at > start else { throw wrong("expected a value") }
        }
    }
}
