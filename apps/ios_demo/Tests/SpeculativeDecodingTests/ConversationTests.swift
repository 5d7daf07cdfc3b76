import XCTest

@testable import SpeculativeDecoding

/// Python's conversations, call by call: the same requests make the same calls and have the same answers.
final class ConversationTests: XCTestCase {
    private func recorded() throws -> ([Recording.Conversation], Tokenizer) {
        let found = try Fixtures.read(Recording.self, "conversations.json").conversations
        return (found, try Tokenizer(file: Fixtures.folder.appending(path: "tokenizers/base-7m/tokenizer.json")))
    }

    private func answer(
        _ request: Recording.Request, of recorded: Recording.Conversation, by conversation: Conversation,
        _ tokenizer: Tokenizer
    ) async throws -> Answer {
        var turn: Turn?
        if let message = request.chat {
            guard message.contains(where: { !$0.isWhitespace }) else { throw BundleError.request("no message") }
            turn = await conversation.turn(message)
        }
        let messages = try turn.map { try recorded.frames.prompt($0.messages) }
        return try Answer(
            conversation: conversation, geometry: recorded.geometry,
            prompt: request.prompt ?? tokenizer.encode(messages ?? ""),
            mode: XCTUnwrap(Mode(rawValue: request.mode)), maxTokens: request.maxTokens,
            output: TextOutput(tokenizer: tokenizer, stopIds: Set(recorded.stopIds), stops: request.stop),
            turn: turn
        )
    }

    func testRecordedConversations() async throws {
        let (all, tokenizer) = try recorded()
        for (number, recorded) in all.enumerated() {
            let clock = RecordedClock()
            let engine = RecordedEngine(
                recorded.functions, recorded.geometry.vocab, recorded.answers.flatMap(\.calls), clock)
            let conversation = Conversation(engine: engine, geometry: recorded.geometry) { clock.now }
            for (index, request) in recorded.answers.enumerated() {
                let place = "conversation \(number), answer \(index)"
                var runs: [Run] = []
                do {
                    let answer = try await answer(request, of: recorded, by: conversation, tokenizer)
                    XCTAssertFalse(request.refused, place)
                    if request.runsWanted != 0 {
                        for try await run in answer {
                            runs.append(run)
                            if runs.count == request.runsWanted { break }
                        }
                    }
                } catch let error as BundleError {
                    XCTAssertTrue(request.refused, "\(place): \(error.localizedDescription)")
                }
                XCTAssertEqual(runs.map(\.tokens), request.runs.map(\.tokens), place)
                // Bytes that are no character show at once here, and a little later in Python.
                let (text, expected) = (runs.map(\.text).joined(), request.runs.map(\.text).joined())
                XCTAssertTrue(runs.last?.reason == nil ? text.hasPrefix(expected) : text == expected, place)
                XCTAssertEqual(runs.map(\.drafts), request.runs.map(\.drafts), place)
                XCTAssertEqual(runs.map { $0.reason?.rawValue }, request.runs.map(\.reason), place)
            }
        }
    }

    func testACancelledTaskEndsTheAnswerAtAnyCall() async throws {
        let (all, tokenizer) = try recorded()
        var points = 0
        for recorded in all {
            // Its prompt begins like none before, so a new conversation makes the same calls.
            let whole = recorded.answers.first {
                $0.prompt != nil && $0.mode != "adaptive" && 6...99 ~= $0.calls.count
                    && $0.calls[0].inputs["length"] == [0]
            }
            guard let request = whole else { continue }
            let prefills = request.calls.count { $0.function == "prefill" }
            for point in 0..<request.calls.count {
                let vocab = recorded.geometry.vocab
                let engine = RecordedEngine(recorded.functions, vocab, request.calls, RecordedClock()) { call in
                    if call == point { withUnsafeCurrentTask { $0?.cancel() } }
                }
                let conversation = Conversation(engine: engine, geometry: recorded.geometry)
                let answer = try await answer(request, of: recorded, by: conversation, tokenizer)
                let runs = try await Task { try await answer.reduce(into: []) { $0.append($1.tokens) } }.value
                let complete = max(0, point + 2 - prefills)
                XCTAssertEqual(runs, request.runs.prefix(complete).map(\.tokens))
                points += 1
            }
        }
        XCTAssertGreaterThan(points, 100)
    }

    /// The token after n is n + 1.
    struct CountingEngine: Engine {
        let functions: Set<Function> = [.prefill, .plain]

        func call(_ function: Function, _ inputs: Values) throws -> Values {
            let ids = inputs.ids
            guard function == .prefill else { return Values([.tokens: [ids[.root]![0] + 1]]) }
            return Values([.nextRoot: [ids[.chunk]![Int(ids[.valid]![0]) - 1] + 1]])
        }
    }

    func testANewAnswerEndsTheOneBefore() async throws {
        let (all, tokenizer) = try recorded()
        let conversation = Conversation(engine: CountingEngine(), geometry: all[0].geometry)
        func answer(_ prompt: [Int32]) throws -> Answer {
            try Answer(
                conversation: conversation, geometry: all[0].geometry, prompt: prompt, mode: .plain, maxTokens: 9,
                output: TextOutput(tokenizer: tokenizer, stopIds: [], stops: [])
            )
        }
        var first = try answer([5, 6, 7]).makeAsyncIterator()
        let second = try answer([10, 20])
        var tokens = try await first.next()?.tokens
        XCTAssertEqual(tokens, [8])
        tokens = try await second.reduce(into: []) { $0 += $1.tokens }
        XCTAssertEqual(tokens, Array(21...29))
        do {
            _ = try await first.next()
            XCTFail("the first answer goes on")
        } catch let error as BundleError {
            XCTAssertTrue(error.localizedDescription.contains("newer answer"))
        }
    }

    func testImpossibleResultsAreRefused() async throws {
        struct WrongEngine: Engine {
            let functions: Set<Function> = [.prefill]
            let outputs: [Tensor: [Int32]]
            func call(_ function: Function, _ inputs: Values) -> Values { Values(outputs) }
        }
        let (all, tokenizer) = try recorded()
        let geometry = all[0].geometry
        for outputs: [Tensor: [Int32]] in [
            [:], [.nextRoot: []], [.nextRoot: [-1]], [.nextRoot: [Int32(geometry.vocab)]],
            [.nextRoot: [0], .nextDrafts: [1]],
            [.nextRoot: [0], .nextDrafts: Array(repeating: -1, count: geometry.gamma * geometry.k)],
        ] {
            var answer = try Answer(
                conversation: Conversation(engine: WrongEngine(outputs: outputs), geometry: geometry),
                geometry: geometry, prompt: [1], mode: .speculative, maxTokens: 9,
                output: TextOutput(tokenizer: tokenizer, stopIds: [], stops: [])
            ).makeAsyncIterator()
            do {
                _ = try await answer.next()
                XCTFail("\(outputs)")
            } catch is BundleError {}
        }
    }
}
