import Foundation

/// What a user may ask of the choice of tokens; the defaults choose greedily. Meaning and order are those of Python's
/// `Sampling`.
public struct Sampling: Equatable, Sendable {
    public var temperature = 0.0
    public var topK = 0
    public var topP = 1.0
    public var minP = 0.0
    public var typicalP = 1.0
    public var repetitionPenalty = 1.0
    public var presencePenalty = 0.0
    public var frequencyPenalty = 0.0
    public var noRepeatNgramSize = 0
    public var minNewTokens = 0
    public var minLength = 0
    public var logitBias: [Int32: Double] = [:]
    public var suppress: [Int32] = []
    public var beginSuppress: [Int32] = []
    public var badWords: [[Int32]] = []
    public var seed: UInt64 = 0

    public init(temperature: Double = 0, seed: UInt64 = 0) {
        self.temperature = temperature
        self.seed = seed
    }

    /// Sampling as a model recommends; in everything else with the defaults, at temperature 1.
    init(recommended: Manifest.Sampling?, seed: UInt64) {
        self.init(temperature: recommended?.temperature ?? 1, seed: seed)
        guard let recommended else { return }
        topK = recommended.topK ?? topK
        topP = recommended.topP ?? topP
        minP = recommended.minP ?? minP
        typicalP = recommended.typicalP ?? typicalP
        repetitionPenalty = recommended.repetitionPenalty ?? repetitionPenalty
        noRepeatNgramSize = recommended.noRepeatNgramSize ?? noRepeatNgramSize
        minNewTokens = recommended.minNewTokens ?? minNewTokens
        minLength = recommended.minLength ?? minLength
        suppress = recommended.suppress ?? suppress
        beginSuppress = recommended.beginSuppress ?? beginSuppress
        badWords = recommended.badWords ?? badWords
    }

    /// Whether every token is the likeliest of the model's own logits, which the graph can choose as well.
    var isGreedy: Bool {
        guard temperature == 0 else { return false }
        var processors = self
        (processors.topK, processors.topP, processors.minP, processors.typicalP, processors.seed) = (0, 1, 0, 1, 0)
        return processors == Sampling()
    }

    /// Throws a request error for a value outside of its range, or a token that the model does not have.
    ///
    /// With these ranges scores are finite for logits up to 1e30, as Python's options say.
    func check(vocab: Int) throws {
        let parts = Double.leastNonzeroMagnitude...1
        let numbers: [(name: String, value: Double, range: ClosedRange<Double>, expected: String)] = [
            ("temperature", temperature, 0...100, "0 to 100"),
            ("topP", topP, parts, "above 0, at most 1"),
            ("minP", minP, 0...1, "0 to 1"),
            ("typicalP", typicalP, parts, "above 0, at most 1"),
            ("repetitionPenalty", repetitionPenalty, 0.01...100, "0.01 to 100"),
            ("presencePenalty", presencePenalty, -100...100, "-100 to 100"),
            ("frequencyPenalty", frequencyPenalty, -100...100, "-100 to 100"),
            ("topK", Double(topK), 0...0x1p31, "0 to 2147483648"),
            ("noRepeatNgramSize", Double(noRepeatNgramSize), 0...0x1p31, "0 to 2147483648"),
            ("minNewTokens", Double(minNewTokens), 0...0x1p31, "0 to 2147483648"),
            ("minLength", Double(minLength), 0...0x1p31, "0 to 2147483648"),
        ]
        for (name, value, range, expected) in numbers where !range.contains(value) {
            throw BundleError.request("\(name) is \(value), expected \(expected)")
        }
        if temperature > 0, temperature < 1e-6 {
            throw BundleError.request("temperature is \(temperature), expected 0 (greedy), or 1e-6 to 100")
        }
        for (token, bias) in logitBias where !(-1e30...1e30).contains(bias) && bias != -.infinity {
            throw BundleError.request(
                "logitBias of token \(token) is no number from -1e30 to 1e30, nor -inf, which bans it")
        }
        if badWords.contains(where: \.isEmpty) { throw BundleError.request("badWords has a sequence without tokens") }
        let ids = Array(logitBias.keys) + suppress + beginSuppress + badWords.flatMap { $0 }
        if let wrong = ids.first(where: { !(0..<vocab).contains(Int($0)) }) {
            throw BundleError.request("token \(wrong) is not one of the model's \(vocab)")
        }
    }
}

