/// Drafts that repeat the text, as Python's `ssdevice.runtime.lookup` makes them: where the last tokens occurred before,
/// what followed them then replaces a stream's first candidate, as long as that was right more often.
struct Lookup: Sendable {
    /// Tokens that must have occurred before, and how many are compared to find the occurrence with the longest match.
    static let (shortest, longest) = (3, 16)
    /// Occurrences that are compared, the last ones first.
    static let recent = 8
    /// The lead that lookup begins with, and the largest that it can have.
    static let (start, most) = (-2, 8)
    /// A lead of the streams at which lookup rests, and for how many steps.
    static let (far, rest) = (-16, 1024)

    /// How much more often lookup was right than the first candidate of a stream, where the two differed.
    private var lead = start
    private var resting = 0
    /// Where `shortest` tokens end and another follows.
    private var ends: [[Int32]: [Int]] = [:]
    /// Tokens of the text whose tuples are in there.
    private var indexed = 0
    private var differing: (depth: Int, lookedUp: Int32, streamed: Int32)?

    /// Another prompt is answered. What was learned lasts.
    mutating func begin() {
        ends.removeAll(keepingCapacity: true)
        indexed = 0
    }

    /// Replaces drafts, γ rows of `k` ids, that follow the text. A replaced candidate becomes the next best.
    mutating func improve(_ drafts: inout [Int32], k: Int, after text: [Int32]) {
        differing = nil
        guard resting == 0 else {
            resting -= 1
            return
        }
        for end in max(indexed, Self.shortest)..<max(indexed, Self.shortest, text.count) {
            ends[Array(text[end - Self.shortest..<end]), default: []].append(end)
        }
        indexed = text.count
        var text = text
        for depth in 0..<drafts.count / k {
            let row = depth * k..<(depth + 1) * k
            let streamed = drafts[row.lowerBound]
            if let found = next(text), found != streamed {
                differing = differing ?? (depth, found, streamed)
                if lead > 0 {
                    drafts.replaceSubrange(row, with: ([found] + drafts[row].filter { $0 != found }).prefix(k))
                }
            }
            text.append(drafts[row.lowerBound])
        }
    }

    /// Learns from the tokens of the step that verified the drafts.
    mutating func learn(_ tokens: [Int32]) {
        guard let differing, differing.depth < tokens.count else { return }
        let token = tokens[differing.depth]
        lead += (differing.lookedUp == token ? 1 : 0) - (differing.streamed == token ? 1 : 0)
        lead = min(Self.most, lead)
        if lead <= Self.far { (lead, resting) = (Self.start, Self.rest) }
    }

    /// The token that followed the longest match of the text's end; the last occurrence wins a tie.
    private func next(_ text: [Int32]) -> Int32? {
        guard text.count >= Self.shortest, let known = ends[Array(text.suffix(Self.shortest))] else { return nil }
        var (best, length) = (known[0], 0)
        for end in known.suffix(Self.recent).reversed() {
            let most = min(end, Self.longest)
            let same = (0..<most).first { text[end - 1 - $0] != text[text.count - 1 - $0] } ?? most
            if same > length { (best, length) = (end, same) }
        }
        return text[best]
    }
}
