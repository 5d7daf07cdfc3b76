indirect enum TemplateExpression: Sendable {
    case value(JSON)
    case name(String)
    case list([TemplateExpression])
    /// `a.b`, `a['b']` or `a[0]`.
    case member(TemplateExpression, TemplateExpression)
    case slice(TemplateExpression, from: TemplateExpression?, to: TemplateExpression?, step: TemplateExpression?)
    case not(TemplateExpression)
    case minus(TemplateExpression)
    case binary(String, TemplateExpression, TemplateExpression)
    case choice(TemplateExpression, if: TemplateExpression, else: TemplateExpression?)
    case call(TemplateExpression, [TemplateExpression], named: [String: TemplateExpression])
    case filter(String, TemplateExpression, [TemplateExpression])
    case test(String, TemplateExpression)
}

enum TemplateNode: Sendable {
    case text(String)
    case output(TemplateExpression)
    /// The first branch whose condition holds; nil always does.
    case branches([(condition: TemplateExpression?, body: [TemplateNode])])
    case loop([String], TemplateExpression, where: TemplateExpression?, body: [TemplateNode])
    /// Sets a variable, or the member of a namespace.
    case assign(String, member: String?, TemplateExpression)
}

/// Parses the part of jinja2 that chat templates use to write messages. Throws `BundleError.unsupported` for the rest.
struct TemplateParser {
    private static let maxDepth = 64
    /// From the loosest to the tightest.
    private static let operators = [["+", "-"], ["~"], ["*", "/", "//", "%"]]
    private static let comparisons: Set = ["==", "!=", "<", ">", "<=", ">="]

    private var tokens: ArraySlice<TemplateToken>
    private var depth = 0

    static func nodes(of template: String) throws -> [TemplateNode] {
        var parser = TemplateParser(tokens: try TemplateLexer.tokens(of: template)[...])
        let nodes = try parser.nodes(until: [])
        guard parser.tokens.isEmpty else { throw parser.unexpected() }
        return nodes
    }

    private init(tokens: ArraySlice<TemplateToken>) { self.tokens = tokens }

    private mutating func nodes(until ends: Set<String>) throws -> [TemplateNode] {
        try deeper { parser in
            var found: [TemplateNode] = []
            while let token = parser.tokens.first {
                if case .text(let text) = token {
                    parser.tokens.removeFirst()
                    found.append(.text(text))
                } else if parser.take(.open(output: true)) {
                    found.append(.output(try parser.expression()))
                    try parser.expect(.close)
                } else if case .name(let word)? = parser.tokens.dropFirst().first, !ends.contains(word) {
                    parser.tokens.removeFirst(2)
                    found += try parser.statement(word)
                } else {
                    break
                }
            }
            return found
        }
    }

    private mutating func statement(_ word: String) throws -> [TemplateNode] {
        switch word {
        case "if": return [.branches(try branches())]
        case "for": return [try loop()]
        case "set":
            let name = try name()
            let member = take(.sign(".")) ? try self.name() : nil
            try expect(.sign("="))
            let value = try expression()
            try expect(.close)
            return [.assign(name, member: member, value)]
        case "generation":  // marks what is trained on
            try expect(.close)
            let body = try nodes(until: ["endgeneration"])
            try end("endgeneration")
            return body
        default: throw BundleError.unsupported("a chat template with \(word)")
        }
    }

    private mutating func branches() throws -> [(condition: TemplateExpression?, body: [TemplateNode])] {
        var found: [(condition: TemplateExpression?, body: [TemplateNode])] = []
        var condition: TemplateExpression? = try expression()
        while true {
            try expect(.close)
            found.append((condition, try nodes(until: ["elif", "else", "endif"])))
            try expect(.open(output: false))
            if condition != nil, take(.name("elif")) {
                condition = try expression()
            } else if condition != nil, take(.name("else")) {
                condition = nil
            } else {
                try expect(.name("endif"))
                try expect(.close)
                return found
            }
        }
    }

    private mutating func loop() throws -> TemplateNode {
        var names = [try name()]
        while take(.sign(",")) { names.append(try name()) }
        try expect(.name("in"))
        let items = try operation(0)
        let condition = take(.name("if")) ? try expression() : nil
        try expect(.close)
        let body = try nodes(until: ["endfor"])
        try end("endfor")
        return .loop(names, items, where: condition, body: body)
    }

    private mutating func end(_ word: String) throws {
        try expect(.open(output: false))
        try expect(.name(word))
        try expect(.close)
    }

    private mutating func expression() throws -> TemplateExpression {
        try deeper { parser in
            let value = try parser.either()
            guard parser.take(.name("if")) else { return value }
            let condition = try parser.either()
            return .choice(value, if: condition, else: parser.take(.name("else")) ? try parser.expression() : nil)
        }
    }

    private mutating func either() throws -> TemplateExpression {
        var left = try both()
        while take(.name("or")) { left = .binary("or", left, try both()) }
        return left
    }

