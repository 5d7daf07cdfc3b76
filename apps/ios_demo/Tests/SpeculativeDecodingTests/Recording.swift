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
        let calls: [Call]
    }

    struct Call: Decodable {
        let function: String
        let inputs: [String: [Int32]]
        let outputs: [String: [Int32]]
        let seconds: Double
    }

    let conversations: [Conversation]
}

/// The time that recorded calls took. Only the conversation's actor uses it.
final class RecordedClock: @unchecked Sendable {
    var now = 0.0
}

/// Answers with recorded outputs; a call that was not recorded fails the test.
final class RecordedEngine: Engine {
    let functions: Set<Function>
    private var calls: ArraySlice<Recording.Call>
    private let clock: RecordedClock
    private let atCall: (Int) -> Void
    private var done = 0

    init(
        _ functions: [String], _ calls: [Recording.Call], _ clock: RecordedClock,
        atCall: @escaping (Int) -> Void = { _ in }
    ) {
        self.functions = Set(functions.compactMap(Function.init))
        self.calls = calls[...]
        self.clock = clock
        self.atCall = atCall
    }

    func call(_ function: Function, _ inputs: [Tensor: [Int32]]) throws -> [Tensor: [Int32]] {
        atCall(done)
        done += 1
        let call = try XCTUnwrap(calls.popFirst(), "one call too many")
        XCTAssertEqual(function.rawValue, call.function)
        XCTAssertEqual(Dictionary(uniqueKeysWithValues: inputs.map { ($0.rawValue, $1) }), call.inputs)
        clock.now += call.seconds
        return Dictionary(
            uniqueKeysWithValues: call.outputs.compactMap { name, values in
                Tensor(rawValue: name).map { ($0, values) }
            })
    }
}
