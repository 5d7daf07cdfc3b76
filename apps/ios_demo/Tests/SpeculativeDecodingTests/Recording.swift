import XCTest

@testable import SpeculativeDecoding

/// Conversations of Python's session with an engine, call by call.
struct Recording: Decodable {
    struct Conversation: Decodable {
        let geometry: Geometry
        let functions: [String]
        let stopIds: [Int32]
        let frames: Frames
        let answers: [Request]
    }

    struct Request: Decodable {
        struct Run: Decodable {
            let tokens: [Int32]
            let text: String
            let reason: String?
            let drafts: [Int32]?
        }

        let prompt: [Int32]?
        /// The user's next message, where the prompt is a conversation.
        let chat: String?
        let maxTokens: Int
        let stop: [String]
        let mode: String
        let runsWanted: Int?
        let refused: Bool
        let runs: [Run]
        let calls: [RecordedCall]
    }

    let conversations: [Conversation]
}

/// Sessions that hosts in all languages repeat; `tests/vectors/sessions.py` says how to read them.
struct RecordedSessions: Decodable {
    struct Session: Decodable {
        let what: String
        let geometry: Geometry
        let functions: [String]
        let streams: Bool
        let stopIds: [Int32]
        let answers: [Answer]
    }

    struct Answer: Decodable {
        let prompt: [Int32]
        let mode: String
        let maxTokens: Int
        let sampling: AskedSampling?
        let seed: String?
        let reason: String
        let runs: [[Int32]]
        let calls: [RecordedCall]
    }

    let sessions: [Session]
}

struct RecordedCall: Decodable {
    let function: String
    let inputs: [String: [Double]]
    /// A number of `logits` stands for a row of them.
    let outputs: [String: [Double]]
    let seconds: Double
}

/// Options of sampling by name.
struct AskedSampling: Decodable {
    let temperature, topP, minP, typicalP: Double?
    let repetitionPenalty, presencePenalty, frequencyPenalty: Double?
    let topK, noRepeatNgramSize, minNewTokens, minLength: Int?
    let logitBias: [String: Double]?
    let suppress, beginSuppress: [Int32]?
    let badWords: [[Int32]]?

    func made(seed: String) -> Sampling {
        var made = Sampling(temperature: temperature ?? 0, seed: UInt64(seed)!)
        made.topK = topK ?? 0
        made.topP = topP ?? 1
        made.minP = minP ?? 0
        made.typicalP = typicalP ?? 1
        made.repetitionPenalty = repetitionPenalty ?? 1
        made.presencePenalty = presencePenalty ?? 0
        made.frequencyPenalty = frequencyPenalty ?? 0
        made.noRepeatNgramSize = noRepeatNgramSize ?? 0
        made.minNewTokens = minNewTokens ?? 0
        made.minLength = minLength ?? 0
        for (token, bias) in logitBias ?? [:] { made.logitBias[Int32(token)!] = bias }
        made.suppress = suppress ?? []
        made.beginSuppress = beginSuppress ?? []
        made.badWords = badWords ?? []
        return made
    }
}

/// A row of logits of the test vectors.
func logits(_ vocab: Int, row: UInt32) -> [Float] {
    (0..<vocab).map { token in
        var x = UInt32(token + 1) &* 2_654_435_761 &+ (row &+ 1) &* 2_246_822_519
        x = (x ^ (x >> 15)) &* 2_246_822_519
        let z = Double((x ^ (x >> 13)) >> 8) / 0x1p24
        return Float(16 * z * z - 8)
    }
}

/// The time that recorded calls took. Only the conversation's actor uses it.
final class RecordedClock: @unchecked Sendable {
    var now = 0.0
}

/// Answers with recorded outputs; a call that was not recorded fails the test.
final class RecordedEngine: Engine {
    let functions: Set<Function>
    private let vocab: Int
    private var calls: ArraySlice<RecordedCall>
    private let clock: RecordedClock
    private let atCall: (Int) -> Void
    private var done = 0

    init(
        _ functions: [String], _ vocab: Int, _ calls: [RecordedCall], _ clock: RecordedClock,
        atCall: @escaping (Int) -> Void = { _ in }
    ) {
        self.functions = Set(functions.compactMap(Function.init))
        self.vocab = vocab
        self.calls = calls[...]
        self.clock = clock
        self.atCall = atCall
    }

    func call(_ function: Function, _ inputs: Values) throws -> Values {
        atCall(done)
        done += 1
        let call = try XCTUnwrap(calls.popFirst(), "one call too many")
        XCTAssertEqual(function.rawValue, call.function)
        XCTAssertEqual(Set(inputs.ids.keys).union(inputs.floats.keys), Set(function.inputs))
        for (name, wanted) in call.inputs {
            let tensor = try XCTUnwrap(Tensor(rawValue: name))
            let given = inputs.floats[tensor]?.map(Double.init) ?? inputs.ids[tensor]?.map(Double.init) ?? []
            // What is behind a path is undefined.
            let defined = tensor == .path ? Array(given.prefix(wanted.count)) : given
            XCTAssertEqual(defined, wanted, "\(call.function): \(name)")
        }
        clock.now += call.seconds
        var out = Values()
        for (name, values) in call.outputs {
            guard let tensor = Tensor(rawValue: name) else { continue }
            switch tensor {
            case .logits: out.floats[tensor] = values.flatMap { logits(vocab, row: UInt32($0)) }
            case .states: out.floats[tensor] = values.map(Float.init)
            default: out.ids[tensor] = values.map { Int32($0) }
            }
        }
        return out
    }
}
