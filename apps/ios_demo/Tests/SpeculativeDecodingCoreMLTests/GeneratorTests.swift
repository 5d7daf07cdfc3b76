import Foundation
import SpeculativeDecoding
import SpeculativeDecodingCoreML
import XCTest

/// A bundle of two apps, exported from the shipped checkpoint: the prompts, tokens and texts of Python's session.
final class GeneratorTests: XCTestCase {
    private struct Expected: Decodable {
        struct Sample: Decodable {
            let app: String
            let prompt: String
            let ids: [Int32]
            let mode: String
            /// Of sampling as the model recommends; nil: greedily.
            let seed: UInt64?
            let maxTokens: Int
            let runs: [[Int32]]
            let text: String
        }

        struct Turn: Decodable {
            let message: String
            let tokens: [Int32]
            let text: String
        }

        let answers: [Sample]
        let chat: [Turn]
        let maxTokens: Int
    }

    private let folder = URL(filePath: #filePath).appending(path: "../../../../../build/swift").standardizedFileURL

    private let compiled = CompiledModels(
        folder: FileManager.default.temporaryDirectory.appending(path: UUID().uuidString))

    private func expected() throws -> Expected {
        let file = folder.appending(path: "answers.json")
        guard FileManager.default.fileExists(atPath: file.path) else {
            throw XCTSkip("make swift-test writes answers.json")
        }
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        return try decoder.decode(Expected.self, from: Data(contentsOf: file))
    }

    func testAnswersOfTwoAppsAreThoseOfPython() async throws {
        let samples = try expected().answers
        let bundle = folder.appending(path: "bundle")
        let generator = try await Generator(folder: bundle, samples: true, compiled: compiled)
        for sample in samples + samples.prefix(1) {  // and back to the first app
            try await generator.use(sample.app)
            let ids = try await generator.promptIds(sample.prompt)
            XCTAssertEqual(ids, sample.ids)
            var runs: [[Int32]] = []
            var text = ""
            var speed = Speed()
            let mode = try XCTUnwrap(Mode(rawValue: sample.mode))
            let sampling = sample.seed.map { generator.sampling(seed: $0) } ?? Sampling()
            let answer = try await generator.answer(ids, mode: mode, maxTokens: sample.maxTokens, sampling: sampling)
            for try await run in answer {
                runs.append(run.tokens)
                text += run.text
                speed.add(run)
            }
            XCTAssertEqual(runs, sample.runs, sample.prompt)
            XCTAssertEqual(text, sample.text, sample.prompt)
            XCTAssertEqual(speed.steps, sample.runs.count - 1)
        }
    }

    func testAChatGoesOnAsInPython() async throws {
        let expected = try expected()
        let generator = try await Generator(folder: folder.appending(path: "bundle"), compiled: compiled)
        try await generator.use(expected.answers[0].app)
        for turn in expected.chat {
            let runs = try await generator.chat(turn.message, maxTokens: expected.maxTokens)
                .reduce(into: [Run]()) { $0.append($1) }
            XCTAssertEqual(runs.flatMap(\.tokens), turn.tokens, turn.message)
            XCTAssertEqual(runs.map(\.text).joined(), turn.text, turn.message)
        }
    }

    func testWhatCannotBeAnsweredIsRefused() async throws {
        _ = try expected()
        let generator = try await Generator(folder: folder.appending(path: "bundle"), app: "e2e", compiled: compiled)
        let long = String(repeating: "a b ", count: 300)
        for (prompt, maxTokens, stop) in [
            (" \n", 5, []), ("a", 0, []), ("a", 5, [""]), (long, 5, []), (String(repeating: long, count: 1000), 5, []),
        ] {
            do {
                _ = try await generator.answer(prompt, maxTokens: maxTokens, stop: stop)
                XCTFail("\(prompt.prefix(9)) was accepted")
            } catch BundleError.request {}
        }
        do {
            try await generator.use("nobody")
            XCTFail("there is no such app")
        } catch BundleError.request {}
        do {
            _ = try await generator.answer("a", sampling: generator.sampling())
            XCTFail("it was not opened for sampling")
        } catch BundleError.request {}
    }
}
