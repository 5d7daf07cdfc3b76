import CoreML
import Foundation
import SpeculativeDecoding
import XCTest

@testable import SpeculativeDecodingCoreML

/// The integers of `golden.json` on this device. SSDEVICE_BUNDLE names a bundle folder; without it, the one that
/// `make swift-test` exports is taken.
final class GoldenTests: XCTestCase {
    private struct Golden: Decodable {
        struct Text: Decodable {
            let text: String
            let ids: [Int32]
        }

        struct Prefill: Decodable {
            let chunk: [Int32]
            let length: Int32
            let nextRoot: Int32
        }

        struct Step: Decodable {
            let root: Int32
            let drafts: [[Int32]]
            let length: Int32
            let tokens: [Int32]
            let margin: Double
        }

        struct Case: Decodable {
            let app: String
            let prefill: [Prefill]
            let plain: [Int32]
            let steps: [Step]?
        }

        let texts: [Text]
        let cases: [Case]
    }

    /// Where two tokens are nearer than this, a device may choose the other.
    private let nearTie = 0.1

    private func open() throws -> (ModelBundle, Golden) {
        let made = URL(filePath: #filePath).appending(path: "../../../../../build/swift/bundle").standardizedFileURL
        let named = ProcessInfo.processInfo.environment["SSDEVICE_BUNDLE"].map { URL(filePath: $0) }
        guard named != nil || FileManager.default.fileExists(atPath: made.path) else {
            throw XCTSkip("SSDEVICE_BUNDLE names no bundle")
        }
        let bundle = try ModelBundle(folder: named ?? made)
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        return (bundle, try decoder.decode(Golden.self, from: Data(contentsOf: bundle.url(role: "golden"))))
    }

    func testTokenizer() throws {
        let (bundle, golden) = try open()
        let tokenizer = try Tokenizer(file: bundle.url(role: "tokenizer"))
        for sample in golden.texts {
            XCTAssertEqual(tokenizer.encode(sample.text), sample.ids, sample.text)
        }
    }

    func testSteps() async throws {
        let (bundle, golden) = try open()
        let compiled = try await MLModel.compileModel(at: bundle.url(role: "model"))
        for (number, sample) in golden.cases.enumerated() {
            let engine = try await CoreMLEngine(bundle: bundle, app: bundle.app(sample.app), compiled: compiled)
            for call in sample.prefill {
                let padding = Array(repeating: Int32(0), count: bundle.manifest.geometry.chunk - call.chunk.count)
                let out = try engine.call(
                    .prefill,
                    Values([.chunk: call.chunk + padding, .valid: [Int32(call.chunk.count)], .length: [call.length]])
                ).ids
                XCTAssertEqual(out[.nextRoot], [call.nextRoot], "case \(number): prefill")
            }
            for (index, step) in (sample.steps ?? []).enumerated() {
                let out = try engine.call(
                    .step, Values([.root: [step.root], .drafts: step.drafts.flatMap { $0 }, .length: [step.length]])
                ).ids
                let tokens = try XCTUnwrap(out[.tokens]).prefix(Int(try XCTUnwrap(out[.count])[0]))
                if step.margin < nearTie, Array(tokens) != step.tokens { break }  // what follows is another text
                XCTAssertEqual(Array(tokens), step.tokens, "case \(number), step \(index)")
            }
        }
    }
}
