/// A message of a conversation.
public struct Message: Sendable, Equatable {
    public let role: String
    public let content: String

    public init(role: String, content: String) {
        self.role = role
        self.content = content
    }
}

/// A bundle's chat template: the part of jinja2 that writes messages. It refuses what it does not know.
struct ChatTemplate: Sendable {
    private let nodes: [TemplateNode]
    private let names: [String: JSON]

    /// `names`: special tokens and other values for the template. Throws `BundleError.unsupported`.
    init(_ template: String, names: [String: JSON]) throws {
        nodes = try TemplateParser.nodes(of: template)
        self.names = names
    }

    /// The prompt for the next answer. Throws `BundleError.request` if the template refuses the conversation.
    func prompt(_ messages: [Message]) throws -> String {
        let messages = messages.map { JSON.object(["role": .string($0.role), "content": .string($0.content)]) }
        let given: [String: JSON] = ["messages": .array(messages), "add_generation_prompt": .bool(true)]
        var rendering = TemplateRendering(
            names: ["tools": .null, "documents": .null].merging(names) { $1 }.merging(given) { $1 })
        try rendering.write(nodes)
        return rendering.text
    }
}

/// One rendering. A value that is nil is undefined.
struct TemplateRendering {
    private static let (maxTurns, maxBytes) = (200_000, 1 << 23)

    private(set) var text = ""
    /// Variables, those of the innermost loop last.
    private var scopes: [[String: JSON]]
    private var turns = 0

    init(names: [String: JSON]) { scopes = [names] }

    mutating func write(_ nodes: [TemplateNode]) throws {
        for node in nodes {
            switch node {
            case .text(let piece): text += piece
            case .output(let expression): text += try string(value(expression))
            case .branches(let branches):
                let chosen = try branches.first { try $0.condition.map { truth(try value($0)) } ?? true }
                try write(chosen?.body ?? [])
            case .loop(let names, let items, let condition, let body): try loop(names, items, condition, body)
            case .assign(let name, nil, let expression): scopes[scopes.count - 1][name] = try value(expression)
            case .assign(let name, let member?, let expression):
                guard let scope = scopes.lastIndex(where: { $0[name] != nil }),
                    case .object(var members)? = scopes[scope][name]
                else { throw unsupported("a member of \(name)") }
                members[Exact(member)] = try value(expression)
                scopes[scope][name] = .object(members)
            }
            guard text.utf8.count <= Self.maxBytes else { throw unsupported("endless text") }
        }
    }

    private mutating func loop(
        _ names: [String], _ items: TemplateExpression, _ condition: TemplateExpression?, _ body: [TemplateNode]
    ) throws {
        guard names.count == 1, case .array(var items)? = try value(items) else { throw unsupported("such a loop") }
        scopes.append([:])
        defer { scopes.removeLast() }
        if let condition {
            items = try items.filter { item in
                scopes[scopes.count - 1] = [names[0]: item]
                return truth(try value(condition))
            }
        }
        for (index, item) in items.enumerated() {
            turns += 1
            guard turns <= Self.maxTurns else { throw unsupported("endless loops") }
            var loop: [Exact: JSON] = [
                "index": .integer(index + 1), "index0": .integer(index), "length": .integer(items.count),
                "revindex": .integer(items.count - index), "revindex0": .integer(items.count - index - 1),
                "first": .bool(index == 0), "last": .bool(index == items.count - 1),
            ]
            loop["previtem"] = index > 0 ? items[index - 1] : nil
            loop["nextitem"] = index + 1 < items.count ? items[index + 1] : nil
            scopes[scopes.count - 1] = [names[0]: item, "loop": .object(loop)]
            try write(body)
        }
    }