    private mutating func both() throws -> TemplateExpression {
        var left = try negation()
        while take(.name("and")) { left = .binary("and", left, try negation()) }
        return left
    }

    private mutating func negation() throws -> TemplateExpression {
        try deeper { parser in parser.take(.name("not")) ? .not(try parser.negation()) : try parser.comparison() }
    }

    private mutating func comparison() throws -> TemplateExpression {
        let left = try operation(0)
        if case .sign(let sign)? = tokens.first, Self.comparisons.contains(sign) {
            tokens.removeFirst()
            return .binary(sign, left, try operation(0))
        }
        if tokens.starts(with: [.name("not"), .name("in")]) {
            tokens.removeFirst(2)
            return .not(.binary("in", left, try operation(0)))
        }
        return take(.name("in")) ? .binary("in", left, try operation(0)) : left
    }

    private mutating func operation(_ level: Int) throws -> TemplateExpression {
        guard level < Self.operators.count else { return try unary() }
        var left = try operation(level + 1)
        while case .sign(let sign)? = tokens.first, Self.operators[level].contains(sign) {
            tokens.removeFirst()
            left = .binary(sign, left, try operation(level + 1))
        }
        return left
    }

    private mutating func unary() throws -> TemplateExpression {
        if take(.sign("-")) { return .minus(try deeper { try $0.unary() }) }
        var value = try primary()
        while true {
            if take(.sign(".")) {
                value = .member(value, .value(.string(try name())))
            } else if take(.sign("[")) {
                value = try subscripted(value)
            } else if take(.sign("(")) {
                let (plain, named) = try arguments()
                value = .call(value, plain, named: named)
            } else if take(.sign("|")) {
                let name = try name()
                value = .filter(name, value, take(.sign("(")) ? try arguments().plain : [])
            } else if take(.name("is")) {
                let negated = take(.name("not"))
                let test = TemplateExpression.test(try name(), value)
                value = negated ? .not(test) : test
            } else {
                return value
            }
        }
    }

    private mutating func subscripted(_ value: TemplateExpression) throws -> TemplateExpression {
        var bounds: [TemplateExpression?] = [nil]
        while !take(.sign("]")) {
            if take(.sign(":")) {
                bounds.append(nil)
            } else if bounds.last! == nil {
                bounds[bounds.count - 1] = try expression()
            } else {
                throw unexpected()
            }
        }
        if bounds.count == 1, let key = bounds[0] { return .member(value, key) }
        guard 2...3 ~= bounds.count else { throw unexpected() }
        return .slice(value, from: bounds[0], to: bounds[1], step: bounds.count == 3 ? bounds[2] : nil)
    }

    private mutating func arguments() throws -> (plain: [TemplateExpression], named: [String: TemplateExpression]) {
        var (plain, named): ([TemplateExpression], [String: TemplateExpression]) = ([], [:])
        while !take(.sign(")")) {
            if case .name(let name)? = tokens.first, tokens.dropFirst().first == .sign("=") {
                tokens.removeFirst(2)
                named[name] = try expression()
            } else {
                plain.append(try expression())
            }
            guard take(.sign(",")) || tokens.first == .sign(")") else { throw unexpected() }
        }
        return (plain, named)
    }

    private mutating func primary() throws -> TemplateExpression {
        switch tokens.popFirst() {
        case .string(let text): return .value(.string(text))
        case .integer(let number): return .value(.integer(number))
        case .name("true"), .name("True"): return .value(.bool(true))
        case .name("false"), .name("False"): return .value(.bool(false))
        case .name("none"), .name("None"): return .value(.null)
        case .name(let name): return .name(name)
        case .sign("("):
            let inner = try expression()
            try expect(.sign(")"))
            return inner
        case .sign("["):
            var items: [TemplateExpression] = []
            while !take(.sign("]")) {
                items.append(try expression())
                guard take(.sign(",")) || tokens.first == .sign("]") else { throw unexpected() }
            }
            return .list(items)
        case let token: throw BundleError.unsupported("a chat template with \(token.map { "\($0)" } ?? "no end")")
        }
    }

    private mutating func deeper<Value>(_ parse: (inout Self) throws -> Value) throws -> Value {
        depth += 1
        defer { depth -= 1 }
        guard depth < Self.maxDepth else { throw BundleError.unsupported("a deeply nested chat template") }
        return try parse(&self)
    }

    private mutating func name() throws -> String {
        guard case .name(let name)? = tokens.popFirst() else { throw unexpected() }
        return name
    }

    private mutating func take(_ token: TemplateToken) -> Bool {
        guard tokens.first == token else { return false }
        tokens.removeFirst()
        return true
    }

    private mutating func expect(_ token: TemplateToken) throws {
        guard take(token) else { throw unexpected() }
    }

    private func unexpected() -> BundleError {
        .unsupported("a chat template with \(tokens.first.map { "\($0)" } ?? "no end") where it is not expected")
    }
}