/// Chooses the tokens of one answer from logits, as Python's `Chooser` does.
///
/// For a seed every host chooses the same tokens, so precisions are part of the definition: processors and the division by
/// the temperature are in `Float`, rounded after each operation, the rest is in `Double`.
public struct Chooser: Sendable {
    private let sampling: Sampling
    private let stops: [Int32]
    private let prompt: Int
    private var text: [Int32]
    private var seen: Set<Int32>
    /// How often the answer has a token.
    private var counts: [Int32: Int] = [:]
    /// How many tokens truncation left for the last choice.
    private(set) var left = 0

    /// Throws a request error for what `Sampling` refuses.
    public init(_ sampling: Sampling, prompt: [Int32], stops: [Int32], vocab: Int) throws {
        try sampling.check(vocab: vocab)
        self.sampling = sampling
        self.stops = stops
        self.prompt = prompt.count
        text = prompt
        seen = Set(prompt)
    }

    /// The token after the text so far, which it then belongs to. A logit of -infinity rules a token out.
    ///
    /// Throws an error of damage for logits that are not numbers, or of which the best score is not finite; a request
    /// error if every token is forbidden.
    public mutating func choose(_ logits: [Float]) throws -> Int32 {
        let scores = processed(logits)
        let highest = scores.contains(where: \.isNaN) ? Float.nan : scores.max() ?? -.infinity
        if highest == -.infinity, logits.contains(where: { $0 != -.infinity }) {
            throw BundleError.request("the request forbids every token that the model could choose")
        }
        let temperature = Float(sampling.temperature)
        let best = temperature > 0 ? highest / temperature : highest
        guard best.isFinite else {
            throw BundleError.damaged("the model returned logits that are not numbers, or too large to choose from")
        }
        var token = scores.firstIndex(of: highest)!
        if temperature > 0 {
            let kept = Truncation(scores.map { $0 / temperature }, sampling)
            left = kept.scores.count { $0 > -.infinity }
            token = kept.best(Noise(seed: sampling.seed, position: text.count, vocab: logits.count))
        }
        let chosen = Int32(token)
        text.append(chosen)
        seen.insert(chosen)
        counts[chosen, default: 0] += 1
        return chosen
    }

    private func processed(_ logits: [Float]) -> [Float] {
        var scores = logits
        for (token, bias) in sampling.logitBias { scores[Int(token)] += Float(bias) }
        if sampling.repetitionPenalty != 1 {
            let penalty = Float(sampling.repetitionPenalty)
            for token in seen.map(Int.init) {
                scores[token] = scores[token] < 0 ? scores[token] * penalty : scores[token] / penalty
            }
        }
        if sampling.presencePenalty != 0 || sampling.frequencyPenalty != 0 {
            let (presence, frequency) = (Float(sampling.presencePenalty), Float(sampling.frequencyPenalty))
            for (token, count) in counts {
                let often = frequency * Float(count)
                scores[Int(token)] -= presence + often
            }
        }
        for token in banned() { scores[Int(token)] = -.infinity }
        return scores
    }

    private func banned() -> [Int32] {
        let answered = text.count - prompt
        var banned = sampling.suppress
        if answered == 0 { banned += sampling.beginSuppress }
        if answered < sampling.minNewTokens || text.count < sampling.minLength { banned += stops }
        let size = sampling.noRepeatNgramSize
        if size > 0, text.count >= size {
            let beginning = text.suffix(size - 1)
            banned += (size - 1..<text.count).filter { text[$0 - size + 1..<$0].elementsEqual(beginning) }.map { text[$0] }
        }
        // A stop token alone is not banned: no answer would end.
        let words = sampling.badWords.filter { $0.count > 1 || !stops.contains($0[0]) }
        for word in words where text.suffix(word.count - 1).elementsEqual(word.dropLast()) {
            banned.append(word[word.count - 1])
        }
        return banned
    }
}