    func value(_ expression: TemplateExpression) throws -> JSON? {
        switch expression {
        case .value(let value): return value
        case .name(let name): return scopes.last { $0[name] != nil }?[name]
        case .list(let items): return .array(try items.map { try value($0) ?? .null })
        case .member(let whole, let key): return try member(value(whole), value(key))
        case .slice(let whole, let from, let to, let step): return try slice(whole, from, to, step)
        case .not(let inner): return .bool(!truth(try value(inner)))
        case .minus(let inner):
            guard let number = try value(inner)?.integer else { throw unsupported("- before such a value") }
            return .integer(0 - number)
        case .binary(let sign, let left, let right): return try binary(sign, left, right)
        case .choice(let one, let condition, let other):
            return truth(try value(condition)) ? try value(one) : try other.flatMap { try value($0) }
        case .call(let function, let arguments, let named): return try call(function, arguments, named)
        case .filter(let name, let inner, let arguments): return try filter(name, value(inner), arguments)
        case .test(let name, let inner): return .bool(try test(name, value(inner)))
        }
    }

    private func member(_ whole: JSON?, _ key: JSON?) throws -> JSON? {
        switch (whole, key) {
        case (.object(let members)?, .string(let name)?): return members[Exact(name)]
        case (.array(let items)?, .integer(let index)?):
            let place = index < 0 ? index + items.count : index
            return items.indices.contains(place) ? items[place] : nil
        case (.string?, .string?), (.array?, .string?), (.null?, .string?): return nil
        default: throw unsupported("a member of such a value")
        }
    }

    private func slice(
        _ whole: TemplateExpression, _ from: TemplateExpression?, _ to: TemplateExpression?, _ step: TemplateExpression?
    ) throws -> JSON {
        guard case .array(let items)? = try value(whole) else { throw unsupported("a slice of such a value") }
        if case .minus(.value(.integer(1)))? = step, from == nil, to == nil { return .array(items.reversed()) }
        func bound(_ expression: TemplateExpression?, _ open: Int) throws -> Int {
            guard let expression else { return open }
            guard let number = try value(expression)?.integer else { throw unsupported("such a slice") }
            return min(max(number < 0 ? number + items.count : number, 0), items.count)
        }
        let (begin, end) = (try bound(from, 0), try bound(to, items.count))
        guard step == nil else { throw unsupported("such a slice") }
        return .array(begin < end ? Array(items[begin..<end]) : [])
    }

    private func binary(_ sign: String, _ left: TemplateExpression, _ right: TemplateExpression) throws -> JSON? {
        let one = try value(left)
        if sign == "and" { return truth(one) ? try value(right) : one }
        if sign == "or" { return truth(one) ? one : try value(right) }
        let other = try value(right)
        switch (sign, one, other) {
        case ("==", _, _): return .bool(try equal(one, other))
        case ("!=", _, _): return .bool(!(try equal(one, other)))
        case ("~", _, _): return .string(try string(one) + string(other))
        case ("+", .string(let a)?, .string(let b)?): return .string(a + b)
        case ("+", .array(let a)?, .array(let b)?): return .array(a + b)
        case ("in", .string(let part)?, .string(let whole)?):
            return .bool(part.isEmpty || !whole.utf8.ranges(of: part.utf8).isEmpty)
        case ("in", _, .array(let items)?): return .bool(try items.contains { try equal(one, $0) })
        case ("in", .string(let key)?, .object(let members)?): return .bool(members[Exact(key)] != nil)
        case (_, .integer(let a)?, .integer(let b)?): return try arithmetic(sign, a, b)
        default: throw unsupported("\(sign) of such values")
        }
    }

    private func arithmetic(_ sign: String, _ a: Int, _ b: Int) throws -> JSON {
        switch sign {
        case "<": return .bool(a < b)
        case ">": return .bool(a > b)
        case "<=": return .bool(a <= b)
        case ">=": return .bool(a >= b)
        case "%" where b > 0 && a >= 0: return .integer(a % b)
        case "//" where b > 0 && a >= 0: return .integer(a / b)
        case "+": return .integer(try checked(a.addingReportingOverflow(b)))
        case "-": return .integer(try checked(a.subtractingReportingOverflow(b)))
        case "*": return .integer(try checked(a.multipliedReportingOverflow(by: b)))
        default: throw unsupported("\(sign) of such numbers")
        }
    }

    private func checked(_ result: (partialValue: Int, overflow: Bool)) throws -> Int {
        guard !result.overflow else { throw unsupported("large numbers") }
        return result.partialValue
    }
}
