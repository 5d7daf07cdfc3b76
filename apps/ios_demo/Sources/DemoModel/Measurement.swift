import Foundation
import SpeculativeDecoding

/// The numbers of one answer, as `Generation` of the Python runtime has them.
struct MeasuredAnswer: Decodable {
    let promptTokens: Int
    private(set) var tokens: [Int32] = []
    /// Tokens of each call after prefill.
    private(set) var accepted: [Int] = []
    /// What these calls verified, γ rows of k candidates; nil for plain ones.
    private(set) var drafts: [[Int32]?] = []
    private(set) var prefillSeconds = 0.0
    private(set) var decodeSeconds = 0.0
    private(set) var nativeSeconds = 0.0

    init(promptTokens: Int) {
        self.promptTokens = promptTokens
    }

    mutating func add(_ run: Run) {
        let seconds: Double = run.duration / .seconds(1)
        if tokens.isEmpty {
            prefillSeconds = seconds
        } else {
            accepted.append(run.tokens.count)
            drafts.append(run.drafts)
            decodeSeconds += seconds
            nativeSeconds += run.engineSeconds
        }
        tokens += run.tokens
    }

    var emitted: Int { accepted.reduce(0, +) }
    var steps: Int { accepted.count }
    var hostSeconds: Double { decodeSeconds - nativeSeconds }
}

/// The answers of one decoding mode. `rounds`: by round, then by prompt.
struct Measured {
    let mode: Mode
    var rounds: [[MeasuredAnswer]] = []

    var answers: [MeasuredAnswer] { rounds.first ?? [] }

    var tokensPerSecond: Spread { perRound { ratio(sum($0, \.emitted), sum($0, \.decodeSeconds)) } }
    var tokensPerStep: Double { ratio(sum(answers, \.emitted), sum(answers, \.steps)) }
    var ttftMs: Spread { perRound { round in median(round.map { $0.prefillSeconds * 1e3 }) } }
    var prefillTokensPerSecond: Spread { perRound { ratio(sum($0, \.promptTokens), sum($0, \.prefillSeconds)) } }
    var hostUsPerStep: Spread { perRound { ratio(sum($0, \.hostSeconds) * 1e6, sum($0, \.steps)) } }
    var nativeMsPerStep: Spread { perRound { ratio(sum($0, \.nativeSeconds) * 1e3, sum($0, \.steps)) } }

    /// Decoding time of each prompt that took a step: the median over rounds.
    var seconds: [Double] {
        answers.indices.filter { answers[$0].steps > 0 }.map { at in median(rounds.map { $0[at].decodeSeconds }) }
    }

    /// The speed on each prompt: the median over rounds, nil for an answer of one token.
    var promptTokensPerSecond: [Double?] {
        answers.indices.map { at in
            guard answers[at].steps > 0 else { return nil }
            return median(rounds.map { ratio(Double($0[at].emitted), $0[at].decodeSeconds) })
        }
    }

    private func perRound(_ value: ([MeasuredAnswer]) -> Double) -> Spread { Spread(rounds.map(value)) }

    private func sum(_ answers: [MeasuredAnswer], _ number: KeyPath<MeasuredAnswer, Int>) -> Double {
        Double(answers.reduce(0) { $0 + $1[keyPath: number] })
    }

    private func sum(_ answers: [MeasuredAnswer], _ number: KeyPath<MeasuredAnswer, Double>) -> Double {
        answers.reduce(0) { $0 + $1[keyPath: number] }
    }
}

/// Median, quartiles and extremes of one value or more.
struct Spread {
    let low: Double
    let q1: Double
    let median: Double
    let q3: Double
    let high: Double

    init(_ values: [Double]) {
        let sorted = values.sorted()
        func quantile(_ share: Double) -> Double {
            let place = share * Double(sorted.count - 1)
            let below = Int(place)
            let above = min(below + 1, sorted.count - 1)
            return sorted[below] + (sorted[above] - sorted[below]) * (place - Double(below))
        }
        low = quantile(0)
        q1 = quantile(0.25)
        median = quantile(0.5)
        q3 = quantile(0.75)
        high = quantile(1)
    }

    var json: [String: Any] { ["median": median, "q1": q1, "q3": q3, "low": low, "high": high] }
}

/// How many tokens steps emitted, and how often each stream and rank held the true token. A draft is judged by the
/// answer itself, whether or not its step got that far.
struct Acceptance {
    private let gamma: Int
    private let k: Int
    private var held: [[Int]]
    private var judged: [Int]
    private var emitted: [Int: Int] = [:]

    init(gamma: Int, k: Int) {
        self.gamma = gamma
        self.k = k
        held = Array(repeating: Array(repeating: 0, count: k), count: gamma)
        judged = Array(repeating: 0, count: gamma)
    }

    mutating func add(_ answer: MeasuredAnswer) {
        var at = 1  // the first token came from prefill
        for (drafts, count) in zip(answer.drafts, answer.accepted) {
            defer { at += count }
            guard let drafts else { continue }
            emitted[count, default: 0] += 1
            for stream in 0..<gamma where at + stream < answer.tokens.count {
                judged[stream] += 1
                let candidates = drafts[stream * k..<(stream + 1) * k]
                if let rank = candidates.firstIndex(of: answer.tokens[at + stream]) {
                    held[stream][rank - candidates.startIndex] += 1
                }
            }
        }
    }

    /// Number of steps that emitted 1, 2, .. `most` tokens.
    func histogram(_ most: Int) -> [Int] { (1...most).map { emitted[$0] ?? 0 } }

    /// γ rows of k shares; 0 where nothing was judged.
    var table: [[Double]] {
        zip(held, judged).map { row, total in row.map { ratio(Double($0), Double(total)) } }
    }
}

func ratio(_ a: Double, _ b: Double) -> Double { b == 0 ? 0 : a / b }