/// The tokens that top-k, top-p, min-p and typical-p leave, ids ascending, and their scores.
struct Truncation {
    /// Surprises are as far from the entropy, a rounded sum, if they differ by less.
    private static let tie = 1e-12

    private(set) var ids: [Int]
    private(set) var scores: [Float]

    init(_ all: [Float], _ sampling: Sampling) {
        (ids, scores) = (Array(all.indices), all)
        if sampling.topK > 0, sampling.topK < all.count {
            let least = all.sorted(by: >)[sampling.topK - 1]
            keep { all[$0] >= least }
        }
        if sampling.topP < 1 { keepNucleus(sampling.topP) }
        if sampling.minP > 0 {
            let lowest = Double(scores.max()!) + log(sampling.minP)
            keep { [scores] in Double(scores[$0]) >= lowest }
        }
        if sampling.typicalP < 1 { keepTypical(sampling.typicalP) }
    }

    /// The token with the largest score plus noise; ties go to the lowest id. The noise of most tokens need not be known.
    func best(_ noise: Noise) -> Int {
        var (token, most) = (-1, -Double.infinity)
        func consider(_ at: Int) {
            let (id, score) = (ids[at], Double(scores[at]))
            if score + noise.most(near: id) < most - 1e-6 { return }
            let sum = score + noise.of(id)
            if sum > most || (sum == most && id < token) { (token, most) = (id, sum) }
        }
        consider(scores.firstIndex(of: scores.max()!)!)
        scores.indices.forEach(consider)
        return token
    }

    /// Keeps places in what was left so far.
    private mutating func keep(_ good: (Int) -> Bool) {
        let places = scores.indices.filter(good)
        (ids, scores) = (places.map { ids[$0] }, places.map { scores[$0] })
    }

    /// What tokens weigh, the likeliest 1.
    private func weights() -> [Double] {
        let highest = Double(scores.max()!)
        return scores.map { exp(Double($0) - highest) }
    }

    /// Keeps the fewest likeliest tokens that have a mass together.
    private mutating func keepNucleus(_ mass: Double) {
        let weights = weights()
        let total = weights.reduce(0, +)
        // All tokens below this weight together have less than 1 - mass.
        let lowest = (1 - mass) / Double(scores.count) * total
        let falling = scores.indices.filter { weights[$0] >= lowest }
            .sorted { scores[$0] == scores[$1] ? $0 < $1 : scores[$0] > scores[$1] }
        let nucleus = Set(falling.prefix(1 + Self.border(falling, weights, mass * total)))
        keep(nucleus.contains)
    }

    /// Keeps the tokens whose surprise is nearest to the entropy and that have a mass together (2202.00666).
    private mutating func keepTypical(_ mass: Double) {
        let weights = weights()
        let total = weights.reduce(0, +)
        let highest = Double(scores.max()!)
        let below = scores.map { Double($0) - highest }
        let mean = zip(weights, below).reduce(0.0) { $1.0 > 0 ? $0 + $1.0 / total * $1.1 : $0 }
        // Surprises differ from the entropy by as much.
        let far = below.map { abs($0 - mean) }
        let order = scores.indices.filter { weights[$0] > 0 }.sorted { far[$0] < far[$1] }
        let farthest = far[order[Self.border(order, weights, mass * total)]] + Self.tie
        keep { weights[$0] > 0 && far[$0] <= farthest }
    }

    /// The place in an order of tokens where those so far weigh a mass; at most the last one.
    private static func border(_ order: [Int], _ weights: [Double], _ mass: Double) -> Int {
        var reached = 0.0
        return order.firstIndex { at in
            reached += weights[at]
            return reached >= mass
        } ?? order.count - 1
    }
}
