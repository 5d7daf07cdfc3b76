/// The functions, methods, filters and tests of jinja2 that chat templates use, on values; nil is undefined.
extension TemplateRendering {
    func call(
        _ function: TemplateExpression, _ arguments: [TemplateExpression], _ named: [String: TemplateExpression]
    ) throws -> JSON? {
        switch function {
        case .name("raise_exception"):
            let reason = try arguments.first.map { try string(value($0)) } ?? ""
            throw BundleError.request("the chat template refuses this conversation: \(reason)")
        case .name("namespace") where arguments.isEmpty:
            let members = try named.map { (Exact($0), try value($1) ?? .null) }
            return .object(Dictionary(uniqueKeysWithValues: members))
        case .member(let subject, .value(.string(let name))) where named.isEmpty:
            return try method(name, of: value(subject), arguments.map { try value($0) })
        default: throw unsupported("such a call")
        }
    }

    private func method(_ name: String, of subject: JSON?, _ arguments: [JSON?]) throws -> JSON? {
        switch (name, subject, arguments.first ?? nil, arguments.count) {
        case ("strip", .string(let text)?, let set, 0...1): return try .string(strip(text, set))
        case ("lstrip", .string(let text)?, let set, 0...1): return try .string(strip(text, set, end: false))
        case ("rstrip", .string(let text)?, let set, 0...1): return try .string(strip(text, set, start: false))
        case ("startswith", .string(let text)?, .string(let part)?, 1): return .bool(text.utf8.starts(with: part.utf8))
        case ("endswith", .string(let text)?, .string(let part)?, 1):
            return .bool(text.utf8.reversed().starts(with: part.utf8.reversed()))
        case ("split", .string(let text)?, .string(let separator)?, 1) where !separator.isEmpty:
            let parts = text.utf8.split(separator: separator.utf8, omittingEmptySubsequences: false)
            return .array(parts.map { .string(String(decoding: $0, as: UTF8.self)) })
        case ("get", .object(let members)?, .string(let key)?, 1): return members[Exact(key)] ?? .null
        default: throw unsupported("such a call of \(name)")
        }
    }

    func filter(_ name: String, _ value: JSON?, _ arguments: [TemplateExpression]) throws -> JSON? {
        switch (name, value, arguments.count) {
        case ("trim", .string(let text)?, 0): return try .string(strip(text, nil))
        case ("length", .string(let text)?, 0): return .integer(text.unicodeScalars.count)
        case ("length", .array(let items)?, 0): return .integer(items.count)
        case ("default", _, 1): return try value ?? self.value(arguments[0])
        default: throw unsupported("the filter \(name) of such a value")
        }
    }

    func test(_ name: String, _ value: JSON?) throws -> Bool {
        switch name {
        case "defined": value != nil
        case "undefined": value == nil
        case "none": value?.isNull == true
        case "string": value?.string != nil
        case "mapping": value?.object != nil
        case "true": value?.bool == true
        case "false": value?.bool == false
        default: throw unsupported("the test \(name)")
        }
    }

    func truth(_ value: JSON?) -> Bool {
        switch value {
        case nil, .null?: false
        case .bool(let value)?: value
        case .integer(let number)?: number != 0
        case .number(let number)?: number != 0
        case .string(let text)?: !text.isEmpty
        case .array(let items)?: !items.isEmpty
        case .object(let members)?: !members.isEmpty
        }
    }

    func equal(_ one: JSON?, _ other: JSON?) throws -> Bool {
        switch (one, other) {
        case (.string(let a)?, .string(let b)?): Exact(a) == Exact(b)
        case (.integer(let a)?, .integer(let b)?): a == b
        case (.bool(let a)?, .bool(let b)?): a == b
        case (nil, nil), (.null?, .null?): true
        case (nil, _), (_, nil), (.null?, _), (_, .null?), (.string?, _), (_, .string?): false
        default: throw unsupported("a comparison of such values")
        }
    }

    /// The value as a template prints it.
    func string(_ value: JSON?) throws -> String {
        switch value {
        case nil: ""
        case .string(let text)?: text
        case .integer(let number)?: "\(number)"
        case .bool(let value)?: value ? "True" : "False"
        case .null?: "None"
        default: throw unsupported("such a value in its text")
        }
    }

    func unsupported(_ what: String) -> BundleError { .unsupported("a chat template with \(what)") }

    /// `set`: the characters to strip; nil for Python's white space.
    private func strip(_ text: String, _ set: JSON?, start: Bool = true, end: Bool = true) throws -> String {
        let stripped: Set<Unicode.Scalar>?
        switch set {
        case nil: stripped = nil
        case .string(let characters)?: stripped = Set(characters.unicodeScalars)
        default: throw unsupported("such a call of strip")
        }
        func goes(_ scalar: Unicode.Scalar) -> Bool {
            stripped?.contains(scalar) ?? (scalar.properties.isWhitespace || 0x1C...0x1F ~= scalar.value)
        }
        var kept = Substring(text).unicodeScalars
        while start, let first = kept.first, goes(first) { kept.removeFirst() }
        while end, let last = kept.last, goes(last) { kept.removeLast() }
        return String(kept)
    }
}
