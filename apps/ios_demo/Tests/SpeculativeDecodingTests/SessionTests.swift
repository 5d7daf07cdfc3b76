import XCTest

@testable import SpeculativeDecoding

/// The sessions that hosts in all languages repeat: the same calls with the same integers, the same tokens.
final class SessionTests: XCTestCase {
    func testRecordedSessions() async throws {
        let sessions = try Fixtures.read(RecordedSessions.self, "sessions.json").sessions
        let tokenizer = try Tokenizer(file: Fixtures.folder.appending(path: "tokenizers/base-7m/tokenizer.json"))
        XCTAssertTrue(sessions.contains { $0.answers.contains { $0.sampling != nil } })
        XCTAssertEqual(sessions.filter { $0.functions.contains(Function.stepShort) }.count, 2)
        // Steps of two lengths, and the phrases that come with them, are those of ONNX bundles.
        for session in sessions where session.geometry.short ?? 0 == 0 {
            let (clock, geometry) = (RecordedClock(), session.geometry)
            let calls = session.answers.flatMap(\.calls)
            let engine = RecordedEngine(session.functions, geometry.vocab, calls, clock)
            let conversation = Conversation(engine: engine, geometry: geometry, streams: session.streams) { clock.now }
            for wanted in session.answers {
                let answer = try Answer(
                    conversation: conversation, geometry: geometry, prompt: wanted.prompt,
                    mode: XCTUnwrap(Mode(rawValue: wanted.mode)), maxTokens: wanted.maxTokens,
                    output: TextOutput(tokenizer: tokenizer, stopIds: Set(session.stopIds), stops: []),
                    sampling: wanted.sampling?.made(seed: XCTUnwrap(wanted.seed)) ?? Sampling()
                )
                let before = clock.now
                let runs = try await answer.reduce(into: [Run]()) { $0.append($1) }
                XCTAssertEqual(runs.map(\.tokens), wanted.runs, session.what)
                XCTAssertEqual(runs.last?.reason?.rawValue, wanted.reason, session.what)
                XCTAssertEqual(clock.now - before, wanted.calls.reduce(0) { $0 + $1.seconds }, session.what)
            }
        }
    }

    /// Functions for sampling that return too little.
    private struct ShortEngine: Engine {
        let functions: Set<Function> = [.prefill, .plain, .step, .verify, .verifyPlain, .draft]
        let numbers: Values
        func call(_ function: Function, _ inputs: Values) -> Values { numbers }
    }

    func testWhatCannotBeSampledIsAnError() async throws {
        let session = try XCTUnwrap(Fixtures.read(RecordedSessions.self, "sessions.json").sessions.last)
        let tokenizer = try Tokenizer(file: Fixtures.folder.appending(path: "tokenizers/base-7m/tokenizer.json"))
        func answer(_ engine: sending ShortEngine, _ mode: Mode, _ sampling: Sampling) throws -> Answer {
            // A stop token that the model does not have is none that it could choose.
            let output = TextOutput(tokenizer: tokenizer, stopIds: [0, Int32(session.geometry.vocab)], stops: [])
            return try Answer(
                conversation: Conversation(engine: engine, geometry: session.geometry), geometry: session.geometry,
                prompt: [1], mode: mode, maxTokens: 9, output: output, sampling: sampling)
        }
        var never = Sampling(temperature: 1)
        never.minNewTokens = 3
        for mode in [Mode.plain, .speculative, .adaptive] {
            for numbers in [Values(), Values(floats: [.logits: [1]]), Values(floats: [.logits: [], .states: []])] {
                do {
                    _ = try await answer(ShortEngine(numbers: numbers), mode, never).reduce(0) { $0 + $1.tokens.count }
                    XCTFail("\(numbers)")
                } catch BundleError.damaged {}
            }
        }
        XCTAssertThrowsError(try answer(ShortEngine(numbers: Values()), .plainStep, never))
        XCTAssertThrowsError(try answer(ShortEngine(numbers: Values()), .plain, Sampling(temperature: -1)))
    }
}
