/// How an answer is decoded. Its tokens are the same in every mode.
public enum Mode: String, CaseIterable, Sendable {
    /// By the graph for one token.
    case plain
    /// By the step, whose first token does not depend on drafts.
    case plainStep = "plain_step"
    case speculative
    /// Speculative where it pays, else plain.
    case adaptive

    /// The mode that fits an app's functions.
    public init(speculate: Bool, functions: Set<Function>) {
        let plain = functions.contains(.plain)
        if speculate, functions.contains(.step) {
            self = plain ? .adaptive : .speculative
        } else {
            self = plain ? .plain : .plainStep
        }
    }
}

/// Decides between steps and plain calls, as Python's `ssdevice.runtime.adaptive` does, so that no text is slower than
/// plainly. It serves one answer after another and remembers what it learned.
///
/// Steps pause when they have emitted fewer tokens than they cost in plain calls, beyond chance, and are tried again.
struct Adaptive {
    /// Steps pause when they have emitted too little by so many standard errors, or lost so many plain calls since their
    /// best moment.
    static let (doubt, most) = (1.5, 24.0)
    /// Tokens that they are given at first, lest chance spoil the first answer.
    static let credit = 8.0
    /// Of the time of plain decoding: what steps may lose. A pause lasts until that pays, or `short` tokens if they have
    /// won.
    static let (share, short) = (0.02, 32)
    /// What a draft costs is the median of the last pairs of neighbouring calls, at most so many and at least so many.
    static let (pairs, enough) = (32, 4)
    /// Plain calls in a row that measure the cost, and the steps before them for each ratio that is known.
    static let (probe, stepsEach) = (2, 3)
    /// Plain calls that a step gains where there is no doubt, and steps before the cost is measured then.
    static let (clear, rarely) = (0.5, 256)

    var lookup: Lookup
    /// Whether the last call was a step.
    private(set) var speculated = false
    private let clock: () -> Double
    /// Kinds of calls that were made; here and below, the drafts that it verifies.
    private var opened: Set<Int> = []
    /// The last call, with 0 seconds if it opened a graph.
    private var before = (kind: 0, seconds: 0.0)
    /// Of drafts, by neighbouring calls.
    private var prices: [Double] = []
    /// Of a draft, in plain calls, nil: not known yet; a step costs one plus this.
    private var price: Double?
    /// Tokens since the last pause.
    private var emitted = credit
    /// Steps since the last pause.
    private var count = 0.0
    /// Drafts of these steps.
    private var drafted = 0.0
    /// Plain calls that they have lost since their best moment.
    private var lost = 0.0
    /// Tokens to decode plainly from now on.
    private var paused = 0
    /// Since the last plain call.
    private var steps = 0
    /// Plain calls to make from now on.
    private var probes = 0

    /// `clock`: in seconds.
    init(_ lookup: Lookup, clock: @escaping () -> Double) {
        self.lookup = lookup
        self.clock = clock
    }

    /// The tokens after `last`, from a step or from a plain call.
    mutating func next(_ cache: inout Cache, after last: Int32) throws -> [Int32] {
        let rarely = won > Self.clear * count ? Self.rarely : Self.stepsEach * prices.count
        if steps >= (price == nil ? 1 : rarely) { (steps, probes) = (0, Self.probe) }
        speculated = paused == 0 && probes == 0
        if speculated {
            let tokens = try byStep(&cache, last)
            speculated = !tokens.isEmpty
            return speculated ? tokens : try plainly(&cache, last)
        }
        let tokens = try plainly(&cache, last)
        probes = max(0, probes - 1)
        if paused > 0 { (paused, steps) = (paused - 1, 0) }
        return tokens
    }

    private mutating func plainly(_ cache: inout Cache, _ last: Int32) throws -> [Int32] {
        let start = clock()
        let token = try cache.plain(last)
        time(0, since: start)
        cache.shiftDrafts()
        return [token]
    }

    private mutating func byStep(_ cache: inout Cache, _ last: Int32) throws -> [Int32] {
        let start = clock()
        let tokens = try lookup.step(&cache, after: last)
        guard !tokens.isEmpty else {
            steps = min(steps, 1)
            return tokens
        }
        let drafts = cache.verified.count / cache.geometry.k
        time(drafts, since: start)
        steps += 1
        guard let price else { return tokens }
        let paid = price * Double(drafts)
        lost = max(0, lost + 1 + paid - Double(tokens.count))
        // The first draft after a plain call is an old one.
        if steps > 1 { judge(Double(tokens.count), Double(drafts), paid) }
        return tokens
    }

    /// Plain calls that steps have saved since the last pause.
    private var won: Double { emitted - count - (price ?? 0) * drafted }

    private mutating func judge(_ tokens: Double, _ drafts: Double, _ paid: Double) {
        (emitted, count, drafted) = (emitted + tokens, count + 1, drafted + drafts)
        let (won, error) = (self.won, max(0, (price ?? 0) * drafted).squareRoot())
        if won < -Self.doubt * error || lost > Self.most {
            paused = won > 0 ? Self.short : Int((paid - won) / Self.share)
            (emitted, count, drafted, lost) = (0, 0, 0, 0)
        }
    }

    private mutating func time(_ kind: Int, since start: Double) {
        let seconds = opened.contains(kind) ? clock() - start : 0
        opened.insert(kind)
        let last = before
        before = (kind, seconds)
        guard seconds > 0, last.seconds > 0, (kind == 0) != (last.kind == 0) else { return }
        let ratio = kind == 0 ? last.seconds / seconds : seconds / last.seconds
        prices.append((ratio - 1) / Double(max(kind, last.kind)))
        if prices.count > Self.pairs { prices.removeFirst() }
        if prices.count >= Self.enough { price = median(prices) }
    }
}

/// Of one value or more.
public func median(_ values: [Double]) -> Double {
    let sorted = values.sorted()
    return (sorted[(sorted.count - 1) / 2] + sorted[sorted.count / 2]) / 2
}
