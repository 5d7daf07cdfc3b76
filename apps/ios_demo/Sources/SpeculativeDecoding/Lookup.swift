/// Drafts that repeat the text, as Python's `ssdevice.runtime.lookup` makes them: where the last tokens occurred before,
/// what followed them then replaces a stream's first candidate, as long as that was right more often.
struct Lookup {
    /// Tokens that must have occurred before, and how many are compared to find the occurrence with the longest match.
    static let (shortest, longest) = (3, 16)
    /// The fewest without streams.
    static let alone = 2
    /// Occurrences that are compared, the last ones first.
    static let recent = 8
    /// The lead that lookup begins with, and the largest that it can have.
    static let (start, most) = (-2, 8)
    /// A lead of the streams at which lookup rests, and for how many steps.
    static let (far, rest) = (-16, 1024)

    /// How much more often lookup was right than the first candidate of a stream, where the two differed.
    private var lead: Int
    private var resting = 0
    private let shortest: Int
    /// Where `shortest` tokens end and another follows.
    private var ends: [[Int32]: [Int]] = [:]
    /// Tokens of the text whose matches are in there.
    private var indexed = 0
    private var differing: (depth: Int, lookedUp: Int32, streamed: Int32)?

    /// `streams`: without them lookup always leads.
    init(streams: Bool) {
        (lead, shortest) = streams ? (Self.start, Self.shortest) : (Self.most, Self.alone)
    }

    /// Another prompt is answered. What was learned lasts.
    mutating func begin() {
        ends.removeAll(keepingCapacity: true)
        indexed = 0
    }

    /// The tokens after `last`, from a step; none, without a step, if there are no streams and the text does not repeat
    /// itself.
    mutating func step(_ cache: inout Cache, after last: Int32) throws -> [Int32] {
        if resting > 0 {
            resting -= 1
            return try cache.step(last)
        }
        if !cache.streams { cache.forgetDrafts() }
        improve(&cache, cache.text.prefix(cache.length) + [last])
        if !cache.streams { return differing?.depth == 0 ? try cache.step(last) : [] }
        let tokens = try cache.step(last)
        learn(tokens)
        return tokens
    }

    /// Replaces drafts that follow a text.
    private mutating func improve(_ cache: inout Cache, _ text: [Int32]) {
        differing = nil
        for end in max(indexed, shortest)..<max(indexed, shortest, text.count) {
            ends[Array(text[end - shortest..<end]), default: []].append(end)
        }
        indexed = text.count
        var text = text
        for depth in 0..<cache.geometry.gamma {
            var best = cache.drafts[depth * cache.geometry.k]
            if let found = next(text), found != best {
                differing = differing ?? (depth, found, best)
                if lead > 0 {
                    cache.propose(found, at: depth)
                    best = found
                }
            }
            text.append(best)
        }
    }

    private mutating func learn(_ tokens: [Int32]) {
        guard let differing, differing.depth < tokens.count else { return }
        let token = tokens[differing.depth]
        lead += (differing.lookedUp == token ? 1 : 0) - (differing.streamed == token ? 1 : 0)
        lead = min(Self.most, lead)
        if lead <= Self.far { (lead, resting) = (Self.start, Self.rest) }
    }

    /// The token that followed the longest match of the text's end; the last occurrence wins a tie.
    private func next(_ text: [Int32]) -> Int32? {
        guard text.count >= shortest, let known = ends[Array(text.suffix(shortest))] else { return nil }
        var (best, length) = (known[0], 0)
        for end in known.suffix(Self.recent).reversed() {
            let most = min(end, Self.longest)
            let same = (0..<most).first { text[end - 1 - $0] != text[text.count - 1 - $0] } ?? most
            if same > length { (best, length) = (end, same) }
        }
        return text[best]
    }
}
