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
/// Steps pause when, since their best moment, they have lost more than a budget of plain calls against plain decoding
/// (a cumulative sum test).
struct Adaptive {
    /// Loss, in plain calls, at which steps pause: at first and while they win, and in the trials after a pause.
    static let (budget, trial) = (12.0, 4.0)
    /// Tokens decoded plainly before the next trial. The pause grows from trial to trial, unless steps have won in the
    /// end.
    static let (firstPause, longestPause, growth) = (32, 1024, 4)
    /// What steps can have won or lost in the end, at most, so that a text of another kind can change it.
    static let most = 2 * budget
    /// Steps before the first plain calls, which tell what plain decoding costs, and before one that tells it again.
    static let (calibrated, stale) = (4, 64)
    /// Plain calls that a step gains where there is no doubt; plain decoding is measured so many times less often then.
    static let (clear, longer) = (0.5, 4)

    var lookup: Lookup
    /// Whether the last call was a step.
    private(set) var speculated = false
    private let clock: () -> Double
    private var plain = Times()
    private var step = Times()
    /// Plain calls that steps have lost since their best moment.
    private var lost = 0.0
    /// Plain calls that they have won in the end, or lost.
    private var won = 0.0
    /// Since the last plain call.
    private var steps = 0
    /// Plain calls that these steps have won, or lost.
    private var gained = 0.0
    private var pause = firstPause
    /// Tokens to decode plainly from now on.
    private var paused = 0

    /// `clock`: in seconds.
    init(_ lookup: Lookup, clock: @escaping () -> Double) {
        self.lookup = lookup
        self.clock = clock
    }

    /// The tokens after `last`, from a step or from a plain call.
    mutating func next(_ cache: inout Cache, after last: Int32) throws -> [Int32] {
        let clear = gained > Self.clear * Double(steps)
        let known = clear ? Self.longer * Self.stale : Self.stale
        speculated = paused == 0 && steps < (plain.isKnown ? known : Self.calibrated)
        if speculated {
            let tokens = try byStep(&cache, last)
            speculated = !tokens.isEmpty
            return speculated ? tokens : try plainly(&cache, last)
        }
        let tokens = try plainly(&cache, last)
        paused = max(0, paused - 1)
        if plain.isKnown { (steps, gained) = (0, 0) }
        return tokens
    }

    private mutating func plainly(_ cache: inout Cache, _ last: Int32) throws -> [Int32] {
        let start = clock()
        let token = try cache.plain(last)
        plain.add(clock() - start)
        cache.shiftDrafts()
        return [token]
    }

    private mutating func byStep(_ cache: inout Cache, _ last: Int32) throws -> [Int32] {
        let start = clock()
        let tokens = try lookup.step(&cache, after: last)
        guard !tokens.isEmpty else { return tokens }
        step.add(clock() - start)
        steps += 1
        // The first draft after a plain call is an old one.
        guard plain.isKnown, steps > 1 else { return tokens }
        let gain = Double(tokens.count) - step.median / plain.median
        gained += gain
        lost = max(0, lost - gain)
        won = max(-Self.most, min(Self.most, won + gain))
        if won > 0 { pause = Self.firstPause }
        if lost > (pause == Self.firstPause ? Self.budget : Self.trial) {
            (lost, paused) = (0, pause)
            pause = min(Self.growth * pause, Self.longestPause)
        }
        return tokens
    }
}

/// The last eight times of a call, in seconds, without the very first, which opens a graph.
private struct Times {
    private var values: [Double] = []
    private var opened = false

    var isKnown: Bool { values.count >= 3 }
    var median: Double { values.isEmpty ? 0 : SpeculativeDecoding.median(values) }

    mutating func add(_ seconds: Double) {
        if values.count == 8 { values.removeFirst() }
        if opened { values.append(seconds) }
        opened = true
    }
}

/// Of one value or more.
public func median(_ values: [Double]) -> Double {
    let sorted = values.sorted()
    return (sorted[(sorted.count - 1) / 2] + sorted[sorted.count / 2]) / 2
}
