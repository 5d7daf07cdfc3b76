import Foundation
import XCTest

@testable import SpeculativeDecoding

/// The integers of `golden.json` on this device. Set SSDEVICE_BUNDLE to a bundle folder.
final class GoldenTests: XCTestCase {
    struct Golden: Decodable {
        struct Text: Decodable {
            let text: String
            let ids: [Int32]
        }

        struct Prefill: Decodable {
            let length: Int
            let nextRoot: Int32
        }

        struct Step: Decodable {
            let root: Int32
            let drafts: [[Int32]]
            let length: Int
            let tokens: [Int32]
            let nextDrafts: [[Int32]]
            let margin: Double
        }

        struct Case: Decodable {
            let app: String
            let prompt: [Int32]
            let prefill: [Prefill]
            let plain: [Int32]
            let steps: [Step]?
        }

        let texts: [Text]
        let cases: [Case]
    }

    /// Where two tokens are nearer than this, a device may choose the other.
    let nearTie = 0.1

    func open() throws -> (ModelBundle, Golden) {
        guard let path = ProcessInfo.processInfo.environment["SSDEVICE_BUNDLE"] else {
            throw XCTSkip("SSDEVICE_BUNDLE names no bundle")
        }
        let bundle = try ModelBundle(folder: URL(filePath: path))
        return (bundle, try ModelBundle.read(Golden.self, at: bundle.url(role: "golden")))
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
        for (number, sample) in golden.cases.enumerated() {
            let target = try await Target(bundle: bundle, app: sample.app)
            await target.reset()
            let root = try await target.prefill(sample.prompt)
            XCTAssertEqual(root, sample.prefill.last?.nextRoot, "case \(number): prefill")
            for (index, step) in (sample.steps ?? []).enumerated() {
                await target.setLength(step.length)
                let tokens = try await target.step(step.root, drafts: step.drafts.flatMap { $0 })
                if step.margin < nearTie, tokens != step.tokens { break }  // what follows is another text
                XCTAssertEqual(tokens, step.tokens, "case \(number), step \(index)")
            }
        }
    }

    func testCharactersAreWhole() {
        var text = UTF8Assembler()
        let bytes = Array("aé🙂".utf8)
        XCTAssertEqual(bytes.map { text.add([$0]) }.joined(), "aé🙂")
        XCTAssertEqual(UTF8Assembler.incompleteSuffix([0xF0, 0x9F]), 2)
        XCTAssertEqual(UTF8Assembler.incompleteSuffix([0x61]), 0)
    }
}
