/// The text of an answer while its tokens arrive, until a stop token or a stop string. Text that is out never changes.
struct TextOutput: Sendable {
    private let tokenizer: Tokenizer
    let stopIds: Set<Int32>
    private var characters = UTF8Stream()
    private var stops: StopStrings
    private(set) var stopped = false

    init(tokenizer: Tokenizer, stopIds: Set<Int32>, stops: [String]) {
        self.tokenizer = tokenizer
        self.stopIds = stopIds
        self.stops = StopStrings(stops)
    }

    /// The text that each token of a run settles, often none. Tokens after a stop do not count and get no entry.
    mutating func push(_ run: some Sequence<Int32>) -> [String] {
        var pieces: [String] = []
        for token in run where !stopped {
            if stopIds.contains(token) {
                pieces.append(finish())
            } else {
                let mark = tokenizer.mark(token)
                let text = mark.isEmpty ? characters.push(tokenizer.bytes(token)) : mark
                pieces.append(stops.push(text, shown: mark.isEmpty))
                stopped = stops.found
            }
        }
        return pieces
    }

    /// The rest when no more tokens come.
    mutating func finish() -> String {
        stopped = true
        return stops.push(characters.flush()) + stops.flush()
    }
}

/// Bytes of tokens to text. Characters that are not complete are held back.
struct UTF8Stream: Sendable {
    private var pending: [UInt8] = []

    mutating func push(_ bytes: [UInt8]) -> String {
        pending += bytes
        let whole = pending.dropLast(Self.incompleteSuffix(pending))
        pending.removeFirst(whole.count)
        return String(decoding: whole, as: UTF8.self)
    }

    /// The rest, a broken character as U+FFFD.
    mutating func flush() -> String {
        defer { pending = [] }
        return String(decoding: pending, as: UTF8.self)
    }

    /// How many bytes at the end begin a character that is not complete.
    static func incompleteSuffix(_ bytes: [UInt8]) -> Int {
        for (back, byte) in bytes.reversed().prefix(3).enumerated() where byte & 0b1100_0000 != 0b1000_0000 {
            let needed = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1
            return needed > back + 1 ? back + 1 : 0
        }
        return 0
    }
}

/// Finds the string that ends first, of several, in text that comes in pieces, and holds back what may begin one.
/// Special tokens are searched as they are written, though they are not shown.
struct StopStrings: Sendable {
    private let stops: [[UInt8]]
    private var held: [UInt8] = []
    private var shown: [Bool] = []  // for each byte that is held
    private(set) var found = false

    init(_ stops: [String]) { self.stops = stops.map { Array($0.utf8) } }

    /// The text that is certain to stand before any stop string; empty once one was found. What a special token is
    /// written as is not shown: it is searched and never given out.
    mutating func push(_ piece: String, shown isShown: Bool = true) -> String {
        guard !found else { return "" }
        let text = held + piece.utf8
        let visible = shown + [Bool](repeating: isShown, count: piece.utf8.count)
        var keep = text.count - (stops.map { Self.overlap(text, $0) }.max() ?? 0)
        let places = stops.compactMap { Self.place(of: $0, in: text) }
        if let first = places.min(by: { ($0.end, $0.at) < ($1.end, $1.at) }) {
            found = true
            keep = first.at
        }
        held = found ? [] : Array(text[keep...])
        shown = found ? [] : Array(visible[keep...])
        return Self.visible(text[..<keep], visible)
    }

    /// What was held back, now that no more text comes.
    mutating func flush() -> String {
        defer { (held, shown) = ([], []) }
        return Self.visible(held[...], shown)
    }

    private static func visible(_ text: ArraySlice<UInt8>, _ shown: [Bool]) -> String {
        String(decoding: zip(text, shown).filter { $0.1 }.map { $0.0 }, as: UTF8.self)
    }

    private static func place(of stop: [UInt8], in text: [UInt8]) -> (at: Int, end: Int)? {
        text.indices.first { text[$0...].starts(with: stop) }.map { ($0, $0 + stop.count) }
    }

    /// Length of the longest end of `text` that begins `stop` without completing it.
    private static func overlap(_ text: [UInt8], _ stop: [UInt8]) -> Int {
        let most = min(text.count, stop.count - 1)
        return (0...most).last { text.suffix($0).elementsEqual(stop.prefix($0)) } ?? 0
    }
}
