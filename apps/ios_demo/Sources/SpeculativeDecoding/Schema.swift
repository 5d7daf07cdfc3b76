import Foundation

/// The part of JSON Schema that `manifest.schema.json` uses. Patterns match whole texts.
struct Schema {
    private let root: JSON
    private var patterns: [String: Regex<AnyRegexOutput>] = [:]

    init(_ root: JSON) { self.root = root }

    /// The schema of manifests, the same file as that of the Python package.
    static func manifest() throws -> Schema {
        guard let file = Bundle.module.url(forResource: "manifest.schema", withExtension: "json") else {
            throw BundleError.unreadable("manifest.schema.json, a resource of this package")
        }
        return Schema(try JSON(file: file))
    }

    /// Throws `BundleError.damaged`, which names the place of the first value that breaks the schema.
    mutating func check(_ value: JSON, at place: String) throws {
        try check(value, root, place)
    }

    private mutating func check(_ value: JSON, _ schema: JSON, _ place: String) throws {
        if let reference = schema["$ref"]?.string {
            let name = reference.split(separator: "/").last.map(String.init) ?? ""
            return try check(value, root["$defs"]?[Exact(name)] ?? .null, place)
        }
        if let choices = schema["anyOf"]?.array {
            var problem: (any Error)?
            for choice in choices {
                do { return try check(value, choice, place) } catch { problem = error }
            }
            throw problem ?? BundleError.damaged(place)
        }
        if let allowed = schema["enum"]?.array {
            guard let text = value.string, allowed.contains(where: { $0.string == text }) else {
                throw BundleError.damaged("\(place) is not one of \(allowed.compactMap(\.string))")
            }
        }
        if let type = schema["type"]?.string, !value.isA(type) {
            throw BundleError.damaged("\(place): expected \(type)")
        }
        switch value {
        case .integer(let number): try check(number, schema["minimum"], schema["maximum"], place)
        case .string(let text): try check(text, schema, place)
        case .array(let items):
            try check(items.count, schema["minItems"], schema["maxItems"], "\(place): the number of entries")
            for (index, item) in items.enumerated() {
                try check(item, schema["items"] ?? .null, "\(place)[\(index)]")
            }
        case .object(let members): try check(members, schema, place)
        case .null, .bool, .number: break
        }
    }

    private func check(_ number: Int, _ low: JSON?, _ high: JSON?, _ place: String) throws {
        guard number >= low?.integer ?? .min, number <= high?.integer ?? .max else {
            throw BundleError.damaged("\(place) is \(number), out of its bounds")
        }
    }

    private mutating func check(_ text: String, _ schema: JSON, _ place: String) throws {
        if let most = schema["maxLength"]?.integer, text.unicodeScalars.count > most {
            throw BundleError.damaged("\(place) has more than \(most) characters")
        }
        guard let pattern = schema["pattern"]?.string else { return }
        let regex = try patterns[pattern] ?? Regex(pattern).matchingSemantics(.unicodeScalar)
        patterns[pattern] = regex
        if try regex.wholeMatch(in: text) == nil {
            throw BundleError.damaged("\(place) is \(text.prefix(100).debugDescription), expected \(pattern)")
        }
    }

    private mutating func check(_ members: [Exact: JSON], _ schema: JSON, _ place: String) throws {
        try check(members.count, nil, schema["maxProperties"], "\(place): the number of entries")
        for name in schema["required"]?.array?.compactMap(\.string) ?? [] where members[Exact(name)] == nil {
            throw BundleError.damaged("\(place): \(name) is missing")
        }
        for (key, item) in members {
            if let names = schema["propertyNames"] { try check(.string(key.text), names, "\(place): a name") }
            let inside = "\(place).\(key.text.prefix(60))"
            if let known = schema["properties"]?[key] {
                try check(item, known, inside)
            } else if schema["additionalProperties"]?.bool == false {
                throw BundleError.damaged("\(inside): unknown key")
            } else {
                try check(item, schema["additionalProperties"] ?? .null, inside)
            }
        }
    }
}

extension JSON {
    /// Whether a value has a type of JSON Schema; no number with a fraction or an exponent is an integer.
    fileprivate func isA(_ type: String) -> Bool {
        switch (type, self) {
        case ("null", .null), ("boolean", .bool), ("integer", .integer), ("number", .integer), ("number", .number),
            ("string", .string), ("array", .array), ("object", .object):
            true
        default: false
        }
    }
}
